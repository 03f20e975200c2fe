"""The structure of a network: which channels belong together, what they cost, and which of them to keep.

The coupling of channels is read from Torch-Pruning's dependency graph; it takes operations it does not know for
element-wise ones, so every group is checked in float64 before it is offered: the cut network must equal the gated one.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_pruning as tp
import torch_pruning.ops as tp_ops
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dllp.errors import StructureError
from dllp.slicing import Group, Side, Slice, difference, is_depthwise, side_sizes

TOLERANCE = 1e-9
Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True, eq=False)
class Cost:
    """A cost that is quadratic in the gates: sum over layers of `pair` * inputs * outputs, plus a linear part.

    Column k of `signals` (U, K) counts channels for each unit; layer l has `in_const[l]` input channels without a gate
    and those of column `in_signal[l]`, likewise for its outputs. `square` (U,) is the weight of a gate times itself.
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
        with torch.autocast(theta.device.type, enabled=False):  # which would round the products to half precision
            theta = theta.to(self.linear.dtype)
            counts = theta @ self.signals
            inputs = self.in_const + counts.index_select(-1, self.in_signal)
            outputs = self.out_const + counts.index_select(-1, self.out_signal)
            # A gate on both sides of a layer has E[z z] = theta, not theta^2.
            single = theta @ self.linear + (theta * (1 - theta)) @ self.square
            return self.const + single + (inputs * outputs) @ self.pair

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Cost:
        """The same cost on `device`; float64 unless `dtype` says otherwise."""
        moved = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Layer:
    """A convolution or linear module: multiply-accumulates for one example, and number of weights."""

    name: str
    macs: float
    weights: int


@dataclass(frozen=True, eq=False)
class Structure:
    """Groups of channels in the order of execution, why others stay whole, and the costs as functions of the gates."""

    groups: tuple[Group, ...]
    whole: dict[str, str]
    layers: tuple[Layer, ...]
    flops: Cost
    params: Cost

    @property
    def units(self) -> int:
        """Total number of units U."""
        return sum(group.units for group in self.groups)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each group begins in the flat vector of units; one more entry closes the last group."""
        return tuple(np.cumsum([0, *(group.units for group in self.groups)]).tolist())

    @property
    def slices(self) -> tuple[slice, ...]:
        """Each group's place in the flat vector of units."""
        return tuple(slice(a, b) for a, b in zip(self.offsets, self.offsets[1:], strict=False))

    @property
    def channels_per_unit(self) -> Tensor:
        """(U,) int64: output channels of the root module for each unit."""
        counts = []
        for group in self.groups:
            roots = [p.unit for p in group.slices if p.side == "out" and p.module == group.name]
            counts.append(_counts(roots[0], 0, group.units).long().clamp(min=1))
        return torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64)


def _weights(module: nn.Module) -> int:
    weight = module.weight  # a parameter, or what a parametrization computes
    return weight.numel() if isinstance(weight, Tensor) else 0


def _counts(unit: Tensor, offset: int, total: int) -> Tensor:
    """unit (C,) -> float64 (total,): channels of each unit."""
    return torch.bincount(unit[unit >= 0] + offset, minlength=total).double()


# --- discovery --------------------------------------------------------------------------------------------------------


def discover(model: nn.Module, example: Tensor | tuple, *, filter_fn: Filter | None = None) -> Structure:
    """Groups and costs of `model` for inputs like `example`; the model is left exactly as it is.

    Args:
        model: Any module whose forward takes `example`.
        example: A batch of inputs (or a tuple of them); its first example is used.
        filter_fn: Called with every convolution and linear module and its name; False keeps its channels whole.
    """
    inputs = _first_example(model, example)
    with _isolated(model):
        scratch = _copy(model)
        trace = _observe(scratch, inputs)
        groups, whole = _components(scratch, _dependency_graph(scratch, inputs), trace, _forbidden(model, filter_fn))
        groups, refused = _verified(_randomised(scratch), groups, inputs, trace.zero_pad)
    whole |= refused
    order = {name: i for i, name in enumerate(trace.macs)}
    whole = dict(sorted(whole.items(), key=lambda item: order.get(item[0], len(order))))
    modules = dict(model.named_modules())
    layers = tuple(Layer(name, macs, _weights(modules[name])) for name, macs in trace.macs.items())
    return Structure(tuple(groups), whole, layers, _flops(modules, groups, trace), _params(model, modules, groups))


