"""Groups of units, read from the labels of a network's axes."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from dllp.structure.atoms import MISALIGNED, Atom, Label, freeze, indices, leaves
from dllp.structure.axes import ALIGNED, Trace
from dllp.structure.slicing import Group, Slice, is_depthwise

UNREAD = "no layer that could be cut reads its channels: they are the network's outputs"
FILTERED = "filter_fn keeps "
FINER = "an even cut removes whole heads or groups of them, not their dimensions"
ALONE = "its channels can only be kept all together"


def components(model: nn.Module, trace: Trace, forbidden: Container[str]) -> tuple[dict[Atom, Group], dict[str, str]]:
    """Groups that may be cut, by their atom, in the order of execution; and {first maker: reason} of all others."""
    modules = dict(model.named_modules())
    makers: dict[Atom, list[str]] = {}
    entire: dict[Atom, list[tuple[str, int]]] = {}
    order: list[tuple[str, list[Atom]]] = []
    for name, label in trace.writes:
        if is_depthwise(modules[name]):
            continue
        found = list(dict.fromkeys(leaves(label)))
        order.append((name, found))
        for atom in found:
            makers.setdefault(atom, []).append(name)
            channels = indices(label, atom)
            if bool((channels >= 0).all()):
                entire.setdefault(atom, []).append((name, len(channels) // atom.size))
    _settle(trace)
    slices = _slices(trace)
    heads = {atom for p in trace.products if p.weight is None for label in p.labels for atom in leaves(label)}
    aligned = {atom for label in trace.aligned for atom in leaves(label)}
    groups: dict[Atom, Group] = {}
    whole: dict[str, str] = {}
    for atom, made in makers.items():
        reason = atom.why or _reason(atom, slices.get(atom, []), forbidden)
        name, width = next(iter(entire.get(atom, [])), (made[0], 1))
        if reason is None:
            averaged = any(piece.role == "mean" for piece in slices[atom])
            kind = "width" if averaged else "head" if atom in heads else "channel"
            multiple = math.gcd(ALIGNED, atom.size) if atom in aligned else 1
            groups[atom] = Group(name, atom.size, tuple(slices[atom]), width, kind, multiple=multiple)
        else:
            atom.why = reason
    for _, found in order:
        if found and not any(atom in groups for atom in found):
            first = next((atom for atom in found if atom.why), found[0])
            root = next(iter(entire.get(first, [])), (makers[first][0], 1))[0]
            whole.setdefault(root, first.why or MISALIGNED)
    return groups, whole


def coarsest(groups: Mapping[Atom, Group]) -> tuple[dict[Atom, Group], dict[Group, str]]:
    """The group of the largest units on every axis that weights are read by; and {group: reason} of the others."""
    taken: dict[tuple[str, int], Tensor] = {}
    finer: dict[Group, str] = {}
    for group in sorted(groups.values(), key=lambda group: -group.width):
        reads = {(p.name, p.axis): p.unit >= 0 for p in group.slices if p.role == "read"}
        if any(key in taken and bool((taken[key] & mine).any()) for key, mine in reads.items()):
            finer[group] = FINER
            continue
        taken |= {key: taken[key] | mine if key in taken else mine for key, mine in reads.items()}
    return {atom: group for atom, group in groups.items() if group not in finer}, finer


def named(groups: Iterable[Group], taken: set[str]) -> list[Group]:
    """The groups under names that no other has: those of one layer are told apart by their kind."""
    result = []
    for group in groups:
        name, count = group.name, 1
        while name in taken:
            name = f"{group.name}:{group.kind}{count if count > 1 else ''}"
            count += 1
        taken.add(name)
        result.append(replace(group, name=name))
    return result


def _settle(trace: Trace) -> None:
    """Freeze what is averaged in more than one way by one module: its gates have one axis."""
    seen: dict[str, tuple[int, list[Atom]]] = {}
    for average in trace.averages:
        mine = (average.axis, list(leaves(average.label)))
        free = [atom for atom in mine[1] if atom.why is None]
        if free and seen.setdefault(average.module, mine) != mine:
            for axis_atoms in (mine, seen[average.module]):
                freeze([tuple(axis_atoms[1])], f"{average.module or 'the network'} takes means over several axes")


def _slices(trace: Trace) -> dict[Atom, list[Slice]]:
    """All axes that an atom without a reason against it is in."""
    result: dict[Atom, list[Slice]] = {}

    def add(name: str, axis: int, label: Label, role: str) -> None:
        for atom in dict.fromkeys(leaves(label)):
            if atom.why is None:
                result.setdefault(atom, []).append(Slice(name, axis, indices(label, atom), role))  # type: ignore

    for name, labels in trace.tensors.items():
        for axis, label in enumerate(labels):
            add(name, axis, label, "read" if (name, axis) in trace.reads else "write")
    seen = set()
    for average in trace.averages:
        if (average.module, average.axis) not in seen and any(a.why is None for a in leaves(average.label)):
            seen.add((average.module, average.axis))
            add(average.module, average.axis, average.label, "mean")
    for (module, path, index), found in trace.attributes.sizes.items():
        if found:
            add(f"{module}:{path}", index, found[0], "size")
    return result


def _reason(atom: Atom, slices: Iterable[Slice], forbidden: Container[str]) -> str | None:
    """The reason why an atom that no operation has frozen stays whole nevertheless."""
    slices = list(slices)
    for piece in slices:
        if piece.role == "write" and piece.module in forbidden:
            return FILTERED + piece.module
    if not any(piece.role == "read" for piece in slices):
        return UNREAD
    if not any(piece.role == "write" for piece in slices):
        return "no weight makes them"
    return ALONE if atom.size == 1 else None
