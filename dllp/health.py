"""Which number broke: the first NaN or infinity in data, loss, gradient or gates, by particle and layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dllp.train import Trainer


def diagnose(trainer: Trainer, x: Tensor, y: Tensor) -> str:
    """Run a step of an unhealthy trainer once more and name what is not finite; empty where nothing is."""
    for name, value in (("inputs", x), ("targets", y)):
        if value.is_floating_point() and not _finite(value):
            return f"NaN or infinity in the data ({name})"
    for name, values in (("gate logits", trainer.belief.logits), ("weights", trainer.particles.rows)):
        for i, row in enumerate(values):
            if not _finite(row):
                return f"NaN or infinity in the {name} of particle {i + 1}{_layer(trainer, row, name)}"
    before = trainer.statistics.clone()
    trainer.statistics.zero_()
    trainer.step(x, y)
    losses = trainer.statistics[0].clone()
    trainer.statistics.copy_(before)
    for i, row in enumerate(trainer.particles.gradients):
        if not _finite(losses[i]):
            return f"NaN or infinity in the loss of particle {i + 1}{_layer(trainer, row, 'weights')}"
        if not _finite(row):
            return f"NaN or infinity in the gradient of particle {i + 1}{_layer(trainer, row, 'weights')}"
    return ""


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _layer(trainer: Trainer, row: Tensor, name: str) -> str:
    """The first parameter of a row, from the network's end on, that is not finite: where backward met it first."""
    if name != "weights":
        return ""
    segments = reversed(list(trainer.particles.layout.segments.values()))
    broken = [segment.name for segment in segments if not _finite(segment.view(row))]
    return f" (layer {broken[0]})" if broken else ""
