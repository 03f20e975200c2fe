"""The cost of a network as a function of its gates: multiply-accumulates and parameters (Section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dllp.structure.slicing import Group, Side, side_sizes


@dataclass(frozen=True, eq=False)
class Cost:
    """A cost that is quadratic in the gates: sum over layers of `pair` * inputs * outputs, plus a linear part.

    Column k of `signals` (U, K) counts channels of each unit; layer l has `in_const[l]` input channels without a gate
    and those of column `in_signal[l]`, likewise for its outputs. `square` (U,) is the coefficient of a gate squared.
    """

    dense: float
    const: Tensor
    linear: Tensor
    square: Tensor
    signals: Tensor
    pair: Tensor
    in_const: Tensor
    in_signal: Tensor
    out_const: Tensor
    out_signal: Tensor

    def expected(self, theta: Tensor) -> Tensor:
        """theta (..., U) -> (...): expected cost under independent gates, exact; the cost itself for 0/1 gates."""
        with torch.autocast(theta.device.type, enabled=False):  # which would round products to half precision
            theta = theta.to(self.linear.dtype)
            # sums of products: for matrix products cuBLAS would hold a workspace larger than all of this
            counts = (theta[..., None] * self.signals).sum(-2)
            inputs = self.in_const + counts.index_select(-1, self.in_signal)
            outputs = self.out_const + counts.index_select(-1, self.out_signal)
            # A gate on both sides of a layer has E[z z] = theta, not theta^2.
            single = (theta * self.linear + theta * (1 - theta) * self.square).sum(-1)
            return self.const + single + (inputs * outputs * self.pair).sum(-1)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Cost:
        """The same cost on `device`, in `dtype` if given."""
        moved = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def flops_cost(model: nn.Module, groups: Sequence[Group], macs: Mapping[str, float], total: float) -> Cost:
    """Multiply-accumulates for one example: `macs` of convolutions and linear modules; the rest of `total` is fixed."""
    modules = dict(model.named_modules())
    terms = _Terms(groups)
    counted = 0.0
    for name, count in macs.items():
        sizes = side_sizes(modules[name])
        if "in" in sizes:
            counted += terms.pairs(name, sizes, count / (sizes["in"] * sizes["out"]))
        else:
            counted += terms.each(name, sizes["out"], count / sizes["out"])
    return terms.cost(total - counted)


def params_cost(model: nn.Module, groups: Sequence[Group]) -> Cost:
    """Number of parameters."""
    modules = dict(model.named_modules())
    terms = _Terms(groups)
    counted = 0.0
    for name in dict.fromkeys(name for name, _ in terms.counts):
        sizes = side_sizes(modules[name])
        vectors = sum(p.numel() for p in modules[name].parameters(recurse=False))
        if "in" in sizes:
            weights = modules[name].weight.numel()  # type: ignore[operator, union-attr]
            counted += terms.pairs(name, sizes, weights / (sizes["in"] * sizes["out"]))
            vectors -= weights
        counted += terms.each(name, sizes["out"], vectors / sizes["out"])
    return terms.cost(sum(p.numel() for p in model.parameters()) - counted)


def unit_counts(unit: Tensor, offset: int, total: int) -> Tensor:
    """unit (C,) -> float64 (total,): channels of each unit."""
    return torch.bincount(unit[unit >= 0] + offset, minlength=total).double()


class _Terms:
    """The terms of a cost, collected layer by layer."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.total = sum(group.units for group in groups)
        self.counts: dict[tuple[str, Side], Tensor] = {}
        offset = 0
        for group in groups:
            for piece in group.slices:
                key = (piece.module, piece.side)
                self.counts[key] = self.counts.get(key, 0) + unit_counts(piece.unit, offset, self.total)
            offset += group.units
        self.linear = torch.zeros(self.total, dtype=torch.float64)
        self.square = self.linear.clone()
        self.signals: dict[bytes, tuple[int, Tensor]] = {}
        self.rows: list[tuple[float, float, int, float, int]] = []
        self.fixed = 0.0
        self.signal(self.linear)

    def signal(self, counts: Tensor) -> int:
        """Column of a vector of counts; equal vectors share one."""
        return self.signals.setdefault(counts.numpy().tobytes(), (len(self.signals), counts.clone()))[0]

    def each(self, name: str, size: int, weight: float) -> float:
        """Add `weight` for each of the `size` output channels of a module; returns the sum with open gates."""
        counts = self.counts.get((name, "out"))
        if counts is None:
            return 0.0
        self.linear += weight * counts
        self.fixed += weight * (size - float(counts.sum()))
        return weight * size

    def pairs(self, name: str, sizes: dict[Side, int], weight: float) -> float:
        """Add `weight` for each pair of input and output channel of a module; returns the sum with open gates."""
        zero = torch.zeros_like(self.linear)
        into, out = (self.counts.get((name, side), zero) for side in ("in", "out"))
        if not bool(into.any()) and not bool(out.any()):
            return 0.0
        self.square += weight * into * out
        in_const, out_const = sizes["in"] - float(into.sum()), sizes["out"] - float(out.sum())
        self.rows.append((weight, in_const, self.signal(into), out_const, self.signal(out)))
        return weight * sizes["in"] * sizes["out"]

    def cost(self, const: float) -> Cost:
        """The finished cost with the constant `const` for everything without gates."""
        table = torch.tensor(self.rows, dtype=torch.float64).view(-1, 5)
        pair, in_const, in_signal, out_const, out_signal = table.unbind(1)
        signals = torch.stack([counts for _, counts in self.signals.values()], dim=1)
        result = Cost(
            0.0,
            torch.tensor(const + self.fixed, dtype=torch.float64),
            self.linear,
            self.square,
            signals,
            pair,
            in_const,
            in_signal.long(),
            out_const,
            out_signal.long(),
        )
        return replace(result, dense=result.expected(torch.ones(self.total, dtype=torch.float64)).item())
