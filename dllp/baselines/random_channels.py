"""Random channels: what every criterion has to beat.

Equation: score ~ U(0, 1), the same for the same seed. Hyperparameters: none. Published: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllp.baselines.protocol import Method, Scene


@dataclass(frozen=True)
class Random(Method):
    """Units in random order, the same share of every layer."""

    name = "random"
    title = "random channels"
    paper = "Mittal et al., Recovering from random pruning"
    year = 2018

    def scores(self, scene: Scene) -> Tensor:
        generator = torch.Generator().manual_seed(scene.config.seed)
        return scene.ranked(torch.rand(scene.gating.units, generator=generator))
