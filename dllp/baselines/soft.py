"""Soft filter pruning: after every epoch the smallest filters are set to zero, and may grow back in the next one.

Equation: score = |F_j|_2; after each epoch F_j <- 0 for the share of each layer that the budget wants gone; after the
last one they are cut. Hyperparameters: the share, here the same for every layer and set by the budget.
Published: ResNet-56 on CIFAR-10, 0.24 points lost at 51% fewer FLOPs (as quoted by the DLLP paper's Table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllp.baselines.protocol import Method, Published, Scene
from dllp.train import Trainer


@dataclass(frozen=True)
class SoftFilters(Method):
    """Units by the l2 norm of their filters; what would go is zeroed after every epoch."""

    name = "sfp"
    title = "soft filter pruning (SFP)"
    paper = "He et al., Soft filter pruning for accelerating deep convolutional neural networks"
    year = 2018
    published = (Published("resnet56", 51, 0.24),)

    def step(self, trainer: Trainer, scene: Scene) -> None:
        if trainer.epoch_ends:
            self.zero(scene)

    @torch.no_grad()
    def zero(self, scene: Scene) -> None:
        """Set the filters to zero that a cut would remove now."""
        closed = ~scene.select(self.scores(scene))
        scene.particles.rows[:, scene.filters.coordinates[closed]] = 0

    def scores(self, scene: Scene) -> Tensor:
        return scene.ranked(scene.filter_matrix().norm(dim=1))
