"""The likelihood of equation 9, the task loss beside it, and the noise d that both learn from.

Everything is a mean over examples, of a regression over its outputs too, so that the temperature of the posterior is
1/N (Section 2): N counts what was observed, labels or numbers.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Task = Literal["classification", "binary", "regression"]
IGNORED = -100
"""Label of a token or pixel that does not count, as in PyTorch's cross-entropy."""
HEAD_BOUND = 8.0
"""log d(x) stays within plus and minus this: variances from 1e-7 to 1e7, and never an overflow."""


def class_last(outputs: Tensor) -> Tensor:
    """Logits with their classes last: (B, C) and (B, T, C) as they are, (B, C, H, W) and more axes as (B, H, W, C).

    Language models have the classes last, networks of images second.
    """
    return outputs.movedim(1, -1) if outputs.dim() > 3 else outputs


def per_position(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of tokens or pixels and their labels -> (K, C) and (K,), one row for each position."""
    logits = class_last(outputs)
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)


def observed(labels: Tensor) -> Tensor:
    """() number of labels that count."""
    return (labels != IGNORED).sum()


def task_loss(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    """Outputs -> mean cross-entropy, binary cross-entropy, or mean squared error.

    Classes are (B,) or soft (B, C) labels of logits (B, C), or one label for each token or pixel: the mean is over
    those that count. Yes-or-no labels have the logits' shape, 0 to 1, of one logit also (B,).
    """
    if task == "regression":
        return residuals(outputs, targets, task).square().mean()
    if task == "binary":
        return F.binary_cross_entropy_with_logits(outputs, targets.reshape(outputs.shape).to(outputs.dtype))
    if outputs.dim() == 2:
        return F.cross_entropy(outputs, targets)
    logits, labels = per_position(outputs, targets)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / observed(labels).clamp_min(1)


def teacher_loss(
    outputs: Tensor, taught: Tensor, task: Task, temperature: float, labels: Tensor | None = None
) -> Tensor:
    """Outputs -> T^2 times the cross-entropy to `taught` probabilities, classes last; squared error of a regression.

    T^2, because the gradient of softened logits is smaller by that: the weight of the teacher keeps its meaning.
    Tokens and pixels whose `labels` do not count are not taught.
    """
    if task == "regression":
        return residuals(outputs, taught, task).square().mean()
    if task == "binary":
        return temperature**2 * F.binary_cross_entropy_with_logits(outputs / temperature, taught)
    softened = F.log_softmax(class_last(outputs) / temperature, dim=-1)
    each = (taught * softened).sum(-1)
    if outputs.dim() == 2 or labels is None or labels.shape != each.shape:
        return -(temperature**2) * each.mean()
    counted = labels != IGNORED
    return -(temperature**2) * (each * counted).sum() / counted.sum().clamp_min(1)


def hits(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    """() fraction of right answers among the labels that count, in float64; 0 of a regression."""
    if task == "regression":
        return outputs.new_zeros((), dtype=torch.float64)
    if task == "binary":
        return ((outputs > 0) == (targets.reshape(outputs.shape) > 0.5)).double().mean()
    if outputs.dim() == 2:
        return (outputs.argmax(1) == (targets.argmax(1) if targets.dim() > 1 else targets)).double().mean()
    logits, labels = per_position(outputs, targets)
    return (logits.argmax(1) == labels).double().sum() / observed(labels).clamp_min(1)


def residuals(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    """(B, C): onehot(y) - softmax f(x), or y - f(x) for regression."""
    outputs = outputs.flatten(1)
    if task == "classification":
        given = targets if targets.is_floating_point() else F.one_hot(targets, outputs.shape[1])
        return given.to(outputs.dtype) - outputs.softmax(1)
    return targets.reshape(outputs.shape).to(outputs.dtype) - outputs


def gaussian_log_likelihood(residual: Tensor, log_d: Tensor) -> Tensor:
    """(B, C) residuals, () or (B,) log d -> (): equation 9, mean over examples, with d a root precision.

    C (log d - log(2 pi)/2) - d^2 |r|^2 / 2.
    """
    fit = (2 * log_d).exp() * residual.square().sum(1)
    return (residual.shape[1] * (log_d - 0.5 * math.log(2 * math.pi)) - 0.5 * fit).mean()


def split_noise(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C + 1) outputs -> (B, C) predictions, and the last output as (B,) log d(x), softly bounded."""
    outputs = outputs.flatten(1)
    return outputs[:, :-1], HEAD_BOUND * (outputs[:, -1] / HEAD_BOUND).tanh()


def head_loss(residual: Tensor, log_d: Tensor) -> Tensor:
    """Loss of d(x): equation 9 negated, its residuals detached, so that d(x) fits them and does not excuse them.

    Divided by 2C, the Fisher information of log d: whatever the number of outputs, a step is a natural one.
    """
    return -gaussian_log_likelihood(residual.detach(), log_d) / (2 * residual.shape[1])


def noise_gradient(residual: Tensor, log_d: Tensor) -> Tensor:
    """Derivative of equation 9 in log d, in closed form; zero where 1/d^2 is the mean squared residual."""
    return residual.shape[1] - (2 * log_d).exp() * residual.square().sum(1).mean()


def fitted(noise: float, outputs: int) -> dict[str, float]:
    """The maximum-likelihood variance 1/d^2, the mean squared residual, and equation 9 at that d, unbounded at 0."""
    values = {"fitted_noise": noise}
    if noise > 0:
        values["log_likelihood"] = -0.5 * outputs * (math.log(2 * math.pi * noise) + 1)
    return values
