"""Gates of channels and of single weights: the weights they multiply, the scales their prior acts on, their cost.

Both kinds have the same methods, so that training does not know which it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dllp.config import Counted
from dllp.errors import StructureError
from dllp.method.update import STRIP
from dllp.structure.groups import FilterFn, Structure, allowed
from dllp.structure.padding import closing_fold, widened
from dllp.structure.select import select, select_measured
from dllp.structure.slicing import Fold, Recipe, Slice, WeightFold, recipe
from dllp.training.particles import Layout, kept_coordinates

RUN = 256
"""Consecutive coordinates that the CPU copies as one."""
NORMS = (nn.modules.batchnorm._NormBase, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Scales:
    """The values the prior acts on: unit u's scale is the RMS of its coordinates in a row (Section 4).

    Attributes:
        at: (K,) coordinates of all units in a row; units with equally many of them are neighbours.
        unit: (K,) the unit of each; empty, as `place` is, where every unit is one coordinate.
        count: (U,) number of coordinates of each unit.
        place: (U,) place of each unit in the order of `at`.
        parts: Number of units, and of coordinates of each, for every number that occurs: a neuron has hundreds, a head
            tens of thousands.
        modules: Names of the modules that own a slab precision.
        lengths: Number of consecutive units that each of them rules.
        spare: A coordinate that holds 0.
    """

    at: Tensor
    unit: Tensor
    count: Tensor
    place: Tensor
    parts: tuple[tuple[int, int], ...]
    modules: tuple[str, ...]
    lengths: tuple[int, ...]
    spare: int

    @classmethod
    def of_pairs(
        cls, unit: Tensor, at: Tensor, modules: tuple[str, ...], lengths: tuple[int, ...], spare: int,
        device: torch.device,
    ) -> Scales:  # fmt: skip
        """From units (K,) and coordinates (K,) in any order."""
        count = torch.bincount(unit, minlength=sum(lengths))
        place = count.argsort(stable=True).argsort()
        order = place[unit].argsort(stable=True)
        sizes, units = count.unique(return_counts=True)
        parts = tuple(zip(units.tolist(), sizes.tolist(), strict=True))
        at, unit, place = at[order].to(device), unit[order].to(device), place.to(device)
        return cls(at, unit, count.to(device, torch.get_default_dtype()), place, parts, modules, lengths, spare)

    @cached_property
    def coordinates(self) -> Tensor:
        """(U, M) into a row; units with fewer than M coordinates are padded with `spare`."""
        if self.single:
            return self.at[:, None]
        table = self.at.new_full((len(self.count), max(size for _, size in self.parts)), self.spare)
        for unit, at in zip(self._split(self.unit), self._split(self.at), strict=True):
            table[unit[:, 0], : at.shape[1]] = at
        return table

    def _split(self, values: Tensor) -> list[Tensor]:
        """(..., K) -> (..., units, coordinates of each) for each of `parts`."""
        pieces = values.split([units * size for units, size in self.parts], dim=-1)
        return [piece.unflatten(-1, shape) for piece, shape in zip(pieces, self.parts, strict=True)]

    @property
    def single(self) -> bool:
        """True where every unit is one coordinate, whose scale has its sign."""
        return all(size == 1 for _, size in self.parts)

    @cached_property
    def order(self) -> Tensor:
        """(U,) the units in the order of `at`."""
        return self.place.argsort()

    @cached_property
    def pieces(self) -> list[tuple[slice | Tensor, slice]]:
        """Coordinates and their places in `at`: on the CPU long runs of consecutive ones as slices, which copy fast."""
        if self.at.device.type != "cpu":
            return [(self.at, slice(0, len(self.at)))]
        starts = [0, *(1 + (self.at.diff() != 1).nonzero().flatten()).tolist(), len(self.at)]
        found: list[tuple[slice | Tensor, slice]] = []
        scattered = 0  # where those begin that belong to no long run
        for start, end in pairwise(starts):
            if end - start >= RUN:
                found += [(self.at[scattered:start], slice(scattered, start))] if scattered < start else []
                found.append((slice(int(self.at[start]), int(self.at[start]) + end - start), slice(start, end)))
                scattered = end
        return [*found, (self.at[scattered:], slice(scattered, len(self.at)))]

    def take(self, rows: Tensor) -> Tensor:
        """(n, P) -> (n, K): the values at the coordinates."""
        found = [rows[:, at] for at, _ in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def add(self, rows: Tensor, values: Tensor, factor: float = 1.0) -> None:
        """Add (n, K), times a factor, at the coordinates of (n, P)."""
        for at, part in self.pieces:
            if isinstance(at, slice):
                rows[:, at].add_(values[:, part], alpha=factor)
            else:
                rows[:, at] += factor * values[:, part]

    def of(self, rows: Tensor) -> Tensor:
        """(n, P) rows -> (n, U) scales."""
        return self.of_values(self.take(rows))

    def of_values(self, values: Tensor) -> Tensor:
        """(n, K) values at the coordinates -> (n, U) scales."""
        if self.single:
            return values
        # on a CPU some units at a time: a square of everything would be mapped anew by the system at every step
        strip = STRIP if values.device.type == "cpu" else len(self.at)
        pieces = [part.split(max(1, strip // part.shape[-1]), dim=-2) for part in self._split(values)]
        sums = [piece.square().sum(-1) for part in pieces for piece in part]
        return (torch.cat(sums, dim=1)[:, self.place] / self.count).sqrt()

    def at_coordinates(self, values: Tensor) -> Tensor:
        """(n, U) -> (n, K): each unit's value at its coordinates."""
        if self.single:
            return values
        result = values.new_empty(len(values), len(self.at))
        for target, part in zip(self._split(result), self._ordered(values), strict=True):
            target.copy_(part)
        return result

    def times(self, values: Tensor, factors: Tensor) -> Tensor:
        """(n, K) times each unit's factor (n, U); in place where units have several coordinates."""
        if self.single:
            return values * factors
        for part, factor in zip(self._split(values), self._ordered(factors), strict=True):
            part.mul_(factor)
        return values

    def _ordered(self, values: Tensor) -> list[Tensor]:
        """(n, U) -> (n, units, 1) for each of `parts`."""
        ordered = values[:, self.order].split([units for units, _ in self.parts], dim=1)
        return [part[..., None] for part in ordered]

    def pulls(self, scale: Tensor, scores: Tensor) -> Tensor:
        """(n, U) scales and their scores -> (n, U) pulls: minus a pull times its value is a coordinate's own score."""
        # where a scale is 0 its coordinates are 0 too, and whatever the pull is they stay
        return -scores * scale / (self.count * scale.square().clamp_min(1e-24))

    def module_sums(self, values: Tensor) -> Tensor:
        """(n, U) -> (n, modules): sums over each module's units, without atomics."""
        return torch.stack([part.sum(1) for part in values.split(self.lengths, dim=1)], dim=1)

    def spread(self, values: Tensor) -> Tensor:
        """(n, modules) -> (n, U): each module's value at its units."""
        return torch.cat([v.expand(-1, k) for v, k in zip(values.split(1, dim=1), self.lengths, strict=True)], dim=1)


