"""Hard pruning of single weights by their magnitude after l1- or l2-regularised training (the paper's Figure 2).

Equation: score = |w|, one threshold for the whole network. Training minimises CE + strength * |w|_1, the MAP under a
Laplace prior (equation 3), or CE + decay / 2 * |w|_2^2, the MAP under a Gaussian one (equation 4).
Hyperparameters: `strength` of the l1 norm, which replaces the weight decay of the first training; for l2 the recipe's
own weight decay, so that the network is the dense one.
Published: the paper shows distributions only. What is kept is the tail beyond the threshold (equation 8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dllp.baselines.protocol import Gradient, Method, Scene, check_range, prior_penalty
from dllp.config import Config
from dllp.method.other_priors import PRIORS


@dataclass(frozen=True)
class MagnitudeL2(Method):
    """Weights of an l2-regularised network, the largest first."""

    name = "magnitude-l2"
    title = "magnitude, l2-regularised"
    paper = "Han et al., Learning both weights and connections for efficient neural networks"
    year = 2015
    granularity = "weight"

    def scores(self, scene: Scene) -> Tensor:
        return scene.gating.scales.of(scene.particles.rows)[0].abs()


@dataclass(frozen=True)
class MagnitudeL1(MagnitudeL2):
    """Weights of an l1-regularised network, the largest first."""

    name = "magnitude-l1"
    title = "magnitude, l1-regularised"
    strength: float = 1e-5

    def __post_init__(self) -> None:
        check_range(strength=self.strength)

    def settings(self, config: Config) -> Config:
        return replace(config, weight_decay=0.0)

    def penalty(self, scene: Scene) -> Gradient:
        return prior_penalty(scene.gating.scales, PRIORS["laplace"], self.strength, 1.0)
