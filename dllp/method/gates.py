"""Bernoulli gates, their relaxation, the binary concrete (two-class Gumbel-softmax) of Section 3.2.2, and the budget.

The budget is a cost-aware hyperprior on the gates, held by a multiplier (Section 5). Pure functions; noise is
passed in, so that a step can be replayed and captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_LOGIT = 3.0
"""Logit of a gate at the start, 95% open; gates with a threshold begin at 0."""
DUAL_STEP = {"channel": 0.02, "weight": 0.2}
"""Step of the budget's multiplier; many single weights need a faster one than channels."""
GAP_PENALTY = {"channel": 10.0, "weight": 50.0}
"""Weight of the squared gap between expected cost and ramp."""


def to_logistic(noise: Tensor) -> Tensor:
    """(...) -> (...): uniform noise on [0, 1] as standard logistic noise, finite at both ends."""
    # Half an ulp at 1 is the smallest symmetric margin: 16.6 logits in float32, 36.7 in float64.
    margin = torch.finfo(noise.dtype).eps / 2
    inside = noise.clamp(margin, 1 - margin)
    return inside.log() - (-inside).log1p()


def relax(logit: Tensor, tau: Tensor | float, logistic: Tensor) -> Tensor:
    """(...) -> (...) in [0, 1]: relaxed gate sigmoid((logit + logistic) / tau) from logistic noise.

    P(z > 1/2) = sigmoid(logit) at every temperature; as tau falls to 0, z becomes Bernoulli(sigmoid(logit)).
    """
    return ((logit + logistic) / tau).sigmoid()


def median(logit: Tensor, tau: Tensor | float) -> Tensor:
    """(...) -> (...) in [0, 1]: the median of the relaxed gate, which is the one without noise."""
    return (logit / tau).sigmoid()


def sample(logit: Tensor, tau: Tensor | float, noise: Tensor) -> Tensor:
    """(...) -> (...) in [0, 1]: relaxed gate from *uniform* `noise` in (0, 1), such as a torch.rand of that shape."""
    return relax(logit, tau, to_logistic(noise))


def discretise(logit: Tensor) -> Tensor:
    """(...) -> (...) bool: the most probable gate, open where theta > 1/2."""
    return logit > 0


def budget_energy(fraction: Tensor, ramp: Tensor, multiplier: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """(n,) expected cost over dense cost -> the energy -log p(z) of the cost-aware hyperprior, and the gap (n,)."""
    gap = fraction - ramp
    return multiplier * fraction + penalty * gap.square(), gap


def undecided(theta: Tensor) -> Tensor:
    """(..., U) -> share of gates whose probability is neither below 5% nor above 95%."""
    return ((theta > 0.05) & (theta < 0.95)).to(torch.float32).mean(-1)
