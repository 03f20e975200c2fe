"""Groups of coupled channels, found by a walk through Torch-Pruning's dependency graph, channel by channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from dllp.structure.slicing import Group, Side, Slice, is_depthwise, side_sizes
from dllp.structure.trace import Trace

OUTPUT = "its channels are the network's outputs"
UNREAD = "no layer that could be cut reads its channels: they are the network's outputs"
MISALIGNED = "its channels do not line up with those of a module they reach (an unknown operation stands between)"
FILTERED = "filter_fn keeps "
ZERO_PAD = "a zero-pad shortcut shifts its channels"


def components(model: nn.Module, graph: Any, trace: Trace, forbidden: set[str]) -> tuple[list[Group], dict[str, str]]:
    """Groups that may be cut, and {first producer: reason} of groups that must stay whole."""
    modules = dict(model.named_modules())
    channels = _Channels(modules)
    # A single channel is never pruned, and often broadcast over others.
    producers = [
        name
        for name in trace.macs
        if modules[name] in graph.module2node
        and not is_depthwise(modules[name])
        and len(channels.span[name, "out"]) > 1
    ]
    unfit = _unfit(model, trace)
    reasons: dict[str, str] = {}
    for name in producers:
        reason = _couple(graph, model, channels, name, unfit)
        if reason:
            reasons[name] = reason
    half_coupled = _couple_grouped(modules, channels)

    labels = {key: channels.labels(key) for key in channels.span}
    made_by: dict[int, list[str]] = {}  # set of channels -> its producers
    for name in producers:
        for label in dict.fromkeys(labels[name, "out"]):
            made_by.setdefault(label, []).append(name)
    # Sets with the same producers form a group: one unit kept in each group then leaves no module empty.
    groups: dict[tuple[str, ...], list[int]] = {}
    for label, names in made_by.items():
        groups.setdefault(tuple(names), []).append(label)
    place = {label: (makers, unit) for makers, members in groups.items() for unit, label in enumerate(members)}
    pieces: dict[tuple[str, ...], list[Slice]] = {makers: [] for makers in groups}
    for (name, side), row in labels.items():
        found = [place.get(label, ((), -1)) for label in row]
        for makers in dict.fromkeys(m for m, _ in found if m):
            units = torch.tensor([unit if m == makers else -1 for m, unit in found])
            pieces[makers].append(Slice(name, side, units))

    free, whole = [], {}
    reasons = _propagate(reasons, list(groups))
    for makers, members in groups.items():
        entire = {p.module for p in pieces[makers] if p.side == "out" and bool((p.unit >= 0).all())}
        root = next((name for name in makers if name in entire), makers[0])
        group = Group(root, len(members), tuple(pieces[makers]))
        known = next((reasons[name] for name in makers if name in reasons), None)
        reason = known or _reason(group, forbidden, half_coupled, graph)
        if reason is None:
            free.append(group)
        else:
            whole[root] = ZERO_PAD if reason == MISALIGNED and trace.zero_pad else reason
    return free, whole


def _propagate(reasons: dict[str, str], coupled: list[tuple[str, ...]]) -> dict[str, str]:
    """{producer: reason} with the reasons passed on to all producers that are coupled to one that has a reason."""
    result = dict(reasons)
    changed = True
    while changed:
        changed = False
        for makers in coupled:
            known = next((result[name] for name in makers if name in result), None)
            new = [name for name in makers if known is not None and name not in result]
            result.update(dict.fromkeys(new, known or ""))
            changed |= bool(new)
    return result


def _unfit(model: nn.Module, trace: Trace) -> dict[str, str]:
    """{module: reason} for modules that no group may cut."""
    owners: dict[int, str] = {}
    result: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        for parameter in module.parameters(recurse=False):
            other = owners.setdefault(id(parameter), name)
            if other != name:
                result[name] = result[other] = f"{other} and {name} share a parameter"
        if name in result:
            continue
        if not side_sizes(module) and not isinstance(module, nn.PReLU):
            result[name] = f"{name} ({kind}) does not work on each channel by itself"
        elif trace.calls[name] > 1:
            result[name] = f"{name} is called more than once in a forward"
        elif is_parametrized(module) or (hasattr(module, "weight") and "weight" not in module._parameters):
            result[name] = f"the weight of {name} is computed from other parameters"
        elif isinstance(module, _ConvNd) and 1 < module.groups == module.out_channels != module.in_channels:
            result[name] = f"{name} has one output channel for each of its groups but more inputs"
    return result


def _couple(graph: Any, model: nn.Module, channels: _Channels, root: str, unfit: dict[str, str]) -> str | None:
    """Join all channels that are coupled to the outputs of `root`; the reason if they must stay whole."""
    module = model.get_submodule(root)
    span = channels.span[root, "out"]
    fresh = [i for i, k in enumerate(span) if not channels.reached[k]]
    names = {m: n for n, m in model.named_modules()}
    reached, complete = _reach(graph, module, fresh) if fresh else ({}, True)
    reason = None if complete else MISALIGNED
    for (node, handler), found in reached.items():
        target = node.module
        if isinstance(target, nn.Parameter):
            name = next((n for n, p in model.named_parameters() if p is target), "?")
            reason = reason or f"the parameter {name} of no known layer stands in its way"
        elif node.type.name == "OUTPUT":
            reason = reason or OUTPUT
        elif target in names:
            name = names[target]
            reason = reason or unfit.get(name)
            sizes = side_sizes(target)
            out = "in" not in sizes or handler == graph.get_pruner_of_module(target).prune_out_channels
            row = channels.span.get((name, "out" if out else "in"), range(0))
            for channel in found if sizes else ():
                if channel.idx < len(row):
                    channels.join(row[channel.idx], span[channel.root_idx])
                else:
                    reason = reason or MISALIGNED
    return reason


def _couple_grouped(modules: dict[str, nn.Module], channels: _Channels) -> set[str]:
    """Join channels j, j + C/G, ... on both sides of grouped convolutions, whose groups stay equally wide.

    Returns the names of convolutions where some of these channels come from no convolution or linear layer.
    """
    half_coupled = set()
    for (name, _), row in channels.span.items():
        parts = getattr(modules[name], "groups", 1)
        if parts == 1 or is_depthwise(modules[name]):
            continue
        step = len(row) // parts
        for j in range(step):
            together = row[j::step]
            if any(channels.reached[k] for k in together):
                if not all(channels.reached[k] for k in together):
                    half_coupled.add(name)
                for k in together:
                    channels.join(k, together[0])
    return half_coupled


def _reason(group: Group, forbidden: set[str], half_coupled: set[str], graph: Any) -> str | None:
    """The reason if a group must stay whole although all its modules could be cut."""
    for piece in group.slices:
        if piece.module in half_coupled:
            return f"{piece.module} has groups that also read channels of no convolution or linear layer"
        if piece.side == "out" and piece.module in forbidden:
            return FILTERED + piece.module
    if all(piece.side == "out" for piece in group.slices):
        return MISALIGNED if _leads_on(graph, group) else UNREAD
    return "its channels can only be kept all together" if group.units == 1 else None


def _leads_on(graph: Any, group: Group) -> bool:
    """True if layers that read channels follow a group although none of them reads the group's own."""
    nodes = [graph.module2node[graph.model.get_submodule(piece.module)] for piece in group.slices]
    for node in nodes:  # grows while it is walked through
        nodes += [after for after in node.outputs if after not in nodes]
    return any("in" in side_sizes(node.module) for node in nodes[len(group.slices) :])


