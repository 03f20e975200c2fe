"""The structure of a network: its groups of units, verified, and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dllp.config import Units
from dllp.errors import ConfigError
from dllp.structure.atoms import Atom, Label
from dllp.structure.axes import OUTPUT, Trace
from dllp.structure.branches import branches, within
from dllp.structure.cost import Cost, polynomial
from dllp.structure.coupling import FILTERED, UNREAD, coarsest, components, named
from dllp.structure.slicing import Group, Slice, copied
from dllp.structure.trace import first_example, isolated, observe
from dllp.structure.verification import WEIGHTS_INSTEAD, unsound, verify
from dllp.structure.views import followed

__all__ = [
    "OUTPUT", "UNREAD", "WEIGHTS_INSTEAD", "FilterFn", "Group", "Layer", "Structure", "allowed", "chosen_again",
    "discover", "verify",
]  # fmt: skip
FilterFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Layer:
    """A module that multiplies by a weight of its own, and its multiply-accumulates for one example."""

    name: str
    macs: float


@dataclass(frozen=True, eq=False)
class Structure:
    """Groups in the order of execution, reasons for layers that stay whole, and costs as functions of the gates.

    Attributes:
        even: Groups of equally many channels are cut alike.
    """

    groups: tuple[Group, ...]
    whole: dict[str, str]
    layers: tuple[Layer, ...]
    flops: Cost
    params: Cost
    even: bool = False

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
            forbidden = _forbidden(model, filter_fn)
            finer: dict[Group, str] = {}
            if units != "blocks":
                found, whole = components(model, trace, forbidden)
                found, finer = coarsest(found) if even else (found, {})
                found = followed(scratch, found, trace.attributes.views, inputs)
            if units in ("blocks", "both"):
                sizes = {name: len(p) for name, p in model.named_parameters() if p.dim()}
                for branch in branches(copied(model).eval(), inputs):
                    kept = [name for name in forbidden if within(name, branch.gone)]
                    if kept:
                        whole[f"{branch.name}:branch"] = FILTERED + kept[0]
                        continue
                    zeros = {name: torch.zeros(sizes[name], dtype=torch.int64) for name in branch.parameters}
                    slices = tuple(Slice(name, 0, unit, "branch") for name, unit in zeros.items())
                    found[Atom(1)] = Group(branch.name, 1, slices, 1, "branch", tuple(branch.gone.items()))
            refused = finer | unsound(scratch, list(found.values()), inputs)
            taken: set[str] = set()
            found = {atom: group for atom, group in found.items() if group not in refused}
            found = dict(zip(found, named(found.values(), taken), strict=True))
            whole |= {group.name: why for group, why in zip(named(refused, taken), refused.values(), strict=True)}
        flops, params = _costs(model, trace, found)
    order = {name: i for i, name in reversed(list(enumerate(name for name, _ in trace.writes)))}
    whole = dict(sorted(whole.items(), key=lambda item: order.get(item[0].partition(":")[0], len(order))))
    layers = tuple(Layer(name, count) for name, count in trace.macs(model).items())
    return Structure(tuple(found.values()), whole, layers, flops, params, even)


def _costs(model: nn.Module, trace: Trace, groups: Mapping[Atom, Group]) -> tuple[Cost, Cost]:
    """Multiply-accumulates and parameters; those inside a branch have its gate as one more factor."""
    gone = {atom: dict(group.gone) for atom, group in groups.items() if group.gone}

    def gates(module: str) -> list[Label]:
        return [[(atom,)] for atom, modules in gone.items() if within(module, modules)]

    parameters = {name for name, _ in model.named_parameters()}
    products = ((p.times, [*p.labels, *gates(p.module)]) for p in trace.products)
    stored = ((1, [*labels, *gates(n.rpartition(".")[0])]) for n, labels in trace.tensors.items() if n in parameters)
    return polynomial(products, list(groups)), polynomial(stored, list(groups))


def allowed(filter_fn: FilterFn | None, module: nn.Module, name: str) -> bool:
    """True if filter_fn allows a module to be pruned; ConfigError where it returns no bool."""
    if filter_fn is None:
        return True
    answer = filter_fn(module, name)
    if answer not in (True, False):
        raise ConfigError(f"filter_fn answers {answer!r:.60} for module {name!r}: it must return True or False")
    return bool(answer)


def chosen_again(whole: Mapping[str, str]) -> FilterFn:
    """The filter_fn of a run, rebuilt from its reasons for layers that stay whole."""
    kept = {reason.removeprefix(FILTERED) for reason in whole.values() if reason.startswith(FILTERED)}
    return lambda module, name: name not in kept


def _forbidden(model: nn.Module, filter_fn: FilterFn | None) -> set[str]:
    """Names of the convolutions and linear modules that filter_fn keeps whole."""
    producers = ((n, m) for n, m in model.named_modules() if isinstance(m, (_ConvNd, nn.Linear)))
    return {name for name, module in producers if not allowed(filter_fn, module, name)}
