"""What each gate rules: the weights it multiplies, the scale its prior acts on, and the cost it saves.

Channel and weight granularity answer the same questions, so training knows only :class:`Gating`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from dllp.errors import StructureError
from dllp.particles import Layout
from dllp.selection import select
from dllp.slicing import Fold, Recipe, recipe
from dllp.structure import Structure

FilterFn = Callable[[nn.Module, str], bool]
Budget = Literal["flops", "params"]
NORMS = (nn.modules.batchnorm._NormBase, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Scales:
    """The values the prior acts on: unit u's scale is the RMS of its coordinates in a row (Section 4).

    Attributes:
        coordinates: (U, M) into a row; units with fewer than M coordinates are padded with `spare`, which holds 0.
        count: (U,) number of real coordinates.
        modules: Names of the modules that own a slab precision.
        lengths: Number of consecutive units that each of them rules.
    """

    coordinates: Tensor
    count: Tensor
    modules: tuple[str, ...]
    lengths: tuple[int, ...]

    def of(self, rows: Tensor) -> Tensor:
        """(n, P) rows -> (n, U) scales."""
        if self.coordinates.shape[1] == 1:
            return rows[:, self.coordinates[:, 0]]
        return (rows[:, self.coordinates].square().sum(-1) / self.count).sqrt()

    def module_sums(self, values: Tensor) -> Tensor:
        """(n, U) -> (n, modules): sums over each module's units, without atomics."""
        return torch.stack([part.sum(1) for part in values.split(self.lengths, dim=1)], dim=1)

    def spread(self, values: Tensor) -> Tensor:
        """(n, modules) -> (n, U): each module's value at its units."""
        return torch.cat([v.expand(-1, k) for v, k in zip(values.split(1, dim=1), self.lengths, strict=True)], dim=1)


@dataclass(frozen=True)
class LinearCost:
    """Every gate has its own price (U,); what is left of the dense cost is constant."""

    price: Tensor
    dense: float

    def expected(self, theta: Tensor) -> Tensor:
        """(..., U) gate probabilities -> (...) expected cost."""
        return self.dense - (1 - theta) @ self.price


class AnyCost(Protocol):
    """Expected cost of independent gates, and the cost of the dense network."""

    @property
    def dense(self) -> float: ...

    def expected(self, theta: Tensor) -> Tensor: ...


class Gating(Protocol):
    """The gates of one network, as training sees them."""

    units: int
    scales: Scales
    flops: AnyCost
    params: AnyCost

    def weights(self, parameters: Mapping[str, Tensor], gates: Tensor) -> dict[str, Tensor]:
        """(U,) gates -> the effective weights that replace the parameters of the same name."""
        ...

    def select(self, logits: Tensor, budget: Budget, keep: float | None) -> Tensor:
        """(U,) logits -> bool (U,): the gates that stay so that `budget` costs at most `keep` of the dense network."""
        ...


class ChannelGating:
    """One gate for each prunable channel with everything coupled to it, folded into its consumers."""

    def __init__(
        self, model: nn.Module, structure: Structure, layout: Layout, device: torch.device, *, round_to: int = 1
    ) -> None:
        self.structure, self.round_to = structure, round_to
        self.units = structure.units
        self.fold = Fold(model, structure.groups).to(device)
        self.flops, self.params = structure.flops.to(device), structure.params.to(device)
        self.scales = channel_scales(model, structure, layout, device)

    def weights(self, parameters: Mapping[str, Tensor], gates: Tensor) -> dict[str, Tensor]:
        return self.fold(parameters, gates)

    def select(self, logits: Tensor, budget: Budget, keep: float | None) -> Tensor:
        cost = getattr(self.structure, budget)
        return select(self.structure, logits.cpu(), cost=cost, keep=keep, round_to=self.round_to).to(logits.device)

    def recipe(self, model: nn.Module, keep: Tensor) -> Recipe:
        """The kept channels of every module, given the kept gates (U,)."""
        return recipe(model, self.structure.groups, keep.cpu())


