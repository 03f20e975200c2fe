"""Kept channels brought to multiples that a runtime likes: padded without changing the function, or rounded.

onnxruntime's fast convolutions work on blocks of channels and want multiples of 4; others fall back to slower kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dllp.errors import StructureError
from dllp.structure.groups import Structure
from dllp.structure.slicing import Fold, Recipe, copied, cut, recipe, restrict


def kept_units(model: nn.Module, structure: Structure, kept: Recipe) -> Tensor:
    """The units (U,) bool that a recipe keeps; refuses a recipe that was not made from these groups."""
    keep = torch.ones(structure.units, dtype=torch.bool)
    for group, part in zip(structure.groups, structure.slices, strict=True):
        channels = kept.get(group.name, {}).get("out")
        if channels is not None:
            unit = next(p.unit for p in group.slices if p.side == "out" and p.module == group.name)[channels]
            keep[part] = False
            keep[unit[unit >= 0] + part.start] = True
    if recipe(model, structure.groups, keep) != kept:
        raise StructureError("the kept channels do not fit the network's groups: pad_to and round_to need a run's own")
    return keep


def kept_places(model: nn.Module, kept: Recipe) -> dict[str, Tensor]:
    """Where in each flat tensor of a network the numbers are that a recipe keeps."""
    counted = copied(model).cpu()
    for tensor in (*counted.parameters(), *counted.buffers()):
        tensor.requires_grad_(False)
        tensor.data = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
    return {name: places.long().flatten() for name, places in cut(counted, kept).state_dict().items()}


@torch.no_grad()
def fill(model: nn.Module, small: nn.Module, places: Mapping[str, Tensor]) -> None:
    """Give what a recipe keeps of a network the weights and statistics of the network that was cut by it."""
    values = small.state_dict()
    for name, tensor in model.state_dict().items():
        flat = tensor.flatten()
        flat[places[name]] = values[name].flatten().to(tensor.dtype)
        tensor.copy_(flat.view_as(tensor))  # which may not be contiguous


def widened(structure: Structure, keep: Tensor, multiple: int) -> Tensor:
    """(U,) bool: the kept units, and as many more in each group as make a multiple, or all."""
    return _widths(structure, keep, [_ceil(*sizes, multiple) for sizes in _sizes(structure, keep)])


def padded(model: nn.Module, structure: Structure, keep: Tensor, multiple: int) -> tuple[nn.Module, float]:
    """The cut network with dead channels up to a multiple, its outputs unchanged; and its multiply-accumulates.

    Args:
        model: M_0, a particle in its full shape.
        structure: Its groups.
        keep: (U,) bool.
        multiple: Widths of groups that lost channels become multiples of this, or whole again.
    """
    more = widened(structure, keep, multiple)
    kept = recipe(model, structure.groups, more)
    network = cut(model, kept)
    parameters = dict(network.named_parameters())
    fold = Fold(network, restrict(structure.groups, more, kept))
    with torch.no_grad():
        for name, weight in fold(parameters, keep[more].float()).items():
            parameters[name].copy_(weight)
    return network, _macs(structure, more)


def rounded(model: nn.Module, structure: Structure, keep: Tensor, multiple: int) -> tuple[nn.Module, float]:
    """What `round_to` would have made of the same budget: another network, for measuring time only; and its MACs."""
    sizes, budget = _sizes(structure, keep), _macs(structure, keep)
    steps = [_step(per_unit, multiple) for _, _, per_unit in sizes]
    counts = [
        kept if kept == units else min(max(kept // step * step, step), units)
        for (kept, units, _), step in zip(sizes, steps, strict=True)
    ]
    grown = True
    while grown:  # what the rounding down left over goes to the groups that lost most
        grown = False
        for g in sorted(range(len(counts)), key=lambda g: counts[g] - sizes[g][0]):
            more = [*counts[:g], min(counts[g] + steps[g], sizes[g][1]), *counts[g + 1 :]]
            if more != counts and _macs(structure, _widths(structure, keep, more)) <= budget:
                counts, grown = more, True
    chosen = _widths(structure, keep, counts)
    return cut(model, recipe(model, structure.groups, chosen)), _macs(structure, chosen)


def _sizes(structure: Structure, keep: Tensor) -> list[tuple[int, int, int]]:
    """Kept units, all units and channels in each unit, of each group."""
    per_unit = structure.channels_per_unit
    return [(int(keep[p].sum()), p.stop - p.start, int(per_unit[p.start])) for p in structure.slices]


def _step(per_unit: int, multiple: int) -> int:
    """Units that make a multiple of channels."""
    return multiple // math.gcd(multiple, per_unit)


def _ceil(kept: int, units: int, per_unit: int, multiple: int) -> int:
    step = _step(per_unit, multiple)
    return min(-(-kept // step) * step, units)


def _widths(structure: Structure, keep: Tensor, counts: list[int]) -> Tensor:
    """(U,) bool with so many units in each group, those of `keep` first."""
    result = torch.zeros_like(keep)
    for part, count in zip(structure.slices, counts, strict=True):
        result[part.start + keep[part].int().argsort(descending=True, stable=True)[:count]] = True
    return result


def _macs(structure: Structure, keep: Tensor) -> float:
    return structure.flops.expected(keep.double()).item()
