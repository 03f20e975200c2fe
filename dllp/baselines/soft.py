"""Soft pruning: filters that a cut would remove are set to zero epoch by epoch, and may grow back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllp.baselines.protocol import Method, Published, Scene, StepInfo, check_range
from dllp.config import Config
from dllp.errors import ConfigError
from dllp.training.gating import NORMS


@dataclass(frozen=True)
class SoftFilters(Method):
    """Units by the l2 norm of their filters; after an epoch the smallest are zeroed, and may grow back in the next one.

    Equation: score = |F_j|_2; after each epoch F_j <- 0 for the share of each layer that the budget wants gone; after
    the last one they are cut. In front of a batch norm a zero filter has no variance, and the norm would multiply its
    gradient by 1 / sqrt(eps), some 300 times: what returns would come back as the largest filter of all. So F_j is the
    filter as the network applies it: its size is |gamma_j| |F_j|_2, and gamma_j and the norm's shift are zeroed.
    No gradient reaches a unit then: it returns by the momentum of its last steps.
    What is zeroed so seldom grows past what was not: the first choice all but decides, so that it waits until the
    network has learned. Half of the epochs did better than none on ResNet-20 (results/tuning).
    Hyperparameters: `begin`, the share of the epochs before the first zeroing (0: from scratch, as in the paper's other
    rows).
    """

    name = "sfp"
    title = "soft filter pruning (SFP)"
    paper = "He et al., Soft filter pruning for accelerating deep convolutional neural networks"
    year = 2018
    published = (Published("resnet56", 51, 0.24),)
    begin: float = 0.5

    def __post_init__(self) -> None:
        check_range(1, begin=self.begin)

    def settings(self, config: Config) -> Config:
        if config.momentum == 0:
            raise ConfigError(f"momentum = 0: what {self.name} has zeroed returns by its momentum alone, give some")
        return config

    def after_step(self, scene: Scene, info: StepInfo) -> None:
        if info.epoch_ends and info.progress >= self.begin:
            self.zero(scene)

    @torch.no_grad()
    def zero(self, scene: Scene) -> None:
        """Set to zero what a cut would remove now: norms' factors and shifts, or filters and biases without a norm."""
        closed = ~scene.select(self.scores(scene))
        rows = scene.particles.rows
        rows[:, scene.gating.scales.coordinates[closed]] = 0
        for coordinates, unit in shifts(scene):
            rows[:, coordinates[closed[unit]]] = 0

    def scores(self, scene: Scene) -> Tensor:
        return scene.ranked(applied(scene).norm(dim=1))


@dataclass(frozen=True)
class GeometricMedian(SoftFilters):
    """Units by the distance of their filters to all others of the layer: what the others can replace goes first.

    Equation: score_j = sum_i |F_i - F_j|_2 over the filters of a layer, as the network applies them; the least is the
    filter nearest to the layer's geometric median. After an epoch such filters are zeroed, as in soft filter pruning.
    """

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


def normed(scene: Scene) -> Tensor:
    """(U,) bool: the units whose scale is a norm's factor."""
    return scene.gating.scales.coordinates[:, 0] != scene.filters.coordinates[:, 0]


def applied(scene: Scene) -> Tensor:
    """(U, M): every unit's filters, times the norm's factor where there is one."""
    factor = torch.where(normed(scene), scene.gating.scales.of(scene.particles.rows)[0].abs(), 1)
    return scene.filter_matrix() * factor[:, None]


def shifts(scene: Scene) -> list[tuple[Tensor, Tensor]]:
    """The shifts of every norm, and the biases of units without one: coordinates in a row, and the unit of each."""
    layout, device, by_norm = scene.particles.layout, scene.particles.device, normed(scene).cpu()
    modules, places = dict(scene.network.named_modules()), torch.arange(layout.size)
    found = []
    for group, here in zip(scene.structure.groups, scene.structure.slices, strict=True):
        for piece in group.slices:
            if piece.role == "write" and piece.name in layout.segments and piece.name.endswith(".bias"):
                unit = piece.unit + here.start
                mine = (piece.unit >= 0) & (isinstance(modules[piece.module], NORMS) | ~by_norm[unit])
                found.append((layout.segments[piece.name].view(places)[mine].to(device), unit[mine].to(device)))
    return found
