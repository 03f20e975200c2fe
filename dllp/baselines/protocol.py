"""What a method of pruning is: how it trains, how it scores, and what it repairs after the cut.

Every method answers the same questions about the same gates under the same budget as DLLP, so that a comparison is of
methods and not of harnesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
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
from dllp.training.state import RunState

PRIOR_SETTINGS = ("prior", "prior_scale", "polarization", "slab_decay")
"""Settings of DLLP's own prior, which no other method has."""


@dataclass(frozen=True)
class Published:
    """What a paper states: points of accuracy lost at so many percent of FLOPs removed, on CIFAR-10."""

    network: str
    removed: float
    drop: float


@dataclass(frozen=True)
class Scene:
    """A network with its gates, as a method sees it: during training, and when it is to be pruned.

    Attributes:
        particles: One network and its row.
        inputs: Training inputs for methods that look at activations; None during training.
    """

    particles: Particles
    structure: Structure
    gating: ChannelGating | WeightGating
    config: Config
    inputs: Tensor | None = None

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
class Method:
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

    def __post_init__(self) -> None:
        if type(self).scores is Method.scores:
            raise ConfigError(f"method {self.name} has no scores: define scores(scene)")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{entry.name} = {value!r}: a number is needed")

    def settings(self, config: Config) -> Config:
        """The recipe of the first training, where the method wants another one than the dense network's."""
        return config

    def start(self, state: RunState, scene: Scene) -> None:
        """Called before the first step: a regulariser sets `state.penalty`."""

    def step(self, state: RunState, scene: Scene) -> None:
        """Called after every step of the first training."""

    def scores(self, scene: Scene) -> Tensor:
        """-> (U,): what is kept first has the highest score."""
        raise NotImplementedError

    def repair(self, small: nn.Module, recipe: Recipe, scene: Scene) -> None:
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
        """Whether its first training differs from that of a dense network."""
        own = (type(self).settings, type(self).start, type(self).step)
        return own != (Method.settings, Method.start, Method.step)


def share(**values: float) -> None:
    """Raise, by its name, for a hyperparameter that is not within 0 and 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} = {value}: a share from 0 to 1 is needed")


def not_negative(**values: float) -> None:
    """Raise, by its name, for a hyperparameter that is negative or not finite."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} = {value}: a finite number that is not negative is needed")


def penalty(scales: Scales, prior: Prior, strength: float, *parameters: float) -> Callable[[Tensor], Tensor]:
    """(n, P) rows -> (n, P): gradient of -strength * log prior of the units' sizes |scale|, for `state.penalty`."""
    prior.check(*parameters)
    not_negative(strength=strength)
    at = scales.coordinates

    def gradient(rows: Tensor) -> Tensor:
        scores = prior.unit_scores(scales.of(rows), scales.lengths, *parameters)
        result = torch.zeros_like(rows)
        result[:, at] = strength * scales.pulls(rows, scores)[..., None] * rows[:, at]
        return result

    return gradient
