"""DeepHoyer: the squared Hoyer measure of the filters' norms, a count of filters that does not feel their scale.

Equation: minimise CE + strength * sum over layers of (sum_j |F_j|_2)^2 / sum_j |F_j|_2^2 (the paper's group form, with
filters as groups). Its gradient shrinks filters below a layer's own threshold and lets those above it grow, and no
uniform scaling of a layer can lower it. Score = the filter's norm over its layer's largest.
Hyperparameters: `strength`, which the paper searches for each network, 1e-5 the best of 1e-5 to 1e-2 on ResNet-20
(results/tuning); `least`, the share of every layer that stays, which the paper does not have.
Published: ResNet-56 on CIFAR-10, 0.26 points lost at 48% fewer FLOPs (as quoted by the DLLP paper's Table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllp.baselines.protocol import Gradient, Published, Scene, prior_penalty
from dllp.baselines.slimming import Slimming
from dllp.method.other_priors import PRIORS


@dataclass(frozen=True)
class DeepHoyer(Slimming):
    """Units by the norm of their filters relative to their layer, after training with a Hoyer prior on these norms."""

    name = "deephoyer"
    title = "DeepHoyer"
    paper = (
        "Yang et al., DeepHoyer: learning sparser neural network with differentiable scale-invariant sparsity measures"
    )
    year = 2020
    published = (Published("resnet56", 48, 0.26),)
    strength: float = 1e-5

    def penalty(self, scene: Scene) -> Gradient:
        return prior_penalty(scene.filters, PRIORS["hoyer"], self.strength, 1.0)

    def scores(self, scene: Scene) -> Tensor:
        norms = scene.filters.of(scene.particles.rows)[0].abs()
        parts = norms.split(list(scene.filters.lengths))
        relative = torch.cat([part / part.max().clamp_min(torch.finfo(part.dtype).tiny) for part in parts])
        return scene.spared(relative, self.least)
