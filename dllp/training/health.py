"""Numerical health of a run: the first NaN or infinity by name, and runs that learned nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dllp.config import SPIKE_AND_SLAB
from dllp.devices import trees
from dllp.errors import NumericsError
from dllp.training.state import RunState
from dllp.training.step import step


def check(state: RunState) -> None:
    """Raise if a number broke in a recent step: the step is run once more to see which.

    That moves no weight; statistics of batch norms and what is learned beside the weights may move, in a run that
    ends here or goes back to its last checkpoint.
    """
    if not bool(state.healthy):
        for number, x, y in state.recent:
            data = in_data(state, x, y)
            trouble = data or diagnose(state, x, y)
            if trouble:
                raise broken(state, trouble, number + 1, in_data=bool(data))
        raise broken(state, "NaN or infinity", state.step_index)
    state.recent.clear()


def broken(state: RunState, trouble: str, number: int, *, in_data: bool = False) -> NumericsError:
    """The error that names what broke, when, and the way out."""
    c = state.config
    other = ", or use on_nan = rollback" if c.on_nan == "stop" else ""
    plain = state.gating is None or c.prior == SPIKE_AND_SLAB
    wider = "" if plain else f", raise prior_scale (now {c.prior_scale:g})"
    error = NumericsError(
        f"{trouble} at step {number} (epoch {(number - 1) // state.steps_per_epoch + 1}): lower lr "
        f"(now {c.lr * state.lr_scale:g}){wider}{other}"
    )
    error.reported_elsewhere, error.in_data = not state.place.first, in_data
    return error


def in_data(state: RunState, x: Any, y: Any) -> str:
    """Name the part of a batch that is not finite; empty where all is. Collective: all processes of a run call it."""
    return _first(state, _in_data(x, y))


def diagnose(state: RunState, x: Any, y: Any) -> str:
    """Repeat a step of an unhealthy run and name what is not finite; empty where nothing is.

    Collective: all processes of a run call it, and return what the first one that finds something found.
    """
    trouble = _first(state, find(state))
    if trouble:
        return trouble
    before = state.statistics.clone()
    state.statistics.zero_()
    step(state, x, y)
    losses = state.statistics[0].clone()
    state.statistics.copy_(before)
    return _first(state, _in_step(state, losses))


def _first(state: RunState, text: str) -> str:
    """The first text of all processes that is not empty."""
    return next(filter(None, state.place.everyone.all_gather_object(text)), "")


def _in_data(x: Any, y: Any) -> str:
    for name, values in (("inputs", x), ("targets", y)):
        if not all(_finite(value) for value in trees.tensors(values) if value.is_floating_point()):
            return f"NaN or infinity in the data ({name})"
    return ""


def _in_step(state: RunState, losses: Tensor) -> str:
    for number, loss, row in zip(state.place.own, losses, state.particles.gradients, strict=True):
        if not _finite(loss):
            return f"NaN or infinity in the loss of particle {number + 1}{_layer(state, row)}"
    return in_gradients(state)


def in_gradients(state: RunState) -> str:
    """Name the particle and the layer whose gradient is not finite; empty where all are."""
    return _in_rows(state, "gradient", state.particles.gradients, _layer)


def _in_rows(state: RunState, what: str, rows: Tensor, place: Callable[[RunState, Tensor], str]) -> str:
    """Name the first particle whose row of (n, ...) is not finite, and the place in it; empty where all are."""
    for number, row in zip(state.place.own, rows, strict=True):
        if not _finite(row):
            return f"NaN or infinity in the {what} of particle {number + 1}{place(state, row)}"
    return ""


def find(state: RunState) -> str:
    """Name the gates, weights, momentum or buffers that are not finite; empty where all are."""
    found = _in_rows(state, "gate logits", state.latents.logits, _module)
    found = found or _in_rows(state, "weights", state.particles.rows, _layer)
    found = found or _in_rows(state, "momentum", state.momentum, _layer)
    if found:
        return found
    for number, network in zip(state.place.own, state.particles.active, strict=True):
        for name, buffer in network.named_buffers():
            if buffer.is_floating_point() and bool(buffer.isnan().any()):  # infinities may be masks
                return f"NaN in the buffer {name} of particle {number + 1}"
    return ""


def constant_loss(targets: Tensor) -> float:
    """Loss of the best answer that is always the same: the entropy of the classes, or the variance of the targets."""
    if targets.is_floating_point():
        return float(targets.double().var(0, correction=0).mean())
    shares = targets.flatten().bincount().double() / targets.numel()
    return float(torch.special.entr(shares).sum())


def learned_nothing(losses: Sequence[float], targets: Tensor, budget: float | None) -> str:
    """A warning where the last epoch was no better than a constant prediction; empty where it was.

    Where all targets are equal that answer is right, and there is nothing to learn.
    """
    worst, constant = max(losses), constant_loss(targets)
    if worst < constant or not constant:
        return ""
    larger = "" if budget is None else " or a larger budget"
    return (
        f"the training loss ended at {worst:.4g}, no better than one answer to all inputs ({constant:.4g}): try a "
        f"lower lr, more epochs{larger}"
    )


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _module(state: RunState, row: Tensor) -> str:
    """The first module with a gate (U,) that is not finite."""
    scales = None if state.gating is None else state.gating.scales
    if scales is None:
        return ""
    broken = scales.module_sums((~row.isfinite()).to(row.dtype)[None])[0].tolist()
    return next((f" (layer {name})" for name, count in zip(scales.modules, broken, strict=True) if count), "")


def _layer(state: RunState, row: Tensor) -> str:
    """The first parameter of a row, from the network's end on, that is not finite: where backward met it first."""
    segments = reversed(list(state.particles.layout.segments.values()))
    broken = [segment.name for segment in segments if not _finite(segment.view(row))]
    return f" (layer {broken[0]})" if broken else ""
