"""Sparse structure selection: scaling factors under an l1 norm, by proximal steps that reach exact zeros.

Equation: minimise CE + strength * |s|_1 over a factor s for every structure, each step followed by soft thresholding,
s <- sign(s) max(|s| - eta, 0), eta = lr * strength. Here the factors are those of the normalisation, as a factor of its
own behind it would be one with it; a unit without a norm has its filters' root mean square, shrunk as a group, and one
of c coordinates by eta / c, as their own steps move it by no more than that share of its gradient.
The paper's accelerated form carries momentum through the threshold; a threshold outside the momentum buffer needs
1 / (1 - momentum) times its size for the same pull. Score = |s|.
Hyperparameters: `strength`, which the paper searches for each network, 1e-6 the best of 1e-6 to 1e-4 on ResNet-20
(results/tuning); `least`, as for network slimming.
Published: ResNet-50 on ImageNet, 4.30 points lost at 43% fewer FLOPs (as quoted by the DLLP paper's Table 3); nothing
on the CIFAR-10 networks of its other tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllp.baselines.protocol import Scene, StepInfo
from dllp.baselines.slimming import Slimming


@dataclass(frozen=True)
class SparseStructures(Slimming):
    """Units by the size of their scaling factors, after training with soft thresholding of them."""

    name = "sss"
    title = "sparse structure selection (SSS)"
    paper = "Huang and Wang, Data-driven sparse structure selection for deep neural networks"
    year = 2018
    published = ()
    strength: float = 1e-6

    def penalty(self, scene: Scene) -> None:
        """Nothing in the gradient: the threshold is all."""

    @torch.no_grad()
    def after_step(self, scene: Scene, info: StepInfo) -> None:
        scales, rows = scene.gating.scales, scene.particles.rows
        threshold = info.lr * self.strength / (1 - scene.config.momentum) / scales.count
        size = scales.of(rows).abs()
        shrink = (1 - threshold / size.clamp_min(torch.finfo(rows.dtype).tiny)).clamp_min(0)
        rows[:, scales.coordinates] *= shrink[..., None]
