"""Equation 15 on the matrix of particles, elementwise, so that one kernel can do it all."""

from __future__ import annotations

import torch
from torch import Tensor

from dllp import stein


def score_of(gradients: Tensor, scores: Tensor | None, prior_scores: Tensor | None, moving: Tensor) -> Tensor:
    """(n, P): gradient of the mean log-posterior; the arguments are those of :func:`update_rows`."""
    score = -gradients if scores is None else scores * moving
    return score if prior_scores is None else score + prior_scores


def update_rows(
    rows: Tensor, gradients: Tensor, momentum: Tensor, scores: Tensor | None, prior_scores: Tensor | None,
    weights: tuple[Tensor, Tensor] | tuple[()], index: Tensor | None, decayed: Tensor, moving: Tensor, lr: Tensor,
    healthy: Tensor, decay: float, beta: float, inertia: float,
) -> None:  # fmt: skip
    """theta_i <- theta_i - lr (grad CE_i - beta phi_i) for (n, P) rows, with Nesterov momentum, in place.

    Args:
        gradients: Of the task loss.
        scores: Of the likelihood; None where it is the task loss itself.
        prior_scores: Of the prior; None once the gates are discrete.
        weights: Of :func:`dllp.stein.pair_weights`; empty where particles do not interact.
        index: (P,) block of every column.
        decayed: (P,) bool, where weight decay acts.
        moving: (n, P) bool, False where a weight stands still.
        healthy: () bool; False changes nothing, so that a broken number cannot spread.
    """
    score = score_of(gradients, scores, prior_scores, moving)
    phi = stein.combine(rows, score, *weights, index) if weights else score
    step = (gradients - beta * phi + decay * (decayed * rows)) * moving
    velocity = inertia * momentum + step
    rows.copy_(torch.where(healthy, rows - lr * (step + inertia * velocity), rows))
    momentum.copy_(torch.where(healthy, velocity, momentum))
