"""The factor on losses that keeps the small gradients of a float16 backward pass above zero."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, LEAST = 2.0**16, 1.0
"""Factors that a run begins with, and at which a gradient that is still not finite is an error."""
SOUND_STEPS = 2000
"""Sound steps in a row after which the factor is doubled."""


class LossScale:
    """Halved by a step whose gradients overflow, which moves nothing, and doubled after many sound ones.

    All on the device: a captured step reads nothing back.

    Attributes:
        values: (3,) the factor, sound steps in a row, and steps that were skipped so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.tensor([FIRST, 0.0, 0.0], device=device)

    @property
    def factor(self) -> Tensor:
        """() by which losses are multiplied."""
        return self.values[0]

    @property
    def skipped(self) -> Tensor:
        """() steps that moved nothing."""
        return self.values[2]

    def unscale_(self, *gradients: Tensor) -> None:
        """Take the factor out of gradients: a power of two, so that nothing is rounded."""
        for gradient in gradients:
            gradient.mul_(1 / self.factor)

    def update(self, sound: Tensor) -> Tensor:
        """() bool, gradients are finite -> () bool: False where they are not and the factor cannot be lowered."""
        factor, row, skipped = self.values
        bearable = sound | (factor > LEAST)
        row = torch.where(sound, row + 1, 0.0)
        ripe = row >= SOUND_STEPS
        factor = torch.where(sound, torch.where(ripe, 2 * factor, factor), (factor / 2).clamp_min(LEAST))
        self.values.copy_(torch.stack([factor, torch.where(ripe, 0.0, row), skipped + (~sound).to(factor.dtype)]))
        return bearable
