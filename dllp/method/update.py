"""Equation 15 on the matrix of particles, elementwise, so that one kernel can do it all: by SGD or by AdamW."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dllp.method import stein

ADAM_BETA2, ADAM_EPSILON = 0.999, 1e-8
"""Adam's second inertia and the least root it divides by, as in PyTorch; the first inertia is the momentum."""


def score_of(gradients: Tensor, scores: Tensor | None, moving: Tensor) -> Tensor:
    """(n, P): gradient of the mean log-posterior; the arguments are those of :func:`update_rows`."""
    return -gradients if scores is None else scores * moving


def update_rows(
    rows: Tensor, gradients: Tensor, momentum: Tensor, scores: Tensor | None,
    weights: tuple[Tensor, Tensor] | tuple[()], index: Tensor | None, decayed: Tensor, moving: Tensor,
    lr: Tensor | float, healthy: Tensor, decay: float, beta: float, inertia: float,
) -> None:  # fmt: skip
    """theta_i <- theta_i - lr (grad CE_i - beta phi_i) for (n, P) rows, with Nesterov momentum, in place.

    Args:
        gradients: Of the task loss.
        scores: Of likelihood and prior; None where they are minus the gradients.
        weights: Of :func:`dllp.method.stein.pair_weights`; empty where particles do not interact.
        index: Blocks of the columns, of :func:`dllp.method.stein.block_index`.
        decayed: (P,) where weight decay acts: bool, or its factor.
        moving: (n, P) bool, False where a weight stands still.
        lr: (), (P,) or a number: with a number every operation is that of `torch.optim.SGD`, to the last bit.
        healthy: () bool; False changes nothing, so that a broken number cannot spread.
    """
    step = driven(rows, gradients, scores, weights, index, moving, beta)
    step = torch.add(step, decayed * rows, alpha=decay) * moving
    velocity = inertia * momentum + step
    moved = plus(rows, torch.add(step, velocity, alpha=inertia), -lr)
    rows.copy_(torch.where(healthy, moved, rows))
    momentum.copy_(torch.where(healthy, velocity, momentum))


def driven(
    rows: Tensor, gradients: Tensor, scores: Tensor | None, weights: tuple[Tensor, Tensor] | tuple[()],
    index: Tensor | None, moving: Tensor, beta: float,
) -> Tensor:  # fmt: skip
    """(n, P): grad CE - beta phi, equation 15 without its step; the arguments are those of :func:`update_rows`."""
    score = score_of(gradients, scores, moving)
    phi = stein.combine(rows, score, *weights, index) if weights else score
    return gradients - beta * phi


def adamw_rows(
    rows: Tensor, gradient: Tensor, first: Tensor, second: Tensor, decayed: Tensor, moving: Tensor,
    lr: Tensor | float, corrections: tuple[Tensor, Tensor] | tuple[float, float], healthy: Tensor, decay: float,
    inertia: float,
) -> None:  # fmt: skip
    """Equation 15 preconditioned by Adam's second moment, weight decay apart from it, in place.

    Args:
        gradient: (n, P) grad CE - beta phi, of :func:`driven`.
        first, second: (n, P) running means of it and of its square.
        corrections: 1 - inertia^t and the root of 1 - ADAM_BETA2^t at step t.
        lr: (), (P,) or a number: with a number every operation is that of `torch.optim.AdamW`, to the last bit.
    """
    gradient = gradient * moving
    mean = first.lerp(gradient, 1 - inertia)
    square = torch.addcmul(second * ADAM_BETA2, gradient, gradient, value=1 - ADAM_BETA2)
    root = adam_root(square, corrections[1])
    if isinstance(lr, Tensor):
        moved = rows * (1 - lr * decay * (decayed * moving)) - lr / corrections[0] * mean / root
    else:
        even = decayed.dtype == torch.bool  # one factor, as a number: a vector of them would be rounded once more
        shrunk = torch.where(decayed, rows * (1 - lr * decay), rows) if even else rows * (1 - lr * decay * decayed)
        moved = torch.addcdiv(shrunk, mean, root, value=-(lr / float(corrections[0])))
    rows.copy_(torch.where(healthy & moving, moved, rows))
    first.copy_(torch.where(healthy, mean, first))
    second.copy_(torch.where(healthy, square, second))


def adam_root(second: Tensor, correction: Tensor | float) -> Tensor:
    """(...) -> (...): what Adam divides a coordinate's step by, the root of its corrected second moment."""
    return (second.sqrt() / correction).add_(ADAM_EPSILON)


def plus(rows: Tensor, step: Tensor, factor: Tensor | float) -> Tensor:
    """(n, P): rows + factor * step; of a number with one rounding, as optimisers on the CPU do it."""
    return rows + factor * step if isinstance(factor, Tensor) else torch.add(rows, step, alpha=factor)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this module as one kernel, with code of its own.

    PyTorch keeps what it compiled with the code of a function, and gives up on a code after eight shapes: in a process
    that trains many networks the later ones would do without.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)  # type: ignore[attr-defined]
    return torch.compile(own, dynamic=False)


def correct_rows(
    rows: Tensor, momentum: Tensor, at: Tensor, excess: Tensor, lr: Tensor | float, healthy: Tensor, inertia: float
) -> None:
    """Take `excess` (n, K) at the coordinates `at` (K,) out of the step that :func:`update_rows` has just made.

    The step enters velocity and weights linearly, so that it is as if it had never been in it.
    """
    excess = torch.where(healthy, excess, 0)
    momentum[:, at] -= excess
    rows[:, at] += lr * (1 + inertia) * excess
