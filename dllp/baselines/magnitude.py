"""Hard pruning of single weights by their magnitude after l1- or l2-regularised training (the paper's Figure 2).

Equation: score = |w|, one threshold for the whole network. Training minimises CE + strength * |w|_1, the MAP under a
Laplace prior (equation 3), or CE + decay / 2 * |w|_2^2, the MAP under a Gaussian one (equation 4).
Hyperparameters: `strength` of the l1 norm; `decay`, the weight decay of the first training, whatever the recipe has: by
default that of the dense networks for l2, and none beside l1.
Published: the paper shows distributions only. What is kept is the tail beyond the threshold (equation 8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dllp.baselines.protocol import Method, Scene, not_negative, penalty
from dllp.config import Config
from dllp.priors import PRIORS
from dllp.train import Trainer

SINGLE_SHRINKAGE = 5e-4
"""Weight decay of the l2-regularised network: that of the dense recipe."""


@dataclass(frozen=True)
class MagnitudeL2(Method):
    """Weights of an l2-regularised network, the largest first."""

    name = "magnitude-l2"
    title = "magnitude, l2-regularised"
    paper = "Han et al., Learning both weights and connections for efficient neural networks"
    year = 2015
    granularity = "weight"
    decay: float = SINGLE_SHRINKAGE

    def __post_init__(self) -> None:
        not_negative(decay=self.decay)

    def settings(self, config: Config) -> Config:
        return replace(config, weight_decay=self.decay)

    def scores(self, scene: Scene) -> Tensor:
        return scene.gating.scales.of(scene.particles.rows)[0].abs()


@dataclass(frozen=True)
class MagnitudeL1(MagnitudeL2):
    """Weights of an l1-regularised network, the largest first."""

    name = "magnitude-l1"
    title = "magnitude, l1-regularised"
    decay: float = 0.0
    strength: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(strength=self.strength)

    def start(self, trainer: Trainer, scene: Scene) -> None:
        trainer.penalty = penalty(scene.gating.scales, PRIORS["laplace"], self.strength, 1.0)
