"""The protocol of a pruning method: how it trains, how it scores, what it repairs after the cut.

A run (:mod:`dllp.baselines.run`) calls `settings` for the recipe of the first training, `penalty` before
its first step, `after_step` after each, `scores` when it has ended, `repair` on the cut network. Gates, budget, cut and
fine-tuning are the same for every method and for DLLP, so that a comparison is of methods and not of harnesses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dllp.config import Config, Granularity
from dllp.errors import ConfigError
from dllp.method.other_priors import Prior
from dllp.structure.groups import Structure
from dllp.structure.slicing import Recipe
from dllp.training.gating import ChannelGating, Scales, WeightGating, channel_scales
from dllp.training.particles import Particles

PRIOR_SETTINGS = ("prior", "prior_scale")
"""Settings of DLLP's own prior, which no other method has."""
Gradient = Callable[[Tensor], Tensor]
"""(n, P) rows -> (n, P): gradient of a penalty."""


@dataclass(frozen=True)
class Published:
    """A published figure: points of accuracy lost at so many percent of FLOPs removed, on CIFAR-10.

    A `rerun` is what somebody else measured: the method's own paper has no such row.
    """

    network: str
    removed: float
    drop: float
    rerun: bool = False


@dataclass(frozen=True)
class Scene:
    """A network with its gates, as a method sees it: during training, and when it is to be pruned.

    Attributes:
        particles: One network and its row.
        inputs: Training inputs for methods that look at activations; empty during training.
    """

    particles: Particles
    structure: Structure
    gating: ChannelGating | WeightGating
    config: Config
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def network(self) -> nn.Module:
        """The network in its full shape."""
        return self.particles.networks[0]

    @cached_property
    def filters(self) -> Scales:
        """The coordinates of every unit's filters, normalisation left aside."""
        layout, device = self.particles.layout, self.particles.device
        return channel_scales(self.network, self.structure, layout, device, norms=False)

    def filter_matrix(self) -> Tensor:
        """(U, M): the filters that make each unit, one after the other, padded with zeros."""
        return self.particles.rows[0][self.filters.coordinates]

    def select(self, scores: Tensor) -> Tensor:
        """(U,) scores -> bool (U,): the units that stay, by the budget of the configuration."""
        return self.gating.select(scores, *self.config.budget)

    def spared(self, scores: Tensor, least: float) -> Tensor:
        """(U,) -> (U,): the best of every group, at least a share `least` of it, lifted above all others.

        One threshold for all layers may empty some of them, and what passes through one channel cannot be learned
        again: where five layers of VGG-16 were left with one of 512, it stayed at chance after fine-tuning.
        """
        lifted, above = scores.clone(), scores.max() - scores.min() + 1
        for here in self.structure.slices:
            best = scores[here].argsort(descending=True, stable=True)
            lifted[here.start + best[: math.ceil(least * len(best))]] += above
        return lifted

    def ranked(self, values: Tensor) -> Tensor:
        """(U,) -> (U,): rank within each group in (0, 1], so that a budget takes the same share of every layer."""
        ranks = torch.empty_like(values, dtype=torch.float64)
        for here in self.structure.slices:
            order = values[here].argsort(stable=True).argsort(stable=True) + 1
            ranks[here] = order.double() / len(order)
        return ranks


@dataclass(frozen=True)
class StepInfo:
    """Where a training stands after a step: its learning rate, the share of all steps, whether an epoch has ended."""

    lr: float
    progress: float
    epoch_ends: bool


@dataclass(frozen=True)
class Method(ABC):
    """A method of pruning; subclasses are frozen dataclasses whose fields are its hyperparameters.

    Attributes:
        name: What `--method` takes.
        title: As tables print it.
        paper, year: Where it comes from.
        granularity: What it removes.
        published: Figures to compare with.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    year: ClassVar[int]
    granularity: ClassVar[Granularity] = "channel"
    published: ClassVar[tuple[Published, ...]] = ()

    def settings(self, config: Config) -> Config:
        """The recipe of the first training, by default the dense network's."""
        return config

    def penalty(self, scene: Scene) -> Gradient | None:
        """The regulariser of the first training, which is added to the gradient of every step."""
        return None

    def after_step(self, scene: Scene, info: StepInfo) -> None:  # noqa: B027 - nothing by default
        """Act on the weights after a step of the first training."""

    @abstractmethod
    def scores(self, scene: Scene) -> Tensor:
        """-> (U,): what is kept first has the highest score."""

    def repair(self, small: nn.Module, recipe: Recipe, scene: Scene) -> None:  # noqa: B027 - nothing by default
        """Mend the cut network in place; `recipe` says what it kept of the scene's."""

    def refuse_priors(self, given: Mapping[str, Any]) -> None:
        """Raise where a setting of DLLP's prior departs from its default: it would change nothing here."""
        for name in PRIOR_SETTINGS:
            default = getattr(Config, name)
            if given.get(name, default) != default:
                raise ConfigError(
                    f"{name} = {given[name]} belongs to dllp itself: method {self.name} brings its own regulariser, "
                    f"leave out {name}"
                )

    @property
    def trains(self) -> bool:
        """True where its first training differs from that of a dense network."""
        own = (type(self).settings, type(self).penalty, type(self).after_step)
        return own != (Method.settings, Method.penalty, Method.after_step)


def check_range(most: float = 1e9, **values: float) -> None:
    """Raise, by its name, for a hyperparameter that is negative, above `most`, or not finite."""
    for name, value in values.items():
        if not 0 <= value <= most:
            raise ConfigError(f"{name} = {value}: a number from 0 to {most:g} is needed")


def prior_penalty(scales: Scales, prior: Prior, strength: float, *parameters: float) -> Gradient:
    """Gradient of -strength * log prior of the units' sizes |scale|."""
    at = scales.at

    def gradient(rows: Tensor) -> Tensor:
        scores = prior.unit_scores(scales.of(rows), scales.lengths, *parameters)
        result = torch.zeros_like(rows)
        result[:, at] = strength * scales.at_coordinates(scales.pulls(rows, scores)) * rows[:, at]
        return result

    return gradient
