"""The structure of a network: its groups of units, read from the labels of its axes and verified, and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dllp.config import Config, Units
from dllp.errors import ConfigError
from dllp.structure.atoms import MISALIGNED, Atom, Label, freeze, indices, leaves
from dllp.structure.axes import ALIGNED, OUTPUT, Trace
from dllp.structure.branches import branches, within
from dllp.structure.cost import Cost, Sizes, polynomial, sizes
from dllp.structure.rules import Form
from dllp.structure.slicing import Group, Slice, copied, is_depthwise
from dllp.structure.trace import first_example, isolated, observe
from dllp.structure.verification import WEIGHTS_INSTEAD, unsound, verify
from dllp.structure.views import followed

if TYPE_CHECKING:  # which imports this
    from dllp.structure.latency import Latency

__all__ = [
    "OUTPUT", "UNREAD", "WEIGHTS_INSTEAD", "FilterFn", "Group", "Kernel", "Layer", "Structure", "allowed",
    "discover", "discover_again", "verify",
]  # fmt: skip
UNREAD = "no layer that could be cut reads its channels: they are the network's outputs"
FILTERED = "filter_fn keeps "
FINER = "an even cut removes whole heads or groups of them, not their dimensions"
ALONE = "its channels can only be kept all together"
FilterFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Layer:
    """A module that multiplies by a weight of its own, and its multiply-accumulates for one example."""

    name: str
    macs: float


@dataclass(frozen=True)
class Kernel:
    """A product that can be timed alone: layer, form, axes of inputs, outputs and branch (size 0 where gone)."""

    layer: str
    form: Form
    inputs: int
    outputs: int
    branch: int


@dataclass(frozen=True, eq=False)
class Structure:
    """Groups in the order of execution, reasons for layers that stay whole, and costs as functions of the gates."""

    groups: tuple[Group, ...]
    whole: dict[str, str]
    layers: tuple[Layer, ...]
    flops: Cost
    params: Cost
    kernels: tuple[Kernel, ...]  # products whose time is a function of their widths
    sizes: Sizes  # of the kernels' axes
    even: bool = False  # groups of equally many channels are cut alike
    latency: Latency | None = None  # time of the kernels, where a profile of a runtime was given

    @property
    def units(self) -> int:
        """Total number of units U."""
        return sum(group.units for group in self.groups)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Each group's slice of the vector of all units."""
        return tuple(slice(a, b) for a, b in pairwise(accumulate((group.units for group in self.groups), initial=0)))

    @property
    def channels_per_unit(self) -> Tensor:
        """(U,) int64: output channels of the root module for each unit."""
        return torch.tensor([group.width for group in self.groups for _ in range(group.units)], dtype=torch.int64)

    @property
    def holders(self) -> list[list[int]]:
        """The branches that each group is a part of, by their places in `groups`: without them it is gone."""
        gone = {b: dict(group.gone) for b, group in enumerate(self.groups) if group.gone}
        return [[b for b in gone if b != g and group.inside(gone[b])] for g, group in enumerate(self.groups)]

    def steps(self, multiple: int) -> list[int]:
        """Smallest number of units in each group that makes a multiple of so many channels, and suits its kernels."""
        per_unit = self.channels_per_unit
        steps = [multiple // math.gcd(multiple, int(per_unit[part.start])) for part in self.slices]
        return [math.lcm(step, group.multiple) for step, group in zip(steps, self.groups, strict=True)]


def discover(
    model: nn.Module, example: Tensor | tuple, *, filter_fn: FilterFn | None = None, channels: bool = True,
    units: Units | None = None, even: bool = False,
) -> Structure:  # fmt: skip
    """Find the groups and costs of `model` for inputs like `example`; the model is left unchanged.

    Args:
        model: Any module whose forward takes `example`.
        example: A batch of inputs (or a tuple of them); its first example is used.
        filter_fn: Called with every convolution and linear module and its name; False keeps its channels whole.
        channels: False finds costs only, which any network has whatever its forward does.
        units: `blocks` finds residual branches, `both` channels and branches; `channels` by default.
        even: Cut layers that are equally wide alike; of several groups on one axis (heads and their dimensions) only
            the one of the largest units.
    """
    inputs = first_example(model, example)
    whole: dict[str, str] = {}
    found: dict[Atom, Group] = {}
    with isolated(model):
        scratch = copied(model).eval()  # never run itself, and its parameters serve all copies that are
        trace = observe(scratch, inputs)
        if channels:
            producers = ((n, m) for n, m in model.named_modules() if isinstance(m, (_ConvNd, nn.Linear)))
            forbidden = {name for name, module in producers if not allowed(filter_fn, module, name)}
            finer: dict[Group, str] = {}
            if units != "blocks":
                found, whole = components(model, trace, forbidden)
                found, finer = coarsest(found) if even else (found, {})
                found = followed(scratch, found, trace.attributes.views, inputs)
            if units in ("blocks", "both"):
                lengths = {name: len(p) for name, p in model.named_parameters() if p.dim()}
                for branch in branches(copied(model).eval(), inputs):
                    kept = [name for name in forbidden if within(name, branch.gone)]
                    if kept:
                        whole[f"{branch.name}:branch"] = FILTERED + kept[0]
                        continue
                    zeros = {name: torch.zeros(lengths[name], dtype=torch.int64) for name in branch.parameters}
                    slices = tuple(Slice(name, 0, unit, "branch") for name, unit in zeros.items())
                    found[Atom(1)] = Group(branch.name, 1, slices, 1, "branch", tuple(branch.gone.items()))
            refused = finer | unsound(scratch, list(found.values()), inputs)
            taken: set[str] = set()
            found = {atom: group for atom, group in found.items() if group not in refused}
            found = dict(zip(found, named(found.values(), taken), strict=True))
            whole |= {group.name: why for group, why in zip(named(refused, taken), refused.values(), strict=True)}
        flops, params = _costs(model, trace, found)
        kernels, widths = _kernels(trace, found)
    order = {name: i for i, name in reversed(list(enumerate(name for name, _ in trace.writes)))}
    whole = dict(sorted(whole.items(), key=lambda item: order.get(item[0].partition(":")[0], len(order))))
    layers = tuple(Layer(name, count) for name, count in trace.macs(model).items())
    return Structure(tuple(found.values()), whole, layers, flops, params, kernels, widths, even)


def _costs(model: nn.Module, trace: Trace, groups: Mapping[Atom, Group]) -> tuple[Cost, Cost]:
    """Multiply-accumulates and parameters; those inside a branch have its gate as one more factor."""

    def gates(module: str) -> list[Label]:
        return [[(atom,)] for atom in _branches_of(module, groups)]

    parameters = {name for name, _ in model.named_parameters()}
    products = ((p.times, [*p.labels, *gates(p.module)]) for p in trace.products)
    stored = ((1, [*labels, *gates(n.rpartition(".")[0])]) for n, labels in trace.tensors.items() if n in parameters)
    return polynomial(products, list(groups)), polynomial(stored, list(groups))


def _kernels(trace: Trace, groups: Mapping[Atom, Group]) -> tuple[tuple[Kernel, ...], Sizes]:
    """The products that can be timed, and the sizes of their axes; the last of three is the gate of their branches."""
    timed = [(p, p.form) for p in trace.products if p.form is not None and p.weight is not None]
    labels: list[Label] = []
    for p, form in timed:
        labels += p.labels[:0:-1] if form.kernel else p.labels[1:]  # inputs, outputs
        labels.append([tuple(_branches_of(p.module, groups))])
    found, axes = sizes(labels, list(groups))
    return tuple(Kernel(p.module, f, *axes[3 * i : 3 * i + 3]) for i, (p, f) in enumerate(timed)), found


def _branches_of(module: str, groups: Mapping[Atom, Group]) -> list[Atom]:
    """The branches that a module goes with."""
    return [atom for atom, group in groups.items() if group.gone and within(module, dict(group.gone))]


def allowed(filter_fn: FilterFn | None, module: nn.Module, name: str) -> bool:
    """True if filter_fn allows a module to be pruned; ConfigError where it returns no bool."""
    if filter_fn is None:
        return True
    answer = filter_fn(module, name)
    if answer not in (True, False):
        raise ConfigError(f"filter_fn answers {answer!r:.60} for module {name!r}: it must return True or False")
    return bool(answer)


def discover_again(model: nn.Module, example: Tensor | tuple, whole: Mapping[str, str], config: Config) -> Structure:
    """The groups that a finished run had; its reasons for layers that stay whole stand for its filter_fn."""
    kept = {reason.removeprefix(FILTERED) for reason in whole.values() if reason.startswith(FILTERED)}
    options = {"units": config.units, "even": config.even}
    return discover(model, example, filter_fn=lambda module, name: name not in kept, **options)


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
