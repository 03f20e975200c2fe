"""Methods that train scaling factors (or filters' norms) under a sparse prior and cut at one threshold for all layers.

Published figures are quoted from the DLLP paper's tables, polarization's from its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllp.baselines.protocol import Gradient, Method, Published, Scene, StepInfo, check_range, prior_penalty
from dllp.method.other_priors import PRIORS


@dataclass(frozen=True)
class Slimming(Method):
    """Units by the size of their scaling factors, after training with a Laplace prior on them.

    Equation: minimise CE + strength * sum |gamma| over channels that can be pruned, by subgradient; score = |gamma|.
    A unit whose channels pass several norms has the root mean square of their factors; one without a norm has that of
    its filters. Hyperparameters: `strength`, 1e-4 in the paper for VGG and 1e-5 for ResNets, over 160 epochs; `least`,
    the share of each layer that stays whatever its factors, which the paper does not have.
    """

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


@dataclass(frozen=True)
class Polarization(Slimming):
    """Units by the size of their scaling factors, driven apart by the polarization prior (equations 5 and 6).

    Equation: minimise CE + strength * (t |gamma|_1 - |gamma - mean gamma|_1) over the factors of all channels that can
    be pruned. With s the mean of sign(gamma - mean gamma), factors below the mean are drawn to 0 by t + 1 + s, those
    above it by t - 1 + s: at t just above 1 and with as many on both sides only the small ones shrink. The paper's
    factors are not negative; here the sizes |gamma| have the prior, so that a factor that crosses 0 is drawn back.
    Hyperparameters: `strength` and `t`, which the paper adjusts to the FLOPs that are wanted: 3e-4, the best of 1e-5 to
    3e-4 on ResNet-20 (results/tuning), and 1.2.
    """

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


@dataclass(frozen=True)
class SparseStructures(Slimming):
    """Units by the size of their scaling factors, after proximal steps under an l1 norm, which reach exact zeros.

    Equation: s <- sign(s) max(|s| - eta, 0) after each step, eta = lr * strength. Here s are the normalisation's
    factors, as a factor of its own behind it would be one with it; a unit without a norm has its filters' root mean
    square, shrunk as a group, and one of c coordinates by eta / c, as their own steps move it by no more than that
    share of its gradient. The paper's accelerated form carries momentum through the threshold; a threshold outside the
    momentum buffer needs 1 / (1 - momentum) times its size for the same pull.
    Hyperparameters: `strength`, which the paper searches for each network, 1e-6 the best of 1e-6 to 1e-4 on ResNet-20
    (results/tuning). Published on ImageNet only: ResNet-50, 4.30 points lost at 43% fewer FLOPs.
    """

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
        rows[:, scales.at] *= scales.at_coordinates(shrink)


@dataclass(frozen=True)
class DeepHoyer(Slimming):
    """Units by the norm of their filters relative to their layer, after training with a Hoyer prior on these norms.

    Equation: minimise CE + strength * sum over layers of (sum_j |F_j|_2)^2 / sum_j |F_j|_2^2 (the paper's group form,
    with filters as groups). Its gradient shrinks filters below a layer's own threshold and lets those above it grow,
    and no uniform scaling of a layer can lower it. Score = the filter's norm over its layer's largest.
    Hyperparameters: `strength`, which the paper searches for each network, 1e-5 the best of 1e-5 to 1e-2 on ResNet-20
    (results/tuning).
    """

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
