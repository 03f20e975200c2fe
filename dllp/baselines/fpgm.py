"""Filter pruning via geometric median: what the others can replace goes first, not what is small.

Equation: score_j = sum_i |F_i - F_j|_2 over the filters of a layer; the least is the filter nearest to the layer's
geometric median. After an epoch such filters are set to zero and may grow back, as in soft filter pruning, and as
there F_j is the filter as the network applies it, the norm's factor included.
Hyperparameters: `begin`, as there; the share of each layer, the same for all and set by the budget.
Published: ResNet-56 on CIFAR-10, 0.10 points lost at 53% fewer FLOPs (as quoted by the DLLP paper's Table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllp.baselines.protocol import Published, Scene
from dllp.baselines.soft import SoftFilters, applied


@dataclass(frozen=True)
class GeometricMedian(SoftFilters):
    """Units by the distance of their filters to all others of the layer; what would go is zeroed epoch by epoch."""

    name = "fpgm"
    title = "geometric median (FPGM)"
    paper = "He et al., Filter pruning via geometric median for deep convolutional neural networks acceleration"
    year = 2019
    published = (Published("resnet56", 53, 0.1),)

    def scores(self, scene: Scene) -> Tensor:
        filters = applied(scene)
        parts = filters.split(list(scene.filters.lengths))
        # by differences: a product of matrices would lose those of filters that are nearly alike
        distances = [torch.cdist(part, part, compute_mode="donot_use_mm_for_euclid_dist").sum(1) for part in parts]
        # what the last epoch has zeroed goes, however far from the others zero may lie
        return scene.ranked(torch.where(filters.any(dim=1), torch.cat(distances), -1))
