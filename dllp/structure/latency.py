"""The time of a network as a function of its gates, looked up in a profile of its layers on a runtime (Section 5).

Time is no polynomial of the widths: kernels work on blocks of channels, and narrow layers wait for memory. A profile
holds what was measured, at a few widths of every layer; the decision takes these widths and no others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dllp import files
from dllp.errors import ConfigError
from dllp.structure.cost import Sizes, moved
from dllp.structure.groups import Structure

POINTS = 8  # widths at which a layer is timed, at most
MULTIPLES = ((64, 8), (16, 4), (1, 1))  # channels of a group from which on its widths are multiples of so many


@dataclass(frozen=True)
class Table:
    """Seconds of a kernel, by inputs and outputs, and the numbers of all kernels of the network that are like it."""

    layer: str
    kernels: list[int]
    inputs: list[int]
    outputs: list[int]
    seconds: list[list[float]]


@dataclass(frozen=True)
class Check:
    """A whole network cut to a fraction of every group: its measured seconds, and the sum of its kernels."""

    kept: float
    seconds: float
    kernels: float


@dataclass(frozen=True)
class Profile:
    """Times of a network's layers on a machine; with `overhead` and a common factor their sum is the network's."""

    runtime: str
    threads: int
    batch: int
    machine: str
    versions: dict[str, str]
    network: str  # fingerprint of the network's layers
    dense: float  # seconds of the dense network
    overhead: float  # seconds of it that do not fall with the widths: calls, and what is no layer
    tables: list[Table]  # kernels alone
    checks: list[Check]  # the networks by which overhead and factor were found

    def write(self, path: Path) -> None:
        files.write_json(path, asdict(self), named=True)

    @staticmethod
    def read(path: Path) -> Profile:
        found = files.typed(Profile, files.read_json(path), path)
        for table in found.tables:
            shape = (len(table.inputs), len(table.outputs))
            seconds = np.asarray(table.seconds) if len({*map(len, table.seconds)}) == 1 else np.zeros(0)
            rising = all(a < b for grid in (table.inputs, table.outputs) for a, b in pairwise([0, *grid]))
            if seconds.shape != shape or not rising or not bool((seconds > 0).all()):
                raise ConfigError(f"{path} is damaged at layer {table.layer}: make it again with dllp profile")
        return found


def fingerprint(structure: Structure) -> str:
    """The network's kernels and their dense widths in 16 characters; which groups may be cut is not in it."""
    full = dense_sizes(structure)
    found = [[asdict(kernel.form), full[kernel.inputs], full[kernel.outputs]] for kernel in structure.kernels]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def dense_sizes(structure: Structure) -> list[int]:
    """Sizes of all axes of the dense network."""
    return structure.sizes.expected(torch.ones(structure.units, dtype=torch.float64)).round().int().tolist()


