"""The protocol of a pruning method: how it trains, how it scores, what it repairs after the cut.

A run (:mod:`dllp.baselines.run`) calls `settings` for the recipe of the first training, `penalty` before
its first step, `after_step` after each, `prepare` when it has ended, `scores`, and `repair` on the cut network. Gates,
budget, cut and fine-tuning are the same for every method and for DLLP, so that a comparison is of methods and not of
harnesses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dllp.training.objective import LossFn
from dllp.training.particles import Particles

PRIOR_SETTINGS = ("prior", "prior_scale")
"""Settings of DLLP's own prior, which no other method has."""
Gradient = Callable[[Tensor], Tensor]
"""(n, P) rows -> (n, P): gradient of a penalty."""
Examples = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Number of training pairs -> the first so many of them, or all there are, batch by batch on the device."""


@dataclass(frozen=True)
class Published:
    """A published figure: points of accuracy lost at so many percent of FLOPs removed, on CIFAR-10.

    `rerun` says who measured it, where it is known that the method's authors did not.
    """

    network: str
    removed: float
    drop: float
    rerun: str = ""


@dataclass(frozen=True)
class Scene:
    """A network with its gates, as a method sees it: during training, and when it is to be pruned.

    Attributes:
        particles: One network and its row.
        inputs: Training inputs for methods that look at activations; empty during training.
        examples: Labelled training pairs; none during training.
        around: The module that `prepare` has put around the network, trained.
        found: Weights that `scores` leaves for `repair`, by name, in their full shape.
    """

    particles: Particles
    structure: Structure
    gating: ChannelGating | WeightGating
    config: Config
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    examples: Examples = lambda count: iter(())
    around: nn.Module | None = None
    found: dict[str, Tensor] = field(default_factory=dict)

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

    def largest(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """(U,) -> bool (U,): the units of each group with the `counts` largest values."""
        keep = torch.zeros(len(values), dtype=torch.bool)
        for here, count in zip(self.structure.slices, counts, strict=True):
            keep[here.start + values[here].argsort(descending=True, stable=True)[:count]] = True
        return keep

    def chosen(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """(U,) -> (U,) scores that keep `counts` units of each group: 1 + s for those of the largest values, else s.

        s in (0, 1) is the rank within the group: a choice that fits the budget stays, and the best of the other units
        take the room that is left. Where more than half a percent would stay unused, `select` may exchange units.
        """
        return self.largest(values, counts).double() + 0.9 * self.ranked(values)

    def cost(self, keep: Tensor) -> Tensor:
        """(..., U) kept units -> (...): cost over that of the whole network, as the budget counts it."""
        cost = getattr(self.structure, self.config.budget[0])
        return cost.expected(keep.double().cpu()) / cost.dense

    def first(self, counts: Sequence[int]) -> Tensor:
        """The first so many units of each group -> bool (U,)."""
        parts = zip(self.structure.groups, counts, strict=True)
        return torch.cat([torch.arange(group.units) < count for group, count in parts])

    def even(self) -> list[int]:
        """Units of each group at the largest share, common to all groups, that the budget allows."""
        units, budget = [group.units for group in self.structure.groups], self.config.budget[1] or 1.0
        counts = [1] * len(units)
        low, high = 0.0, 1.0
        for _ in range(30):
            share = (low + high) / 2
            tried = [max(1, int(share * n)) for n in units]
            if float(self.cost(self.first(tried))) <= budget:
                low, counts = share, tried
            else:
                high = share
        return counts


@dataclass(frozen=True)
class StepInfo:
    """Progress of a training after a step: learning rate, share of all steps taken, True at the end of an epoch."""

    lr: float
    progress: float
    epoch_ends: bool


@dataclass(frozen=True)
class Described(ABC):
    """A method as it is listed; subclasses are frozen dataclasses whose fields are its hyperparameters.

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


@dataclass(frozen=True)
class Method(Described):
    """A method that cuts a network.

    Attributes:
        labelled: It needs classes of training examples.
        before_cut: Share of the fine-tuning's epochs that `prepare` takes.
    """

    labelled: ClassVar[bool] = False
    before_cut: ClassVar[float] = 0.0

    def settings(self, config: Config) -> Config:
        """The recipe of the first training, by default the dense network's."""
        return config

    def penalty(self, scene: Scene) -> Gradient | None:
        """The regulariser of the first training, which is added to the gradient of every step."""
        return None

    def after_step(self, scene: Scene, info: StepInfo) -> None:
        """Act on the weights after a step of the first training."""

    def prepare(self, scene: Scene) -> tuple[nn.Module, LossFn]:
        """A module around the scene's network, its attribute `network`, and their loss in a training before the cut.

        Only of methods with a share `before_cut`; `scores` finds the module, trained, as `scene.around`.
        """
        raise NotImplementedError

    @abstractmethod
    def scores(self, scene: Scene) -> Tensor:
        """-> (U,): what is kept first has the highest score."""

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
        """True where its first training differs from that of a dense network."""
        own = (type(self).settings, type(self).penalty, type(self).after_step)
        return own != (Method.settings, Method.penalty, Method.after_step)


def check_range(most: float = 1e9, least: float = 0, /, **values: float) -> None:
    """Raise, by its name, for a hyperparameter that is below `least`, above `most`, or not finite."""
    for name, value in values.items():
        if not least <= value <= most:
            raise ConfigError(f"{name} = {value}: a number from {least:g} to {most:g} is needed")


def prior_penalty(scales: Scales, prior: Prior, strength: float, *parameters: float) -> Gradient:
    """Gradient of -strength * log prior of the units' sizes |scale|."""
    at = scales.at

    def gradient(rows: Tensor) -> Tensor:
        sizes = scales.of(rows)
        scores = prior.unit_scores(sizes, scales.lengths, *parameters)
        result = torch.zeros_like(rows)
        result[:, at] = strength * scales.at_coordinates(scales.pulls(sizes, scores)) * rows[:, at]
        return result

    return gradient
