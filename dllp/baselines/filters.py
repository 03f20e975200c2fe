"""Filters with the smallest l1 norm go first.

Equation: s_j = sum |F_j| over the filter F_j that makes channel j; the channel, its filter and what reads it are cut.
The paper removes one share m of the filters of each layer, layers of a stage alike, and retrains once.
Hyperparameters: the share, here the same for every layer and set by the budget.
Published: ResNet-56 on CIFAR-10, 0.5 points lost at 34% fewer FLOPs (as quoted by the DLLP paper's Table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllp.baselines.protocol import Method, Published, Scene


@dataclass(frozen=True)
class L1Filters(Method):
    """Units by the l1 norm of their filters, the same share of every layer."""

    name = "l1-filters"
    title = "L1-norm filters"
    paper = "Li et al., Pruning filters for efficient ConvNets"
    year = 2017
    published = (Published("resnet56", 34, 0.5),)

    def scores(self, scene: Scene) -> Tensor:
        return scene.ranked(scene.filter_matrix().abs().sum(1))