def verify(model: nn.Module, groups: Sequence[Group], keep: Tensor, example: Tensor | tuple) -> float:
    """keep (U,) bool -> largest relative float64 difference of gated and cut network; StructureError beyond 1e-9."""
    inputs = _first_example(model, example)
    with _isolated(model):
        exact = _copy(model).double()
        inputs = _random_inputs(exact, inputs)
        gap = _gap(exact, groups, keep, inputs)
        if gap.value <= TOLERANCE:
            return gap.value
        for group, part in zip(groups, keep.split([g.units for g in groups]), strict=True):
            single = _gap(exact, [group], part, inputs)
            if single.value > TOLERANCE:
                raise StructureError(_refusal({group.name: single.message}))
    raise StructureError(f"groups that pass one by one fail together: {gap.message}")


def _first_example(model: nn.Module, example: Tensor | tuple) -> tuple[Any, ...]:
    """The first example of each input, where the network is."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    batch = next((x.shape[0] for x in inputs if isinstance(x, Tensor) and x.dim()), None)
    if not batch:
        raise StructureError("the example must be a tensor (or a tuple of them) with at least one example in it")
    return tuple(
        (x[:1] if x.dim() and x.shape[0] == batch else x).detach().to(device) if isinstance(x, Tensor) else x
        for x in inputs
    )


@contextmanager
def _isolated(model: nn.Module) -> Iterator[None]:
    """Random states as before, gradients on (the graph is read from autograd), and silence."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    ordinals = sorted(d.index or 0 for d in devices)
    with torch.random.fork_rng(devices=ordinals), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode with every parameter trainable: Torch-Pruning overlooks frozen layers."""
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise StructureError("the network has lazy layers: run it once on an example first")
    try:
        result = copy.deepcopy(model).eval()
    except Exception as error:
        raise StructureError(f"the network cannot be copied: {_line(error)}") from error
    for parameter in result.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
        parameter.grad = None
    return result


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _ZeroPad(TorchFunctionMode):
    """Watches a forward for tensors widened with zeros along their channels and then added to others."""

    def __init__(self) -> None:
        super().__init__()
        self.padded: list[Tensor] = []
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in ("pad", "cat", "concat", "concatenate") and args and isinstance(result, Tensor) and result.dim() > 1:
            parts = [args[0]] if name == "pad" else list(args[0])
            blank = name == "pad" or any(not t.requires_grad and not bool(t.any()) for t in parts)
            if blank and result.shape[1] > parts[0].shape[1]:
                self.padded.append(result)
        elif name in ("add", "iadd", "radd"):
            self.found |= any(a is p for a in args for p in self.padded)
        return result


@dataclass
class _Trace:
    """What one forward of a single example shows; `macs` is in the order of execution."""

    macs: dict[str, float] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    total: float = 0.0
    zero_pad: bool = False


def _observe(model: nn.Module, inputs: tuple[Any, ...]) -> _Trace:
    trace = _Trace()

    def hook(name: str, module: nn.Module) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, output: Any) -> None:
            trace.calls[name] += 1
            if isinstance(module, (_ConvNd, nn.Linear)):
                # A weight is used once for each output position (each input position where transposed).
                if isinstance(module, _ConvTransposeNd):
                    positions = args[0].numel() / module.in_channels
                else:
                    positions = output.numel() / side_sizes(module)["out"]
                trace.macs[name] = trace.macs.get(name, 0.0) + positions * module.weight.numel()

        return record

    watched = [(n, m) for n, m in model.named_modules() if side_sizes(m) or not list(m.children())]
    handles = [module.register_forward_hook(hook(name, module)) for name, module in watched]
    try:
        with FlopCounterMode(display=False) as counter, _ZeroPad() as pads:
            output = model(*inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs if isinstance(x, Tensor))
        raise StructureError(f"the network cannot take inputs of shape {shapes}: {_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    if trace.macs and not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(output)):
        raise StructureError("the network's graph cannot be traced: its forward switches gradients off")
    trace.total = counter.get_total_flops() / 2
    trace.zero_pad = pads.found
    return trace


def _dependency_graph(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    class Opaque(tp_ops.DummyPruner):
        """Makes a module that Torch-Pruning does not know visible in its graph."""

    opaque: dict[Any, Any] = {kind: Opaque() for kind in (nn.LocalResponseNorm, nn.GRU, nn.RNN)}
    try:
        # Without forward_fn Torch-Pruning first tries model(*batch), which unbatches the example.
        return tp.DependencyGraph().build_dependency(
            model, inputs, forward_fn=lambda m, x: m(*x), customized_pruners=opaque, verbose=False
        )
    except Exception as error:
        raise StructureError(f"the network's graph cannot be traced: {type(error).__name__}: {_line(error)}") from error


def _forbidden(model: nn.Module, filter_fn: Filter | None) -> set[str]:
    """Names of the producers that the user wants to keep whole."""
    producers = ((n, m) for n, m in model.named_modules() if isinstance(m, (_ConvNd, nn.Linear)))
    return set() if filter_fn is None else {name for name, module in producers if not filter_fn(module, name)}


class _Channel(NamedTuple):
    """A channel on one side of a node and the channel of the root that it hangs on, as index mappings want it."""

    idx: int
    root_idx: int


def _reach(graph: Any, root: nn.Module, channels: Sequence[int]) -> tuple[dict[tuple[Any, Any], set[_Channel]], bool]:
    """Everything coupled to the output channels of `root`, {(node, pruning function): channels}, and if that is all.

    Torch-Pruning's index mappings trip or run in circles over operations they were not made for (recurrent cells);
    the search then ends early.
    """
    sizes = [size for module in graph.model.modules() for size in side_sizes(module).values()]
    most = 16 * max(sizes)  # a channel that hangs on more roots than this hints at a circle
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


class _Union:
    """Sets of integers that are joined and never parted."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find(self, i: int) -> int:
        """The set's smallest member."""
        while self.parent[i] != i:
            self.parent[i] = i = self.parent[self.parent[i]]
        return i

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)


