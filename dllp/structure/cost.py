"""The cost of a network as a function of its gates: multiply-accumulates and parameters (Section 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from dllp.structure.atoms import Atom, Label, Segment

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Cost:
    """A polynomial of the gates: a sum over terms of `weight` times a product of counts of open units.

    Count k is `base[k]` + gates @ `signals[:, k]`; term l has the counts `factors[l]` (count 0 is 1). `square` (U,) is
    the coefficient of gates squared, and `shared` lists the terms in which two of several counts have gates in common:
    there the variance gates (1 - gates) @ `common[:, v]` stands for both.
    """

    dense: float
    const: Tensor
    linear: Tensor
    square: Tensor
    base: Tensor
    signals: Tensor
    weight: Tensor
    factors: Tensor
    common: Tensor
    shared_weight: Tensor
    shared: Tensor
    shared_factors: Tensor

    def expected(self, theta: Tensor) -> Tensor:
        """theta (..., U) -> (...): expected cost under independent gates, exact; the cost itself for 0/1 gates."""
        with torch.autocast(theta.device.type, enabled=False):  # which would round products to half precision
            theta = theta.to(self.linear.dtype)
            # sums of products: for matrix products cuBLAS would hold a workspace larger than all of this
            counts = self.base + (theta[..., None] * self.signals).sum(-2)
            # A gate that occurs twice in a product has E[z z] = theta, not theta^2.
            variance = theta * (1 - theta)
            result = self.const + (theta * self.linear + variance * self.square).sum(-1)
            result = result + products(counts, self.factors, self.weight).sum(-1)
            if len(self.shared):
                both = (variance[..., None] * self.common).sum(-2).index_select(-1, self.shared)
                result = result + (both * products(counts, self.shared_factors, self.shared_weight)).sum(-1)
            return result

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Cost:
        """The same cost on `device`, in `dtype` if given."""
        return moved(self, device, dtype)


def products(counts: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
    """Counts (..., K) -> (..., terms): `weight` times the product of the counts in each row of `factors`."""
    result = weight
    for column in factors.unbind(1):
        result = counts.index_select(-1, column) * result
    return result


def moved(cost: T, device: torch.device | str, dtype: torch.dtype | None = None) -> T:
    """A dataclass with its tensors on `device`, real ones in `dtype` if given."""
    tensors = {
        name: value.to(device, dtype if value.is_floating_point() else None)
        for name, value in vars(cost).items()
        if isinstance(value, Tensor)
    }
    return replace(cost, **tensors)  # pyright: ignore[reportArgumentType]


def polynomial(terms: Iterable[tuple[float, Sequence[Label]]], atoms: Sequence[Atom]) -> Cost:
    """The cost of terms (coefficient, labels), each the product of what remains of its axes; atoms have the gates."""
    result = _Terms(atoms)
    for times, labels in terms:
        for choice in product(*(result.alternatives(label) for label in labels)):
            result.add(times * math.prod(factor for factor, _ in choice), [c for _, counts in choice for c in counts])
    return result.cost()


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of A axes as functions of the gates: sums of terms as in :class:`Cost`; `axis` (terms,) says of which."""

    base: Tensor
    signals: Tensor
    weight: Tensor
    factors: Tensor
    axis: Tensor
    number: int

    def expected(self, theta: Tensor) -> Tensor:
        """theta (..., U) -> (..., A): expected sizes, where no gate occurs twice in a product; sizes of 0/1 gates."""
        return self.of(self.base + (theta[..., None] * self.signals).sum(-2))

    def of(self, counts: Tensor) -> Tensor:
        """Counts (..., K) of open units -> (..., A)."""
        terms = products(counts, self.factors, self.weight)
        return terms.new_zeros(*terms.shape[:-1], self.number).index_add(-1, self.axis, terms)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Sizes:
        """The same on `device`, in `dtype` if given."""
        return moved(self, device, dtype)


def sizes(labels: Iterable[Label], atoms: Sequence[Atom]) -> tuple[Sizes, list[int]]:
    """The sizes of axes, equal ones counted once, and the number of each label's axis; atoms have the gates."""
    terms, axes = _Terms(atoms), dict[tuple[tuple[float, tuple[int, ...]], ...], int]()
    found = []
    for label in labels:
        rows = tuple((factor, tuple(map(terms.index, counts))) for factor, counts in terms.alternatives(label))
        found.append(axes.setdefault(rows, len(axes)))
    listed = [(factor, row, axis) for rows, axis in axes.items() for factor, row in rows]
    weight, axis = _exact([factor for factor, _, _ in listed]), torch.tensor([a for _, _, a in listed]).long()
    return Sizes(*terms.stacked(), weight, _table([row for _, row, _ in listed]), axis, len(axes)), found


Count = tuple[float, Tensor]  # a constant, and the number of indices (U,) that each open unit adds to it