def chunks(structure: Structure) -> list[int]:
    """Units by which each group grows: its widths are multiples, and at most :data:`POINTS`."""
    result = []
    for g, group in enumerate(structure.groups):
        multiple = next(m for least, m in MULTIPLES if group.units * group.width >= least)
        step = min(structure.steps(multiple)[g], group.units)
        result.append(-(-group.units // (POINTS * step)) * step)
    return result


def levels(structure: Structure) -> list[list[int]]:
    """Numbers of units that each group may keep."""
    pairs = zip(structure.groups, chunks(structure), strict=True)
    return [[*range(step, group.units, step), group.units] for group, step in pairs]


def grids(structure: Structure) -> list[list[int]]:
    """Sizes at which each axis is timed: those that the widths of its groups give it, one group after the other."""
    found = [{size} for size in dense_sizes(structure)]
    counts = levels(structure)
    cases = [{g: count} for g, each in enumerate(counts) for count in each]
    cases += [{g: each[len(each) * k // POINTS] for g, each in enumerate(counts)} for k in range(POINTS)]
    for case in cases:
        for axis, size in enumerate(structure.sizes.expected(hard(structure, case)).round().int().tolist()):
            found[axis].add(size)
    result = []
    for sizes in found:
        values = sorted(sizes - {0})
        chosen = {round(i * (len(values) - 1) / POINTS) for i in range(POINTS + 1)}  # the first and the last among them
        result.append([values[i] for i in sorted(chosen)])
    return result


def hard(structure: Structure, counts: dict[int, int]) -> Tensor:
    """(U,) float64 gates: the first units of some groups, as many as given, and all of the others."""
    gates = torch.ones(structure.units, dtype=torch.float64)
    for g, count in counts.items():
        here = structure.slices[g]
        gates[here.start + count : here.stop] = 0
    return gates


@dataclass(frozen=True, eq=False)
class Latency:
    """Seconds as a function of the gates, with the methods of :class:`dllp.structure.cost.Cost`.

    No width is slower than a wider one: the decision then takes the wider.
    """

    dense: float
    sizes: Sizes  # of all axes
    axes: Tensor  # (3, L) axes of each kernel's inputs, outputs and branches
    grid: Tensor  # (2, L, G) their sizes, from 0 on
    seconds: Tensor  # (L, G, G) by input and output; what is gone is so by its branch
    convex: Tensor  # (L, G, G) the lower convex envelope of these, whose slopes are the gradient
    chunks: list[int]  # units by which each group grows
    measure: Callable[[Tensor], float] | None = None  # units (U,) -> time over the dense one's; None on other machines

    def expected(self, theta: Tensor) -> Tensor:
        """theta (..., U) -> (...): the time at the *expected* widths, bilinear between those that were measured.

        That is not the expected time, as steps between these widths are smoothed; for 0/1 gates of measured widths it
        is the sum of the measured times. Its gradient is that of the lower convex envelope: where a wide layer could
        lose some units without any gain its gates would wait for a price that, at whole steps, is never the best.
        """
        with torch.autocast(theta.device.type, enabled=False):
            sizes = self.sizes.expected(theta.to(self.grid.dtype))
            time = self.of(sizes.detach())
            if not sizes.requires_grad:
                return time
            below = self.of(sizes, convex=True)
            return below + (time - below).detach()

    def of(self, sizes: Tensor, *, convex: bool = False) -> Tensor:
        """Sizes (..., A) of axes -> (...)."""
        table = self.convex if convex else self.seconds
        (i, a), (j, b) = (
            _cell(sizes.index_select(-1, axes), grid) for axes, grid in zip(self.axes[:2], self.grid, strict=True)
        )
        count, points = self.grid.shape[1:]
        corner = (torch.arange(count, device=i.device) * points + i) * points + j
        near, far = (table.take(corner + row) * (1 - b) + table.take(corner + row + 1) * b for row in (0, points))
        return ((near * (1 - a) + far * a) * sizes.index_select(-1, self.axes[2])).sum(-1)

    def prices(self, structure: Structure) -> Tensor:
        """(U,) seconds of a unit of each group, on the average over all that may go: a single step may be flat."""
        result = torch.zeros(structure.units, dtype=self.grid.dtype)
        for g, (here, step) in enumerate(zip(structure.slices, self.chunks, strict=True)):
            least = 0 if structure.groups[g].gone else step
            saved = self.dense - self.expected(hard(structure, {g: least}).to(self.grid.device)).item()
            result[here] = saved / max(1, structure.groups[g].units - least)
        return result.clamp_min(1e-3 * result.mean())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Latency:
        """The same on `device`, in `dtype` if given."""
        return moved(replace(self, sizes=self.sizes.to(device, dtype)), device, dtype)


def _cell(sizes: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes (..., L) in rows of rising numbers (L, G): index of the interval, and the place in it, in [0, 1]."""
    at = (sizes[..., None] >= grid[:, 1:-1]).sum(-1)
    index = torch.arange(len(grid), device=grid.device) * grid.shape[1] + at
    low, high = grid.take(index), grid.take(index + 1)
    return at, ((sizes - low) / (high - low)).clamp(0, 1)


def latency(structure: Structure, profile: Profile) -> Latency:
    """The time that a profile tells of a network; refuses a profile of another one."""
    if profile.network != fingerprint(structure):
        raise ConfigError("the profile is of another network (or inputs, or outputs): make one of this by dllp profile")
    count = len(structure.kernels)
    complete = sorted(k for table in profile.tables for k in table.kernels) == [*range(count)]
    if not complete or not 0 <= profile.overhead < profile.dense:
        raise ConfigError("the profile does not hold every layer once, or no time: make it again with dllp profile")
    points = 1 + max([2, *(len(grid) for table in profile.tables for grid in (table.inputs, table.outputs))])
    grid = torch.zeros(2, count, points, dtype=torch.float64)
    seconds, convex = torch.zeros(2, count, points, points, dtype=torch.float64)
    for table in profile.tables:
        own = torch.tensor(table.seconds, dtype=torch.float64)
        for axis in (0, 1):  # the least time of all that are as wide or wider
            own = own.flip(axis).cummin(axis).values.flip(axis)
        below = _envelope(_envelope(own, table.outputs).T, table.inputs).T
        for k in table.kernels:
            for side, sizes in enumerate((table.inputs, table.outputs)):
                last = torch.arange(1, points - len(sizes), dtype=torch.float64) + sizes[-1]
                grid[side, k, 1:] = torch.cat([torch.tensor(sizes, dtype=torch.float64), last])
            # at 0 the time of the least size: the decision leaves at least that, so soft gates must not pay for less
            rows, columns = ((torch.arange(points) - 1).clamp(0, n - 1) for n in own.shape)
            seconds[k], convex[k] = own[rows][:, columns], below[rows][:, columns]
    axes = torch.tensor([[k.inputs, k.outputs, k.branch] for k in structure.kernels]).T
    ones = torch.ones(structure.units, dtype=torch.float64)
    raw = Latency(0.0, structure.sizes, axes, grid, seconds, convex, chunks(structure))
    factor = (profile.dense - profile.overhead) / raw.expected(ones).item()
    seconds, convex = (table * factor + profile.overhead / count for table in (seconds, convex))
    return replace(raw, dense=profile.dense, seconds=seconds, convex=convex)


def _envelope(times: Tensor, sizes: list[int]) -> Tensor:
    """(..., G) times at rising sizes -> the largest convex function of the size that is nowhere above them."""
    at = torch.tensor(sizes, dtype=times.dtype)
    result = times.clone()
    for a, b in combinations(range(len(sizes)), 2):  # the least chord over each size
        part = (at[a : b + 1] - at[a]) / (at[b] - at[a])
        chord = torch.lerp(times[..., a, None], times[..., b, None], part)
        result[..., a : b + 1] = result[..., a : b + 1].minimum(chord)
    return result
