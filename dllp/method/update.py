"""Equation 15 on the matrix of particles, elementwise, so that one kernel can do it all: by SGD or by AdamW."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from dllp.method import spike_and_slab, stein

ADAM_BETA2, ADAM_EPSILON = 0.999, 1e-8
"""Adam's second inertia and the least root it divides by, as in PyTorch; the first inertia is the momentum."""
STRIP = 1 << 16
"""Columns that are updated at a time on the CPU: what is computed on the way stays in the processor's cache."""


def score_of(gradients: Tensor, scores: Tensor | None, moving: Tensor) -> Tensor:
    """(n, P): gradient of the mean log-posterior; the arguments are those of :func:`update_rows`."""
    return -gradients if scores is None else scores * moving


def update_rows(
    rows: Tensor, gradients: Tensor, momentum: Tensor, scores: Tensor | None,
    weights: tuple[Tensor, Tensor] | tuple[()], index: Tensor | None, decayed: Tensor, moving: Tensor,
    lr: Tensor | float, healthy: Tensor | Literal[True], decay: float, beta: float, inertia: float,
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
        healthy: () bool; False changes nothing, so that a broken number cannot spread. True where the host knows it.
    """
    step = driven(rows, gradients, scores, weights, index, moving, beta)
    step = torch.add(step, decayed * rows, alpha=decay) * moving
    velocity = inertia * momentum + step
    moved = plus(rows, torch.add(step, velocity, alpha=inertia), -lr)
    rows.copy_(_unless_broken(healthy, moved, rows))
    momentum.copy_(_unless_broken(healthy, velocity, momentum))


def driven(
    rows: Tensor, gradients: Tensor, scores: Tensor | None, weights: tuple[Tensor, Tensor] | tuple[()],
    index: Tensor | None, moving: Tensor, beta: float,
) -> Tensor:  # fmt: skip
    """(n, P): grad CE - beta phi, equation 15 without its step; the arguments are those of :func:`update_rows`."""
    score = score_of(gradients, scores, moving)
    phi = stein.combine(rows, score, *weights, index) if weights else score
    return gradients - beta * phi


def drive_rows(
    drive: Tensor, rows: Tensor, gradients: Tensor, scores: Tensor | None,
    weights: tuple[Tensor, Tensor] | tuple[()], index: Tensor | None, moving: Tensor, beta: float,
) -> None:  # fmt: skip
    """:func:`driven` into `drive` (n, P)."""
    drive.copy_(driven(rows, gradients, scores, weights, index, moving, beta))


def adamw_rows(
    rows: Tensor, gradient: Tensor, first: Tensor, second: Tensor, decayed: Tensor, moving: Tensor,
    lr: Tensor | float, corrections: tuple[Tensor, Tensor] | tuple[float, float], healthy: Tensor | Literal[True],
    decay: float, inertia: float,
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
    rows.copy_(torch.where(moving if healthy is True else healthy & moving, moved, rows))
    first.copy_(_unless_broken(healthy, mean, first))
    second.copy_(_unless_broken(healthy, square, second))


def _unless_broken(healthy: Tensor | Literal[True], new: Tensor, old: Tensor) -> Tensor:
    return new if healthy is True else torch.where(healthy, new, old)


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


def in_strips(function: Callable[..., None]) -> Callable[..., None]:
    """A function of this module called for one strip of columns after the other, with the same numbers.

    Temporaries of whole rows would pass through memory, and be mapped anew by the system at every step.
    """

    def call(rows: Tensor, *others: Any) -> None:
        columns = rows.shape[1]
        found = [columns // len(value) for value in others if _is_index(value)]
        span = found[0] if found else 1  # columns of one entry
        width = span * max(1, STRIP // span)
        for flag in filter(_is_flag, others):
            if not bool(flag):
                return
        known = [True if _is_flag(value) else value for value in others]
        for start in range(0, columns, width):
            part = slice(start, min(start + width, columns))
            function(rows[:, part], *(_strip(value, part, columns) for value in known))

    return call


def _is_flag(value: Any) -> bool:
    """True for `healthy`, which the CPU reads: what is broken changes nothing, and what is not needs no masks."""
    return isinstance(value, Tensor) and value.dtype == torch.bool and not value.dim()


def _is_index(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int32


def _strip(value: Any, part: slice, columns: int) -> Any:
    """Part of an argument that belongs to some columns: all of it where it is no matrix or vector of columns."""
    if isinstance(value, tuple):
        return tuple(_strip(each, part, columns) for each in value)
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if _is_index(value):
        span = columns // len(value)
        return value[part.start // span : part.stop // span]
    return value[..., part] if value.shape[-1] == columns else value


def shrink_rows(
    values: Tensor, spike: Tensor, second: Tensor | None, reach: Tensor | float, correction: Tensor | float
) -> None:
    """The spike's proximal step on weights (n, K), in place.

    Args:
        spike: (n, K) its pull in the score.
        second: Adam's second moment of the weights, where it divides their steps.
        reach: (), (K,) or a number: what a pull of 1 adds up to.
        correction: The root of 1 - ADAM_BETA2^t.
    """
    reach = reach if second is None else reach / adam_root(second, correction)
    values.copy_(spike_and_slab.proximal_spike(values, reach * spike))


def correct_rows(
    rows: Tensor, momentum: Tensor, at: Tensor, excess: Tensor, lr: Tensor | float, healthy: Tensor, inertia: float
) -> None:
    """Take `excess` (n, K) at the coordinates `at` (K,) out of the step that :func:`update_rows` has just made.

    The step enters velocity and weights linearly, so that it is as if it had never been in it.
    """
    excess = torch.where(healthy, excess, 0)
    momentum[:, at] -= excess
    rows[:, at] += lr * (1 + inertia) * excess
