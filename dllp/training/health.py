"""Which number broke: the first NaN or infinity in data, loss, gradient or gates; and runs that learned nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dllp.training.trainer import Trainer


def in_data(trainer: Trainer, x: Tensor, y: Tensor) -> str:
    """What is not finite in a batch; empty where nothing is. All processes of a run come here together."""
    return _first(trainer, _in_data(x, y))


def diagnose(trainer: Trainer, x: Tensor, y: Tensor) -> str:
    """Run a step of an unhealthy trainer once more and name what is not finite; empty where nothing is.

    All processes of a run come here together, and return what the first of them finds that finds something.
    """
    trouble = _first(trainer, find(trainer))
    if trouble:
        return trouble
    before = trainer.statistics.clone()
    trainer.statistics.zero_()
    trainer.step(x, y)
    losses = trainer.statistics[0].clone()
    trainer.statistics.copy_(before)
    return _first(trainer, _in_step(trainer, losses))


def _first(trainer: Trainer, text: str) -> str:
    """The first text of all processes that says something."""
    return next(filter(None, trainer.place.everyone.texts(text)), "")


def _in_data(x: Tensor, y: Tensor) -> str:
    for name, value in (("inputs", x), ("targets", y)):
        if value.is_floating_point() and not _finite(value):
            return f"NaN or infinity in the data ({name})"
    return ""


def _in_step(trainer: Trainer, losses: Tensor) -> str:
    for number, loss, row in zip(trainer.place.own, losses, trainer.particles.gradients, strict=True):
        if not _finite(loss):
            return f"NaN or infinity in the loss of particle {number + 1}{_layer(trainer, row)}"
        if not _finite(row):
            return f"NaN or infinity in the gradient of particle {number + 1}{_layer(trainer, row)}"
    return ""


def find(trainer: Trainer) -> str:
    """What is not finite in the gates, weights, momentum or buffers as they stand; empty where nothing is."""
    own = trainer.place.own
    for number, row in zip(own, trainer.belief.logits, strict=True):
        if not _finite(row):
            return f"NaN or infinity in the gate logits of particle {number + 1}{_module(trainer, row)}"
    for name, values in (("weights", trainer.particles.rows), ("momentum", trainer.momentum)):
        for number, row in zip(own, values, strict=True):
            if not _finite(row):
                return f"NaN or infinity in the {name} of particle {number + 1}{_layer(trainer, row)}"
    for number, network in zip(own, trainer.particles.active, strict=True):
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
    """Says so where a training's last epoch was no better than one answer to everything; empty where it was.

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


def _module(trainer: Trainer, row: Tensor) -> str:
    """The first module with a gate (U,) that is not finite."""
    scales = None if trainer.gating is None else trainer.gating.scales
    if scales is None:
        return ""
    broken = scales.module_sums((~row.isfinite()).to(row.dtype)[None])[0].tolist()
    return next((f" (layer {name})" for name, count in zip(scales.modules, broken, strict=True) if count), "")


def _layer(trainer: Trainer, row: Tensor) -> str:
    """The first parameter of a row, from the network's end on, that is not finite: where backward met it first."""
    segments = reversed(list(trainer.particles.layout.segments.values()))
    broken = [segment.name for segment in segments if not _finite(segment.view(row))]
    return f" (layer {broken[0]})" if broken else ""