@dataclass(frozen=True)
class LinearCost:
    """Every gate has its own price (U,), in float64; what is left of the dense cost is constant."""

    price: Tensor
    dense: float

    def expected(self, theta: Tensor) -> Tensor:
        """(..., U) gate probabilities -> (...) expected cost, in float64: float32 sums lose single weights."""
        return self.dense - (1 - theta.to(self.price.dtype)) @ self.price


class ChannelGating:
    """One gate for each prunable channel with everything coupled to it, folded into its consumers."""

    def __init__(
        self, model: nn.Module, structure: Structure, layout: Layout, device: torch.device, *, round_to: int = 1
    ) -> None:
        self.structure, self.round_to = structure, round_to
        self.units, self.stored, self.whole = structure.units, structure.channels_per_unit, structure.whole
        self.fold = Fold(model, structure.groups).to(device)
        self.flops, self.params = structure.flops.to(device), structure.params.to(device)
        self.latency = structure.latency and structure.latency.to(device)
        self.scales = channel_scales(model, structure, layout, device)

    def select(self, logits: Tensor, budget: Counted, keep: float | None) -> Tensor:
        cost = getattr(self.structure, budget)
        return select(self.structure, logits.cpu(), cost=cost, keep=keep, round_to=self.round_to).to(logits.device)

    def decide(self, logits: Tensor, budget: Counted, keep: float | None) -> Tensor:
        """:meth:`select`, held to the measured time where the budget is one."""
        latency = self.structure.latency
        if budget != "latency" or latency is None or keep is None:
            return self.select(logits, budget, keep)
        return select_measured(self.structure, logits.cpu(), latency, keep).to(logits.device)

    def in_order(self, values: Tensor) -> Tensor:
        """(n, U) -> (n, U): as they are, group by group."""
        return values

    def recipe(self, model: nn.Module, keep: Tensor) -> Recipe:
        """The kept channels of every module, given the kept gates (U,)."""
        return recipe(model, self.structure.groups, keep.cpu())

    def slab_coordinates(self, network: nn.Module, layout: Layout, keep: Tensor) -> Tensor:
        """(U,) decisions -> (P,) bool: the coordinates of a row that remain in the cut network."""
        return kept_coordinates(network, layout, self.recipe(network, keep))

    def padded(self, keep: Tensor, logits: Tensor, lane: int) -> Tensor:
        """(U,) decisions -> the same with the likeliest closed units of each group added up to a multiple of `lane`.

        Of units, not channels: each group of a grouped convolution then has such a width.
        """
        return widened(self.structure, keep.cpu(), [lane] * len(self.structure.groups), logits.cpu())

    def closed(self, network: nn.Module, padded: Tensor, keep: Tensor) -> tuple[Fold, Tensor]:
        """The fold of a network that was cut to `padded`, prepared for it, and its gates: 0 for units that only pad."""
        fold, gates = closing_fold(network, self.structure, padded, keep.cpu())
        fold.prepare(network)
        device = next(network.parameters()).device
        return fold.to(device), gates.to(device)