class _Channels:
    """All channels of all sides in one row, joined where they live and die together."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.span: dict[tuple[str, Side], range] = {}
        total = 0
        for name, module in modules.items():
            for side, size in side_sizes(module).items():
                self.span[name, side] = range(total, total + size)
                total += size
        self.union = _Union(total)
        self.reached = [False] * total

    def join(self, a: int, b: int) -> None:
        self.reached[a] = self.reached[b] = True
        self.union.join(a, b)

    def labels(self, key: tuple[str, Side]) -> list[int]:
        """The set of each channel of a side, -1 for channels that no producer reaches."""
        return [self.union.find(i) if self.reached[i] else -1 for i in self.span[key]]


def _components(model: nn.Module, graph: Any, trace: _Trace, forbidden: set[str]) -> tuple[list[Group], dict[str, str]]:
    """Groups that may be cut, and the reason for each root whose group may not."""
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
    lame = _couple_grouped(modules, channels)

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
    reasons = _spread(reasons, list(groups))
    for makers, members in groups.items():
        entire = {p.module for p in pieces[makers] if p.side == "out" and bool((p.unit >= 0).all())}
        root = next((name for name in makers if name in entire), makers[0])
        group = Group(root, len(members), tuple(pieces[makers]))
        reason = next((reasons[name] for name in makers if name in reasons), None) or _reason(group, forbidden, lame)
        if reason is None:
            free.append(group)
        else:
            whole[root] = _ZERO_PAD if reason == _MISALIGNED and trace.zero_pad else reason
    return free, whole


def _spread(reasons: dict[str, str], coupled: list[tuple[str, ...]]) -> dict[str, str]:
    """Reasons of producers, handed on to all producers that are coupled to them."""
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


_OUTPUT = "its channels are the network's outputs"
_MISALIGNED = "its channels do not line up with those of a module they reach (an unknown operation stands between)"
_ZERO_PAD = "a zero-pad shortcut shifts its channels"


def _unfit(model: nn.Module, trace: _Trace) -> dict[str, str]:
    """Modules that no group may touch, and why."""
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
    """Join all channels that hang on those of `root`; the reason why they must stay whole, if there is one."""
    module = model.get_submodule(root)
    span = channels.span[root, "out"]
    fresh = [i for i, k in enumerate(span) if not channels.reached[k]]
    names = {m: n for n, m in model.named_modules()}
    reached, complete = _reach(graph, module, fresh) if fresh else ({}, True)
    reason = None if complete else _MISALIGNED
    for (node, handler), found in reached.items():
        target = node.module
        if isinstance(target, nn.Parameter):
            name = next((n for n, p in model.named_parameters() if p is target), "?")
            reason = reason or f"the parameter {name} of no known layer stands in its way"
        elif node.type == tp_ops.OPTYPE.OUTPUT:
            reason = reason or _OUTPUT
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
                    reason = reason or _MISALIGNED
    return reason


def _couple_grouped(modules: dict[str, nn.Module], channels: _Channels) -> set[str]:
    """Join j, j + C/G, ... on both sides of grouped convolutions; names of those fed by more than producers."""
    lame = set()
    for (name, _), row in channels.span.items():
        parts = getattr(modules[name], "groups", 1)
        if parts == 1 or is_depthwise(modules[name]):
            continue
        step = len(row) // parts
        for j in range(step):
            together = row[j::step]
            if any(channels.reached[k] for k in together):
                if not all(channels.reached[k] for k in together):
                    lame.add(name)
                for k in together:
                    channels.join(k, together[0])
    return lame


def _reason(group: Group, forbidden: set[str], lame: set[str]) -> str | None:
    """Why a group must stay whole although all its modules could be cut."""
    for piece in group.slices:
        if piece.module in lame:
            return f"{piece.module} has groups that also read channels of no convolution or linear layer"
        if piece.side == "out" and piece.module in forbidden:
            return f"filter_fn keeps {piece.module}"
    if all(piece.side == "out" for piece in group.slices):
        return "no layer that could be cut reads its channels: they are the network's outputs"
    return "its channels can only be kept all together" if group.units == 1 else None


def _randomised(model: nn.Module) -> nn.Module:
    """A float64 copy in which no weight, scale or statistic is so special that it hides an error."""
    result = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in result.parameters():
            if tensor.is_floating_point():
                value = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
                sign = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
                fan_in = tensor[0].numel() if tensor.dim() > 1 else 1
                tensor.copy_(value * sign * math.sqrt(2 / max(fan_in, 2)))
        for tensor in result.buffers():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    return result


class _Gap(NamedTuple):
    """Relative difference of gated and cut network; `output` where it changes the outputs' shape."""

    value: float
    output: bool
    message: str


