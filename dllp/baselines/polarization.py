"""Polarization: scaling factors are driven apart into a group at zero and a group away from it (equations 5 and 6).

Equation: minimise CE + strength * (t |gamma|_1 - |gamma - mean gamma|_1) over the factors of all channels that can be
pruned.
With s the mean of sign(gamma - mean gamma), factors below the mean are drawn to 0 by t + 1 + s, those above it by
t - 1 + s: at t just above 1 and with as many on both sides only the small ones shrink. The paper's factors are not
negative; here the sizes |gamma| have the prior, so that a factor that crosses 0 is drawn back and not driven on.
Score = |gamma|; where two groups have formed, any threshold between them gives the same network.
Hyperparameters: `strength` and `t`, which the paper adjusts to the FLOPs that are wanted: 3e-4, the best of 1e-5 to
3e-4 on ResNet-20 (results/tuning), and 1.2; `least`, as for network slimming.
Published: ResNet-56 on CIFAR-10, 0.03 points gained at 47% fewer FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from dllp.baselines.protocol import Gradient, Published, Scene, check_range, prior_penalty
from dllp.baselines.slimming import Slimming
from dllp.method.other_priors import PRIORS


@dataclass(frozen=True)
class Polarization(Slimming):
    """Units by the size of their scaling factors, after training with the polarization prior on them."""

    name = "polarization"
    title = "polarization"
    paper = "Zhuang et al., Neuron-level structured pruning using polarization regularizer"
    year = 2020
    published = (Published("resnet56", 47, -0.03),)
    strength: float = 3e-4
    t: float = 1.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(t=self.t)

    def penalty(self, scene: Scene) -> Gradient:
        return prior_penalty(scene.gating.scales, PRIORS["polarization"], self.strength, self.t, 1.0)