class _Terms:
    """The terms of a cost, collected one by one."""

    def __init__(self, atoms: Sequence[Atom]) -> None:
        self.total = sum(atom.size for atom in atoms)
        self.place: dict[Atom, slice] = {}
        offset = 0
        for atom in atoms:
            self.place[atom] = slice(offset, offset + atom.size)
            offset += atom.size
        self.const = 0.0
        self.linear = torch.zeros(self.total, dtype=torch.float64)
        self.square = self.linear.clone()
        self.counts: dict[tuple[float, bytes], tuple[int, Count]] = {}
        self.common: dict[bytes, tuple[int, Tensor]] = {}
        self.rows: list[tuple[float, list[int]]] = []
        self.shared: list[tuple[float, int, list[int]]] = []
        self.index((1.0, self.linear))

    def index(self, count: Count) -> int:
        """Number of a count; equal ones share one."""
        base, units = count
        return self.counts.setdefault((base, units.numpy().tobytes()), (len(self.counts), (base, units.clone())))[0]

    def alternatives(self, label: Label) -> list[tuple[float, list[Count]]]:
        """An axis as a sum of products: (coefficient, counts) of each."""
        affine, units, result = 0.0, torch.zeros_like(self.linear), []
        for factor, gated in (found for segment in label for found in self._monomials(segment)):
            if not gated:
                affine += factor
            elif len(gated) == 1:
                units[self.place[gated[0]]] += factor
            else:
                result.append((factor, [self._atom(atom) for atom in gated]))
        if affine or bool(units.any()):
            result.append((1.0, [(affine, units)]))
        return result

    def _atom(self, atom: Atom) -> Count:
        units = torch.zeros_like(self.linear)
        units[self.place[atom]] = 1
        return 0.0, units

    def _monomials(self, segment: Segment) -> list[tuple[float, list[Atom]]]:
        """A segment as a sum of products of constants and gated atoms."""
        result: list[tuple[float, list[Atom]]] = [(1.0, [])]
        for atom in segment:
            atom = atom.find()
            if atom in self.place:
                inner = [(1.0, [atom])]
            elif not atom.parts:
                inner = [(float(atom.size), [])]
            elif atom.summed:
                inner = [found for part in atom.parts for found in self._monomials((part,))]
            else:
                inner = self._monomials(tuple(atom.parts))
            result = _gathered((a * b, [*x, *y]) for a, x in result for b, y in inner)
        return result

    def add(self, factor: float, counts: list[Count]) -> None:
        """Add a product of counts."""
        gated = []
        for base, units in counts:
            if bool(units.any()):
                gated.append((base, units))
            else:
                factor *= base
        if not gated:
            self.const += factor
        elif len(gated) == 1:
            self.const += factor * gated[0][0]
            self.linear += factor * gated[0][1]
        else:
            self.rows.append((factor, [self.index(count) for count in gated]))
            for i, j in combinations(range(len(gated)), 2):
                both = gated[i][1] * gated[j][1]
                others = [self.index(count) for k, count in enumerate(gated) if k not in (i, j)]
                if bool(both.any()) and others:
                    column = self.common.setdefault(both.numpy().tobytes(), (len(self.common), both))[0]
                    self.shared.append((factor, column, others))
                elif bool(both.any()):
                    self.square += factor * both

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Constants (K,) and units (U, K) of all counts."""
        counts = [count for _, count in self.counts.values()]
        return _exact([base for base, _ in counts]), torch.stack([units for _, units in counts], dim=1)

    def cost(self) -> Cost:
        """The finished cost."""
        common = [both for _, both in self.common.values()]
        base, signals = self.stacked()
        result = Cost(
            dense=0.0,
            const=_exact(self.const),
            linear=self.linear,
            square=self.square,
            base=base,
            signals=signals,
            weight=_exact([factor for factor, _ in self.rows]),
            factors=_table([found for _, found in self.rows]),
            common=torch.stack(common, dim=1) if common else self.linear.new_zeros(self.total, 0),
            shared_weight=_exact([factor for factor, _, _ in self.shared]),
            shared=torch.tensor([column for _, column, _ in self.shared], dtype=torch.int64),
            shared_factors=_table([others for _, _, others in self.shared]),
        )
        return replace(result, dense=result.expected(torch.ones(self.total, dtype=torch.float64)).item())


def _gathered(monomials: Iterable[tuple[float, list[Atom]]]) -> list[tuple[float, list[Atom]]]:
    """Monomials with equal atoms added up."""
    result: dict[tuple[int, ...], tuple[float, list[Atom]]] = {}
    for factor, atoms in monomials:
        key = tuple(map(id, atoms))
        result[key] = (result.get(key, (0.0, atoms))[0] + factor, atoms)
    return list(result.values())


def _exact(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _table(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of unequal length as int64 (rows, longest), filled up with count 0, which is 1."""
    longest = max(map(len, rows), default=1)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int64).view(-1, longest)
