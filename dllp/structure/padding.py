"""Kept channels brought to multiples that fast kernels want: padded with dead channels, or rounded.

onnxruntime's fast convolutions work on blocks of 4 channels, tensor cores on 8; other widths fall back to slower ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dllp.errors import StructureError
from dllp.structure.groups import Structure
from dllp.structure.slicing import Fold, Recipe, cut, fold_in, kept_indices, recipe, restrict


def widened(structure: Structure, keep: Tensor, steps: Sequence[int], priority: Tensor | None = None) -> Tensor:
    """(U,) bool: the kept units, and more in descending `priority` (U,) until each group has a multiple of its step."""
    counts = [-(-int(keep[part].sum()) // step) * step for part, step in zip(structure.slices, steps, strict=True)]
    return _with_counts(structure, keep, counts, priority)


def padding_steps(structure: Structure, multiple: int) -> list[int]:
    """Units in each group that make a multiple of so many channels; 1 under a norm, which would count dead ones."""
    averaged = [any(piece.role == "mean" for piece in group.slices) for group in structure.groups]
    return [1 if norm else step for norm, step in zip(averaged, structure.steps(multiple), strict=True)]


def closing_fold(network: nn.Module, structure: Structure, wide: Tensor, keep: Tensor) -> tuple[Fold, Tensor]:
    """The fold of a network that was cut to the units of `wide` (U,), and its gates: 0 for units not in `keep` (U,)."""
    groups = restrict(structure.groups, wide)
    return Fold(network, groups), keep[wide].float()


def padded(model: nn.Module, structure: Structure, keep: Tensor, multiple: int) -> tuple[nn.Module, float]:
    """M_0 cut to `keep` (U,), dead channels added up to a multiple, its outputs unchanged; and its MACs."""
    wide = widened(structure, keep, padding_steps(structure, multiple))
    network = cut(model, recipe(model, structure.groups, wide))
    fold_in(network, *closing_fold(network, structure, wide, keep))
    return network, _macs(structure, wide)


def rounded(model: nn.Module, structure: Structure, keep: Tensor, multiple: int) -> tuple[nn.Module, float]:
    """The network that `round_to` would have made of the same budget, for measuring time only; and its MACs."""
    units, kept = [group.units for group in structure.groups], [int(keep[part].sum()) for part in structure.slices]
    steps, budget = structure.steps(multiple), _macs(structure, keep)
    counts = [
        k if k in (0, most) else min(max(k // step * step, step), most)
        for k, most, step in zip(kept, units, steps, strict=True)
    ]
    grown = True
    while grown:  # what rounding down has saved goes to the groups that lost most
        grown = False
        for g in sorted(range(len(counts)), key=lambda g: counts[g] - kept[g]):
            more = [*counts[:g], min(counts[g] + steps[g], units[g]), *counts[g + 1 :]]
            if counts[g] and more != counts and _macs(structure, _with_counts(structure, keep, more)) <= budget:
                counts, grown = more, True
    chosen = _with_counts(structure, keep, counts)
    return cut(model, recipe(model, structure.groups, chosen)), _macs(structure, chosen)


def _with_counts(structure: Structure, keep: Tensor, counts: Sequence[int], priority: Tensor | None = None) -> Tensor:
    """(U,) bool with so many units in each group: those of `keep` first, then others in order of `priority`."""
    result = torch.zeros_like(keep)
    for part, count in zip(structure.slices, counts, strict=True):
        kept = keep[part]
        order = torch.arange(len(kept)) if priority is None else priority[part].argsort(descending=True, stable=True)
        order = order[kept[order].int().argsort(descending=True, stable=True)]
        result[part.start + order[:count]] = True
    return result


def _macs(structure: Structure, keep: Tensor) -> float:
    return structure.flops.expected(keep.double()).item()


def kept_units(model: nn.Module, structure: Structure, kept: Recipe) -> Tensor:
    """The units (U,) bool that a recipe keeps; refuses a recipe that was not made from these groups."""
    keep = torch.ones(structure.units, dtype=torch.bool)
    places = kept_indices(model, kept)
    shapes = {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for group, part in zip(structure.groups, structure.slices, strict=True):
        if group.gone:
            keep[part] = not any(entry in kept.get(name, {}) for name, entry in group.gone)
            continue
        piece = next(piece for piece in group.slices if piece.role == "write")
        shape = shapes[piece.name]
        left = places[piece.name] // math.prod(shape[piece.axis + 1 :]) % shape[piece.axis]
        unit = piece.unit[left.unique()]
        keep[part] = False
        keep[unit[unit >= 0] + part.start] = True
    if recipe(model, structure.groups, keep) != kept:
        raise StructureError("the kept channels do not fit the network's groups: pad_to and round_to need a run's own")
    return keep


@torch.no_grad()
def fill(model: nn.Module, small: nn.Module, places: Mapping[str, Tensor]) -> None:
    """Write a cut network's parameters and buffers back into the full one, at `places` from `kept_indices`."""
    values = small.state_dict()
    for name, tensor in model.state_dict().items():
        if name not in values:  # of a branch that is gone
            continue
        flat = tensor.clone(memory_format=torch.contiguous_format).flatten()  # never the tensor's own memory
        flat[places[name].flatten()] = values[name].flatten().to(tensor.dtype)
        tensor.copy_(flat.view_as(tensor))
