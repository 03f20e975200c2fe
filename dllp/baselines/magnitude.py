"""Random channels, filters by their l1 norm, and single weights by their magnitude (the paper's Figure 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllp.baselines.protocol import Gradient, Method, Published, Scene, check_range, prior_penalty
from dllp.config import Config
from dllp.method.other_priors import PRIORS


@dataclass(frozen=True)
class Random(Method):
    """Units in random order, the same for the same seed, the same share of every layer: to be beaten."""

    name = "random"
    title = "random channels"
    paper = "Mittal et al., Recovering from random pruning"
    year = 2018

    def scores(self, scene: Scene) -> Tensor:
        generator = torch.Generator().manual_seed(scene.config.seed)
        return scene.ranked(torch.rand(scene.gating.units, generator=generator))


@dataclass(frozen=True)
class L1Filters(Method):
    """Units by the l1 norm of the filters that make them, the same share of every layer, set by the budget.

    The paper removes one share of the filters of each layer, layers of a stage alike, and retrains once.
    """

    name = "l1-filters"
    title = "L1-norm filters"
    paper = "Li et al., Pruning filters for efficient ConvNets"
    year = 2017
    published = (Published("resnet56", 34, 0.5),)

    def scores(self, scene: Scene) -> Tensor:
        return scene.ranked(scene.filter_matrix().abs().sum(1))


@dataclass(frozen=True)
class MagnitudeL2(Method):
    """Weights of an l2-regularised network, the largest first, one threshold for the whole network.

    Training minimises CE + decay / 2 * |w|_2^2, the MAP under a Gaussian prior (equation 4), with the recipe's own
    weight decay, so that the network is the dense one. What is kept is the tail beyond the threshold (equation 8).
    """

    name = "magnitude-l2"
    title = "magnitude, l2-regularised"
    paper = "Han et al., Learning both weights and connections for efficient neural networks"
    year = 2015
    granularity = "weight"

    def scores(self, scene: Scene) -> Tensor:
        return scene.gating.scales.of(scene.particles.rows)[0].abs()


@dataclass(frozen=True)
class MagnitudeL1(MagnitudeL2):
    """Weights of an l1-regularised network, the largest first.

    Training minimises CE + strength * |w|_1, the MAP under a Laplace prior (equation 3), without weight decay.
    """

    name = "magnitude-l1"
    title = "magnitude, l1-regularised"
    strength: float = 1e-5

    def __post_init__(self) -> None:
        check_range(strength=self.strength)

    def settings(self, config: Config) -> Config:
        return replace(config, weight_decay=0.0)

    def penalty(self, scene: Scene) -> Gradient:
        return prior_penalty(scene.gating.scales, PRIORS["laplace"], self.strength, 1.0)