class _Channel(NamedTuple):
    """A channel of a node and the root's channel it is coupled to; Torch-Pruning's index mappings use these names."""

    idx: int
    root_idx: int


def _reach(graph: Any, root: nn.Module, channels: Sequence[int]) -> tuple[dict[tuple[Any, Any], set[_Channel]], bool]:
    """{(node, pruning function): channels} coupled to the output channels of `root`; False if the search was stopped.

    Torch-Pruning's index mappings fail or loop on operations they were not made for (recurrent cells).
    """
    sizes = [size for module in graph.model.modules() for size in side_sizes(module).values()]
    most = 16 * max(sizes)  # more than this hints at a loop
    start = (graph.module2node[root], graph.get_pruner_of_module(root).prune_out_channels)
    seen = {start: {_Channel(i, i) for i in channels}}
    stack = [(*start, list(seen[start]))]
    while stack:
        node, function, found = stack.pop()
        for dependency in node.dependencies:
            if not dependency.is_triggered_by(function):
                continue
            target, handler = dependency.target, dependency.handler
            if (
                handler == graph.get_pruner_of_module(target.module).prune_out_channels
                and side_sizes(target.module).get("out") == 1
            ):
                continue  # a single channel is broadcast over all others: it stays
            try:
                mapped = found
                for mapping in dependency.index_mapping:
                    mapped = mapped if mapping is None else mapping(mapped)
            except Exception:
                return seen, False
            known = seen.setdefault((target, handler), set())
            new = [c for c in mapped if c not in known]
            if any(c.root_idx is None or not 0 <= c.idx < most for c in new) or len(known) + len(new) > most:
                return seen, False
            if new:
                known.update(new)
                stack.append((target, handler, new))
    return seen, True


class _Channels:
    """The channels of all sides of all modules, numbered; a union-find of those that are coupled."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.span: dict[tuple[str, Side], range] = {}
        total = 0
        for name, module in modules.items():
            for side, size in side_sizes(module).items():
                self.span[name, side] = range(total, total + size)
                total += size
        self.parent = list(range(total))
        self.reached = [False] * total

    def find(self, i: int) -> int:
        """The smallest channel of the set of channel i."""
        while self.parent[i] != i:
            self.parent[i] = i = self.parent[self.parent[i]]
        return i

    def join(self, a: int, b: int) -> None:
        self.reached[a] = self.reached[b] = True
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)

    def labels(self, key: tuple[str, Side]) -> list[int]:
        """The set of each channel of a side, -1 for channels that no producer reaches."""
        return [self.find(i) if self.reached[i] else -1 for i in self.span[key]]
