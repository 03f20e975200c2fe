"""Equation 15 on the matrix of particles, elementwise, so that one kernel can do it all."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor

from dllp.method import stein


def score_of(gradients: Tensor, scores: Tensor | None, moving: Tensor) -> Tensor:
    """(n, P): gradient of the mean log-posterior; the arguments are those of :func:`update_rows`."""
    return -gradients if scores is None else scores * moving


def update_rows(
    rows: Tensor, gradients: Tensor, momentum: Tensor, scores: Tensor | None,
    weights: tuple[Tensor, Tensor] | tuple[()], index: Tensor | None, decayed: Tensor, moving: Tensor, lr: Tensor,
    healthy: Tensor, decay: float, beta: float, inertia: float,
) -> None:  # fmt: skip
    """theta_i <- theta_i - lr (grad CE_i - beta phi_i) for (n, P) rows, with Nesterov momentum, in place.

    Args:
        gradients: Of the task loss.
        scores: Of likelihood and prior; None where they are minus the gradients.
        weights: Of :func:`dllp.method.stein.pair_weights`; empty where particles do not interact.
        index: Blocks of the columns, of :func:`dllp.method.stein.block_index`.
        decayed: (P,) bool, where weight decay acts.
        moving: (n, P) bool, False where a weight stands still.
        healthy: () bool; False changes nothing, so that a broken number cannot spread.
    """
    score = score_of(gradients, scores, moving)
    phi = stein.combine(rows, score, *weights, index) if weights else score
    step = (gradients - beta * phi + decay * (decayed * rows)) * moving
    velocity = inertia * momentum + step
    rows.copy_(torch.where(healthy, rows - lr * (step + inertia * velocity), rows))
    momentum.copy_(torch.where(healthy, velocity, momentum))


def compiled_update() -> Callable[..., None]:
    """:func:`update_rows` as one kernel, with code of its own.

    PyTorch keeps what it compiled with the code of a function, and gives up on a code after eight shapes: in a process
    that trains many networks the later ones would do without.
    """
    own = FunctionType(update_rows.__code__.replace(), update_rows.__globals__, update_rows.__name__)
    return torch.compile(own, dynamic=False)


def correct_rows(
    rows: Tensor, momentum: Tensor, at: Tensor, excess: Tensor, lr: Tensor, healthy: Tensor, inertia: float
) -> None:
    """Take `excess` (n, U, M) at the coordinates `at` (U, M) out of the step that :func:`update_rows` has just made.

    The step enters velocity and weights linearly, so that it is as if it had never been in it.
    """
    excess = torch.where(healthy, excess, 0)
    momentum[:, at] -= excess
    rows[:, at] += lr * (1 + inertia) * excess