class WeightGating:
    """One gate for each convolution weight (and linear weight, by option): the paper's letter."""

    def __init__(
        self, model: nn.Module, structure: Structure, layout: Layout, device: torch.device, *,
        linear: bool = False, filter_fn: FilterFn | None = None,
    ) -> None:  # fmt: skip
        macs = {layer.name: layer.macs for layer in structure.layers}
        # modules that own each parameter, by its id; a module that has several names is one
        owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        named = [(n, m) for n, m in model.named_modules() if n in macs or _has_matrix(m)]
        reasons = {name: _why_whole(module, name, macs, owners, linear, filter_fn) for name, module in named}
        self.whole = {name: reason for name, reason in reasons.items() if reason}
        modules = [(name, module) for name, module in named if name not in self.whole]
        held = {name: sum(p.numel() for p in module.parameters()) for name, module in named}
        self.largest = sorted(self.whole, key=lambda name: -held[name])[:3]
        if not modules:
            raise StructureError(f"the network has no weights to gate: {self._reasons()}")
        segments = [layout.segments[f"{name}.weight"] for name, _ in modules]
        self.fold = WeightFold({s.name: s.shape for s in segments}, {s.name for s in segments if s.channels_last})
        sizes = self.fold.sizes
        self.units = sum(sizes)
        self.stored = torch.ones(self.units, dtype=torch.int64)
        coordinates = torch.cat([torch.arange(s.offset, s.offset + s.shape.numel()) for s in segments])
        none, names = torch.zeros(0, dtype=torch.int64), tuple(name for name, _ in modules)
        self.scales = Scales(
            coordinates.to(device), none, torch.ones(self.units, device=device), none, ((self.units, 1),), names,
            tuple(sizes), layout.spare,
        )  # fmt: skip
        each = [macs[name] / size for (name, _), size in zip(modules, sizes, strict=True)]
        prices = torch.tensor(each, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
        self.flops = LinearCost(prices.to(device), structure.flops.dense)
        self.params = LinearCost(torch.ones_like(self.flops.price), structure.params.dense)

    def _reasons(self) -> str:
        """The reasons of the largest modules without gates."""
        return "; ".join(f"{name}: {self.whole[name]}" for name in self.largest) or "it has none"

    def in_order(self, values: Tensor) -> Tensor:
        """(n, U) -> (n, U): each parameter's values in its own order, whatever memory format it is trained in."""
        return torch.cat([part.flatten(1) for part in self.fold.split(values).values()], dim=1)

    def slab_coordinates(self, network: nn.Module, layout: Layout, keep: Tensor) -> Tensor:
        """(U,) decisions -> (P,) bool: every coordinate but the closed weights."""
        mask = torch.ones(layout.size, dtype=torch.bool, device=keep.device)
        mask[self.scales.at] = keep
        return mask

    def decide(self, logits: Tensor, budget: Counted, keep: float | None) -> Tensor:
        return self.select(logits, budget, keep)

    def select(self, logits: Tensor, budget: Counted, keep: float | None) -> Tensor:
        """Keep the most probable weights whose cost fits; single weights are fine enough to meet any budget."""
        if keep is None:
            return logits > 0
        cost: LinearCost = getattr(self, budget)
        price = cost.price.to(logits.device)
        fixed = cost.dense - float(price.sum())
        room = keep * cost.dense - fixed
        if room < 0:
            raise StructureError(
                f"the budget cannot be met: the weights without gates alone cost {fixed / cost.dense:.4f} of the dense "
                f"network; keep more{f' (without gates are {self._reasons()})' if self.largest else ''}"
            )
        order = torch.argsort(logits, descending=True, stable=True)
        spent = price[order].cumsum(0)
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        chosen[order[spent <= room + 1e-12 * cost.dense]] = True
        return chosen


def _has_matrix(module: nn.Module) -> bool:
    """True if a module itself holds weights that multiply; those of a parametrization belong to its layer."""
    if isinstance(module, parametrize.ParametrizationList):
        return False
    return any(p is not None and p.dim() > 1 for p in module._parameters.values())


def _why_whole(
    module: nn.Module, name: str, macs: Mapping[str, float], owners: Mapping[int, int], linear: bool,
    filter_fn: FilterFn | None,
) -> str:  # fmt: skip
    """The reason why a module's weights have no gates; empty where they have."""
    if not isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
        return "no convolution and no linear layer"
    if isinstance(module, nn.Linear) and not linear:
        return "a linear layer; set gate_linear = true"
    if name not in macs:
        return "never called: another module computes with its weights"
    if not allowed(filter_fn, module, name):
        return "filter_fn keeps it"
    if owners.get(id(module._parameters.get("weight"))) != 1:
        return "its weight is shared, or computed from others (remove parametrizations first)"
    return ""


def channel_scales(
    model: nn.Module, structure: Structure, layout: Layout, device: torch.device, *, norms: bool = True
) -> Scales:
    """RMS of each unit's normalisation scales; of what makes it where none reads it, or `norms` is False.

    A weight that makes units of several groups (heads, and the values in each) counts for one of them, in turns. The
    scale of a branch is that of its last affine map.
    """
    modules, everywhere = dict(model.named_modules()), torch.arange(layout.size)
    units, coordinates = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    pieces = [
        [p for p in group.slices if p.name in layout.segments and _makes(modules, p, layout)]
        for group in structure.groups
    ]
    claims: dict[str, list[tuple[int, Slice]]] = {}
    for g, group in enumerate(pieces):
        for piece in group:
            claims.setdefault(piece.name, []).append((g, piece))
    for g, (group, part) in enumerate(zip(pieces, structure.slices, strict=True)):
        branch = bool(structure.groups[g].gone)
        turns = []
        for piece in group:
            rivals = _rivals(g, claims[piece.name])
            turns.append(_turn(layout.segments[piece.name].shape, len(rivals), rivals.index(g)))
        normed = torch.zeros(part.stop - part.start, dtype=torch.bool)
        for piece, mine in zip(group, turns, strict=True):
            if norms and not branch and isinstance(modules[piece.module], NORMS):
                normed[piece.unit[(piece.unit >= 0) & mine]] = True
        for piece, mine in zip(group, turns, strict=True):
            # a norm may read a part of the group only (split features): the others have their filters
            chosen = (piece.unit >= 0) & (branch | (normed[piece.unit] == isinstance(modules[piece.module], NORMS)))
            index = layout.segments[piece.name].view(everywhere)
            index, mine = (t.movedim(piece.axis, 0).reshape(len(chosen), -1)[chosen] for t in (index, mine))
            units.append((piece.unit[chosen] + part.start)[:, None].expand(index.shape)[mine])
            coordinates.append(index[mine])
    return Scales.of_pairs(
        torch.cat(units), torch.cat(coordinates), tuple(group.name for group in structure.groups),
        tuple(group.units for group in structure.groups), layout.spare, device,
    )  # fmt: skip


def _rivals(group: int, claims: list[tuple[int, Slice]]) -> list[int]:
    """The groups that claim weights of one tensor which this one claims, or one of those, and so on."""
    found = {group}
    while True:
        mine = [piece for g, piece in claims if g in found]
        more = {g for g, piece in claims if any(_overlap(piece, other) for other in mine)} | found
        if more == found:
            return sorted(found)
        found = more


def _overlap(a: Slice, b: Slice) -> bool:
    return a.axis != b.axis or bool(((a.unit >= 0) & (b.unit >= 0)).any())


def _turn(shape: torch.Size, players: int, turn: int) -> Tensor:
    """bool (*shape): every `players`-th element along each axis, beginning at another one in each turn."""
    places = torch.zeros(shape, dtype=torch.int64)
    for axis, size in enumerate(shape):
        places += torch.arange(size).view([-1 if d == axis else 1 for d in range(len(shape))])
    return places % players == turn


def _makes(modules: Mapping[str, nn.Module], piece: Slice, layout: Layout) -> bool:
    """True for what makes a unit: filters, tables, factors of batch norms; not for biases and other vectors."""
    if piece.role != "write":
        return piece.role == "branch" and not piece.name.endswith("bias")
    if isinstance(modules[piece.module], NORMS):
        return piece.name.endswith(".weight")
    return len(layout.segments[piece.name].shape) > 1