class WeightGating:
    """One gate for each convolution weight (and linear weight, by option): the paper's letter."""

    def __init__(
        self, model: nn.Module, structure: Structure, layout: Layout, device: torch.device, *,
        linear: bool = False, filter_fn: FilterFn | None = None,
    ) -> None:  # fmt: skip
        kinds = (nn.modules.conv._ConvNd, nn.Linear) if linear else (nn.modules.conv._ConvNd,)
        macs = {layer.name: layer.macs for layer in structure.layers}
        modules = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, kinds) and name in macs and (filter_fn is None or filter_fn(module, name))
        ]
        if not modules:
            raise StructureError("the network has no weights to gate: allow some in filter_fn, or set gate_linear=True")
        self.segments = [layout.segments[f"{name}.weight"] for name, _ in modules]
        sizes = [segment.shape.numel() for segment in self.segments]
        self.units = sum(sizes)
        self.starts = [sum(sizes[:k]) for k in range(len(sizes))]
        coordinates = torch.cat([torch.arange(s.offset, s.offset + s.shape.numel()) for s in self.segments])
        self.scales = Scales(
            coordinates[:, None].to(device),
            torch.ones(self.units, device=device),
            tuple(name for name, _ in modules),
            tuple(sizes),
        )
        prices = torch.tensor([macs[name] / size for (name, _), size in zip(modules, sizes, strict=True)])
        self.flops = LinearCost(prices.repeat_interleave(torch.tensor(sizes)).to(device), structure.flops.dense)
        self.params = LinearCost(torch.ones(self.units, device=device), structure.params.dense)

    def weights(self, parameters: Mapping[str, Tensor], gates: Tensor) -> dict[str, Tensor]:
        effective = {}
        for segment, start in zip(self.segments, self.starts, strict=True):
            gate = gates[start : start + segment.shape.numel()]
            if segment.channels_last:
                o, i, h, w = segment.shape
                gate = gate.view(o, h, w, i).permute(0, 3, 1, 2)
            else:
                gate = gate.view(segment.shape)
            effective[segment.name] = parameters[segment.name] * gate
        return effective

    def select(self, logits: Tensor, budget: Budget, keep: float | None) -> Tensor:
        """Keep the most probable weights whose cost fits; single weights are fine enough to meet any budget."""
        if keep is None:
            return logits > 0
        cost: LinearCost = getattr(self, budget)
        price = cost.price.to(logits.device, torch.float64)
        fixed = cost.dense - float(price.sum())
        room = keep * cost.dense - fixed
        if room < 0:
            raise StructureError(
                f"the budget cannot be met: the weights without gates alone cost {fixed / cost.dense:.4f} of the dense "
                "network; keep more, or set gate_linear=True"
            )
        order = torch.argsort(logits, descending=True, stable=True)
        spent = price[order].cumsum(0)
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        chosen[order[spent <= room + 1e-6 * cost.dense]] = True
        return chosen


def channel_scales(model: nn.Module, structure: Structure, layout: Layout, device: torch.device) -> Scales:
    """RMS of the group's normalisation scales, or of its filters where there is no normalisation."""
    modules = dict(model.named_modules())
    coordinates: list[list[Tensor]] = [[] for _ in range(structure.units)]
    start = 0
    for group in structure.groups:
        producers = [s for s in group.slices if s.side == "out"]
        norms = [
            s for s in producers if isinstance(modules[s.module], NORMS) and f"{s.module}.weight" in layout.segments
        ]
        for part in norms or producers:
            segment = layout.segments.get(f"{part.module}.weight")
            if segment is None or isinstance(modules[part.module], nn.PReLU):
                continue
            index = segment.view(torch.arange(layout.size))
            if isinstance(modules[part.module], nn.modules.conv._ConvTransposeNd):
                index = index.transpose(0, 1)
            per_channel = index.reshape(index.shape[0], -1)
            for channel, unit in enumerate(part.unit.tolist()):
                if unit >= 0:
                    coordinates[start + unit].append(per_channel[channel % per_channel.shape[0]])
        start += group.units
    flat = [torch.cat(parts) for parts in coordinates]
    width = max((len(c) for c in flat), default=1)
    padded = torch.full((len(flat), width), layout.spare, dtype=torch.int64)
    for row, coords in zip(padded, flat, strict=True):
        row[: len(coords)] = coords
    return Scales(
        padded.to(device),
        torch.tensor([len(c) for c in flat], dtype=torch.get_default_dtype(), device=device),
        tuple(group.name for group in structure.groups),
        tuple(group.units for group in structure.groups),
    )
