"""The likelihood of equation 9, the task loss beside it, and the noise d that both learn from.

Everything is a mean over examples, of a regression over its outputs too, so that the temperature of the posterior is
1/N (Section 2): N counts what was observed, labels or numbers.
"""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Task = Literal["classification", "regression"]
HEAD_BOUND = 8.0
"""log d(x) stays within plus and minus this: variances from 1e-7 to 1e7, and never an overflow."""


def task_loss(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    """(B, C) outputs -> mean cross-entropy, or mean squared error."""
    if task == "classification":
        return F.cross_entropy(outputs, targets)
    return residuals(outputs, targets, task).square().mean()


def teacher_loss(outputs: Tensor, taught: Tensor, task: Task, temperature: float) -> Tensor:
    """(B, C) outputs -> T^2 times the cross-entropy to `taught` (B, C) probabilities; squared error of a regression.

    T^2, because the gradient of softened logits is smaller by that: the weight of the teacher keeps its meaning.
    """
    if task == "regression":
        return residuals(outputs, taught, task).square().mean()
    softened = F.log_softmax(outputs / temperature, dim=1)
    return -(temperature**2) * (taught * softened).sum(1).mean()


def residuals(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    """(B, C): onehot(y) - softmax f(x), or y - f(x) for regression."""
    outputs = outputs.flatten(1)
    if task == "classification":
        return F.one_hot(targets, outputs.shape[1]).to(outputs.dtype) - outputs.softmax(1)
    return targets.reshape(outputs.shape).to(outputs.dtype) - outputs


def gaussian_log_likelihood(residual: Tensor, log_d: Tensor) -> Tensor:
    """Equation 9, mean over examples: C (log d - log(2 pi)/2) - d^2 |r|^2 / 2 with d a root precision."""
    outputs = residual.shape[1]
    return outputs * (log_d - 0.5 * math.log(2 * math.pi)) - 0.5 * (2 * log_d).exp() * residual.square().sum(1).mean()


def split_noise(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C + 1) outputs -> (B, C) predictions, and the last output as (B,) log d(x), softly bounded."""
    outputs = outputs.flatten(1)
    return outputs[:, :-1], HEAD_BOUND * (outputs[:, -1] / HEAD_BOUND).tanh()


def input_log_likelihood(residual: Tensor, log_d: Tensor) -> Tensor:
    """Equation 9 with a root precision (B,) for each input, mean over examples."""
    outputs = residual.shape[1]
    fit = (2 * log_d).exp() * residual.square().sum(1)
    return (outputs * (log_d - 0.5 * math.log(2 * math.pi)) - 0.5 * fit).mean()


def head_loss(residual: Tensor, log_d: Tensor) -> Tensor:
    """Loss of d(x): equation 9 negated, its residuals detached, so that d(x) fits them and does not excuse them.

    Divided by 2C, the Fisher information of log d: whatever the number of outputs, a step is a natural one.
    """
    return -input_log_likelihood(residual.detach(), log_d) / (2 * residual.shape[1])


def noise_gradient(residual: Tensor, log_d: Tensor) -> Tensor:
    """Derivative of equation 9 in log d, in closed form; zero where 1/d^2 is the mean squared residual."""
    return residual.shape[1] - (2 * log_d).exp() * residual.square().sum(1).mean()


def fit_noise(residual: Tensor) -> Tensor:
    """(B, C) residuals -> the maximum-likelihood variance 1/d^2; Brier score / C for classification."""
    return residual.square().mean()


def fitted(noise: float, outputs: int) -> dict[str, float]:
    """The maximum-likelihood variance 1/d^2 of C outputs, and equation 9 at that d; the latter is unbounded at 0."""
    values = {"fitted_noise": noise}
    if noise > 0:
        values["log_likelihood"] = -0.5 * outputs * (math.log(2 * math.pi * noise) + 1)
    return values
