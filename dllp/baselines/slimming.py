"""Network slimming: an l1 norm on the normalisation's scaling factors, and one threshold on them for all layers.

Equation: minimise CE + strength * sum |gamma| over channels that can be pruned, by subgradient; score = |gamma|.
A unit whose channels pass several norms has the root mean square of their factors; one without a norm has that of its
filters.
Hyperparameters: `strength`, 1e-4 in the paper for VGG and 1e-5 for ResNets, over 160 epochs; `least`, the share of each
layer that stays whatever its factors, which the paper does not have.
Published: ResNet-56 on CIFAR-10, 0.53 points lost at 48% fewer FLOPs (as quoted by the DLLP paper's Table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllp.baselines.protocol import Gradient, Method, Published, Scene, check_range, prior_penalty
from dllp.method.other_priors import PRIORS


@dataclass(frozen=True)
class Slimming(Method):
    """Units by the size of their scaling factors, after training with a Laplace prior on them."""

    name = "slimming"
    title = "network slimming (NS)"
    paper = "Liu et al., Learning efficient convolutional networks through network slimming"
    year = 2017
    published = (Published("resnet56", 48, 0.53),)
    strength: float = 1e-4
    least: float = 0.05

    def __post_init__(self) -> None:
        check_range(strength=self.strength)
        check_range(1, least=self.least)

    def penalty(self, scene: Scene) -> Gradient | None:
        return prior_penalty(scene.gating.scales, PRIORS["laplace"], self.strength, 1.0)

    def scores(self, scene: Scene) -> Tensor:
        return scene.spared(scene.gating.scales.of(scene.particles.rows)[0].abs(), self.least)