def _gap(exact: nn.Module, groups: Sequence[Group], keep: Tensor, inputs: tuple[Any, ...]) -> _Gap:
    try:
        value = difference(exact, groups, keep, inputs)
    except Exception as error:
        return _Gap(math.inf, False, f"the cut network fails ({_line(error)}): its forward counts on all of them")
    if value is None:
        return _Gap(math.inf, True, "the cut network has outputs of another shape")
    mixed = "as its forward moves or mixes them (shuffle, flip, padding, softmax)"
    return _Gap(value, False, f"the cut network differs from the gated one by {value:.1e}, {mixed}")


def _random_inputs(exact: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Random numbers in place of real ones, in float64, after a check that the network takes them."""
    generator = torch.Generator().manual_seed(1)
    result = tuple(
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in inputs
    )
    try:
        with torch.no_grad():
            exact(*result)
    except Exception as error:
        raise StructureError(f"the network cannot run in float64, which verification needs: {_line(error)}") from error
    return result


def _refusal(refused: dict[str, str]) -> str:
    """One line for the first group that cannot be pruned safely, and a way out for all of them."""
    name, message = next(iter(refused.items()))
    others = f" (and of {len(refused) - 1} more)" if len(refused) > 1 else ""
    return (
        f"the channels of {name!r}{others} cannot be pruned safely: {message}; "
        f"keep them whole with filter_fn=lambda module, name: name not in {tuple(refused)}"
    )


def _verified(
    exact: nn.Module, groups: list[Group], inputs: tuple[Any, ...], zero_pad: bool
) -> tuple[list[Group], dict[str, str]]:
    """The groups for which cut and gated network agree, and why others stay whole; refuses groups of neither kind."""
    if not groups:
        return [], {}
    generator = torch.Generator().manual_seed(2)
    inputs = _random_inputs(exact, inputs)

    def gap(chosen: list[Group]) -> _Gap:
        gaps = []
        for _ in range(2):
            keep = [torch.randperm(group.units, generator=generator) < (group.units + 1) // 2 for group in chosen]
            gaps.append(_gap(exact, chosen, torch.cat(keep), inputs))
        return max(gaps)

    if gap(groups).value <= TOLERANCE:
        return groups, {}
    good: list[Group] = []
    whole: dict[str, str] = {}
    refused: dict[str, str] = {}
    for group in groups:
        found = gap([*good, group])
        if found.value <= TOLERANCE:
            good.append(group)
        elif found.output:
            whole[group.name] = _OUTPUT
        elif zero_pad:
            whole[group.name] = _ZERO_PAD
        else:
            refused[group.name] = found.message
    if refused:
        raise StructureError(_refusal(refused))
    return good, whole


# --- costs ------------------------------------------------------------------------------------------------------------


class _Terms:
    """Collects the parts of a cost, one layer after the other."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.total = sum(group.units for group in groups)
        self.counts: dict[tuple[str, Side], Tensor] = {}
        offset = 0
        for group in groups:
            for piece in group.slices:
                key = (piece.module, piece.side)
                self.counts[key] = self.counts.get(key, 0) + _counts(piece.unit, offset, self.total)
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
        """Add `weight` for each of the `size` output channels of a module; returns what was added for open gates."""
        counts = self.counts.get((name, "out"))
        if counts is None:
            return 0.0
        self.linear += weight * counts
        self.fixed += weight * (size - float(counts.sum()))
        return weight * size

    def pairs(self, name: str, sizes: dict[Side, int], weight: float) -> float:
        """Add `weight` for each pair of input and output channel of a module; returns what that adds."""
        zero = torch.zeros_like(self.linear)
        into, out = (self.counts.get((name, side), zero) for side in ("in", "out"))
        if not bool(into.any()) and not bool(out.any()):
            return 0.0
        self.square += weight * into * out
        in_const, out_const = sizes["in"] - float(into.sum()), sizes["out"] - float(out.sum())
        self.rows.append((weight, in_const, self.signal(into), out_const, self.signal(out)))
        return weight * sizes["in"] * sizes["out"]

    def cost(self, const: float) -> Cost:
        """The finished cost with `const` for all that no gate touches."""
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


def _flops(modules: dict[str, nn.Module], groups: Sequence[Group], trace: _Trace) -> Cost:
    """Multiply-accumulates for one example; what is counted outside convolutions and linear layers is constant."""
    terms = _Terms(groups)
    counted = 0.0
    for name, macs in trace.macs.items():
        sizes = side_sizes(modules[name])
        if "in" in sizes:
            counted += terms.pairs(name, sizes, macs / (sizes["in"] * sizes["out"]))
        else:
            counted += terms.each(name, sizes["out"], macs / sizes["out"])
    return terms.cost(trace.total - counted)


def _params(model: nn.Module, modules: dict[str, nn.Module], groups: Sequence[Group]) -> Cost:
    """Number of parameters."""
    terms = _Terms(groups)
    counted = 0.0
    for name in dict.fromkeys(name for name, _ in terms.counts):
        sizes = side_sizes(modules[name])
        vectors = sum(p.numel() for p in modules[name].parameters(recurse=False))
        if "in" in sizes:
            weights = _weights(modules[name])
            counted += terms.pairs(name, sizes, weights / (sizes["in"] * sizes["out"]))
            vectors -= weights
        counted += terms.each(name, sizes["out"], vectors / sizes["out"])
    return terms.cost(sum(p.numel() for p in model.parameters()) - counted)


# --- choice of units --------------------------------------------------------------------------------------------------


def select(structure: Structure, logits: Tensor, *, cost: Cost, keep: float | None, round_to: int = 1) -> Tensor:
    """logits (U,) -> bool (U,): the units to keep; cost at most `keep` * dense, or logits > 0 without `keep`.

    Units are taken in descending order of their logits, in chunks of `round_to` channels within each group; the best
    chunk of each group always stays. After the first chunk that does not fit, smaller ones fill what is left.
    """
    scores = logits.detach().to("cpu", torch.float64)
    if scores.shape != (structure.units,) or bool(scores.isnan().any()):
        raise StructureError(f"logits must be {structure.units} numbers, one for each unit")
    chunks: list[Tensor] = []
    owners: list[int] = []
    means: list[float] = []
    kept = torch.zeros(structure.units, dtype=torch.bool)
    per_unit = structure.channels_per_unit
    for g, part in enumerate(structure.slices):
        order = scores[part].argsort(descending=True, stable=True) + part.start
        step = round_to // math.gcd(round_to, int(per_unit[part.start]))
        best, *others = order.split(step)
        kept[best] = True
        chunks += others
        owners += [g] * len(others)
        means += [scores[chunk].mean().item() for chunk in others]
    ranking = sorted(range(len(chunks)), key=lambda i: -means[i])
    if keep is None:
        for i in ranking:
            kept[chunks[i]] |= means[i] > 0
        return kept
    cost = cost.to("cpu", torch.float64)
    budget = keep * cost.dense * (1 + 1e-12)
    smallest = cost.expected(kept.double()).item()
    if smallest > budget:
        raise StructureError(
            f"a fraction of {keep:g} cannot be reached: one chunk of {round_to} channels in each group already costs "
            f"{smallest / cost.dense:.4f} of the dense network"
        )
    return _fill(kept, [(owners[i], chunks[i]) for i in ranking], cost, budget)


def _fill(kept: Tensor, ranking: list[tuple[int, Tensor]], cost: Cost, budget: float) -> Tensor:
    """Take chunks in order while they fit; a group whose next chunk does not fit is closed."""
    signals = cost.signals.numpy()
    linear, pair = (cost.linear).numpy(), cost.pair.numpy()
    in_signal, out_signal = cost.in_signal.numpy(), cost.out_signal.numpy()
    counts = kept.double().numpy() @ signals
    inputs = cost.in_const.numpy() + counts[in_signal]
    outputs = cost.out_const.numpy() + counts[out_signal]
    now = cost.expected(kept.double()).item()
    kept = kept.clone()
    closed: set[int] = set()
    for owner, chunk in ranking:
        if owner in closed:
            continue
        index = chunk.numpy()
        step = signals[index].sum(0)
        more_in, more_out = step[in_signal], step[out_signal]
        delta = pair @ (more_in * (outputs + more_out) + inputs * more_out) + linear[index].sum()
        if now + delta > budget:
            closed.add(owner)
            continue
        now += delta
        inputs += more_in
        outputs += more_out
        kept[chunk] = True
    return kept
