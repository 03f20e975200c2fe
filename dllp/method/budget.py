"""The budget: a cost-aware hyperprior on the gates, held by a multiplier (Section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

DUAL_STEP = {"channel": 0.02, "weight": 0.2}
"""Step of the budget's multiplier; many single weights need a faster one than channels."""
GAP_PENALTY = {"channel": 10.0, "weight": 50.0}
"""Weight of the squared gap between expected cost and ramp."""


def budget_energy(fraction: Tensor, ramp: Tensor, multiplier: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """(n,) expected cost over dense cost -> the energy -log p(z) of the cost-aware hyperprior, and the gap (n,)."""
    gap = fraction - ramp
    return multiplier * fraction + penalty * gap.square(), gap


def undecided(theta: Tensor) -> Tensor:
    """(..., U) -> share of gates whose probability is neither below 5% nor above 95%."""
    return ((theta > 0.05) & (theta < 0.95)).to(torch.float32).mean(-1)
