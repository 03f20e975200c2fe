"""The structure of a network: its groups of coupled channels, verified, and their cost.

The coupling of channels is read from Torch-Pruning's dependency graph, which takes unknown operations for element-wise
ones. Every group is therefore verified in float64 on a copy, the cut network against the gated one, or refused.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch_pruning as tp
import torch_pruning.ops as tp_ops
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch_pruning.dependency.index_mapping import update_index_mapping

from dllp.errors import ConfigError, StructureError, first_line
from dllp.structure.cost import Cost, flops_cost, params_cost, unit_counts
from dllp.structure.coupling import FILTERED, OUTPUT, ZERO_PAD, components
from dllp.structure.slicing import Group, copied, cut, difference, gated_outputs, recipe
from dllp.structure.trace import first_example, isolated, observe, trainable_copy

TOLERANCE = 1e-9
SENSITIVE = 1e-6
"""A group whose gates change the outputs by less than this, relative to the largest, is not verified by them."""
DRAWS = 8
"""Most random weights and inputs that are tried until all groups change the outputs, which a ReLU may hold at 0."""
WEIGHTS_INSTEAD = "use granularity='weight' or method magnitude-l2"
"""The way out where channels cannot be pruned."""
FilterFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Layer:
    """A convolution or linear module and its multiply-accumulates for one example."""

    name: str
    macs: float


@dataclass(frozen=True, eq=False)
class Structure:
    """Groups in the order of execution, reasons for layers that stay whole, and costs as functions of the gates."""

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
    def slices(self) -> tuple[slice, ...]:
        """Each group's slice of the vector of all units."""
        return tuple(slice(a, b) for a, b in pairwise(accumulate((group.units for group in self.groups), initial=0)))

    @property
    def channels_per_unit(self) -> Tensor:
        """(U,) int64: output channels of the root module for each unit."""
        counts = []
        for group in self.groups:
            roots = [p.unit for p in group.slices if p.side == "out" and p.module == group.name]
            counts.append(unit_counts(roots[0], 0, group.units).long().clamp(min=1))
        return torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64)

    def steps(self, multiple: int) -> list[int]:
        """Smallest number of units in each group that makes a multiple of so many channels."""
        per_unit = self.channels_per_unit
        return [multiple // math.gcd(multiple, int(per_unit[part.start])) for part in self.slices]


def discover(
    model: nn.Module, example: Tensor | tuple, *, filter_fn: FilterFn | None = None, channels: bool = True
) -> Structure:
    """Find the groups and costs of `model` for inputs like `example`; the model is left unchanged.

    Args:
        model: Any module whose forward takes `example`.
        example: A batch of inputs (or a tuple of them); its first example is used.
        filter_fn: Called with every convolution and linear module and its name; False keeps its channels whole.
        channels: False finds costs only, which any network has whatever its forward does.
    """
    inputs = first_example(model, example)
    groups: list[Group] = []
    whole: dict[str, str] = {}
    with isolated(model):
        scratch = trainable_copy(model)
        trace = observe(scratch, inputs)
        if channels:
            graph = _dependency_graph(scratch, inputs)
            groups, whole = components(scratch, graph, trace, _forbidden(model, filter_fn))
            groups, refused = _verified(scratch, groups, inputs, trace.zero_pad)
            whole |= refused
        flops = flops_cost(scratch, groups, trace.macs, trace.total)
        params = params_cost(scratch, groups)
    layers = tuple(Layer(name, macs) for name, macs in trace.macs.items())
    order = {name: i for i, name in enumerate(trace.macs)}
    whole = dict(sorted(whole.items(), key=lambda item: order.get(item[0], len(order))))
    return Structure(tuple(groups), whole, layers, flops, params)


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


def verify(model: nn.Module, groups: Sequence[Group], keep: Tensor, example: Tensor | tuple) -> float:
    """keep (U,) bool -> largest relative float64 difference of gated and cut network; StructureError beyond 1e-9."""
    inputs = first_example(model, example)
    with isolated(model):
        exact, worst = trainable_copy(model).double(), 0.0
        for draw in range(DRAWS):
            values = _random_inputs(exact, inputs, draw)
            gap = _compare(exact, groups, keep, values)
            if gap.value > TOLERANCE:
                raise StructureError(f"the channels cannot be pruned safely: {gap.message}; {WEIGHTS_INSTEAD}")
            worst = max(worst, gap.value)
            if any(_sensitive(exact, groups, keep, values)):
                break
    return worst


def _dependency_graph(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Torch-Pruning's graph of the network; StructureError where it cannot trace it."""
    opaque: dict[Any, Any] = {kind: tp_ops.DummyPruner() for kind in (nn.LocalResponseNorm, nn.GRU, nn.RNN)}
    graph = tp.DependencyGraph()
    try:
        # Without forward_fn Torch-Pruning first tries model(*batch), which unbatches the example.
        graph.build_dependency(model, inputs, forward_fn=lambda m, x: m(*x), customized_pruners=opaque, verbose=False)
    except ZeroDivisionError:
        _map_indices(graph)
    except Exception as error:
        raise StructureError(
            f"the network's graph cannot be traced: {type(error).__name__}: {first_line(error)}; use granularity="
            "'weight', which needs none"
        ) from error
    return graph


def _map_indices(graph: Any) -> None:
    """Repeat Torch-Pruning's last step node by node.

    It divides by 0 at a shuffle before a split, and leaves all later nodes without index mappings. Now that one node
    alone has none: channels do not line up there, which is found as for any unknown operation.
    """
    for module, node in graph.module2node.items():
        alone = copy.copy(graph)
        alone.module2node = {module: node}
        with suppress(ZeroDivisionError):
            update_index_mapping(alone)


def _forbidden(model: nn.Module, filter_fn: FilterFn | None) -> set[str]:
    """Names of the convolutions and linear modules that filter_fn keeps whole."""
    producers = ((n, m) for n, m in model.named_modules() if isinstance(m, (_ConvNd, nn.Linear)))
    return {name for name, module in producers if not allowed(filter_fn, module, name)}


def _randomised(model: nn.Module, draw: int) -> nn.Module:
    """A float64 copy with random parameters and buffers, none of them near 0 or equal, which could hide an error."""
    result = copied(model).double()
    generator = torch.Generator().manual_seed(3 * draw)
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


def _compare(exact: nn.Module, groups: Sequence[Group], keep: Tensor, inputs: tuple[Any, ...]) -> _Gap:
    """The difference of the gated and the cut network, with the message for a refusal."""
    try:
        value = difference(exact, groups, keep, inputs)
    except Exception as error:
        return _Gap(math.inf, False, f"the cut network fails ({first_line(error)}): its forward counts on all of them")
    if value is None:
        return _Gap(math.inf, True, "the cut network has outputs of another shape")
    failure = _training_failure(exact, groups, keep, inputs)
    if failure:
        return _Gap(math.inf, False, f"the cut network fails in training ({failure}): it counts on all of them")
    mixed = "as its forward moves or mixes them (shuffle, flip, padding, softmax, inputs put in front)"
    return _Gap(value, False, f"the cut network differs from the gated one by {value:.1e}, {mixed}")


def _training_failure(exact: nn.Module, groups: Sequence[Group], keep: Tensor, inputs: tuple[Any, ...]) -> str:
    """The error of the cut network in training mode, in which a forward may call other layers; empty without one."""
    pairs = tuple(torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() else x for x in inputs)
    failures = []
    for network in (cut(exact, recipe(exact, groups, keep)), copied(exact)):
        try:
            with torch.no_grad():  # with two examples, since batch norms refuse a single one
                network.train()(*pairs)
        except Exception as error:
            failures.append(first_line(error))
            continue
        break
    return failures[0] if len(failures) == 1 else ""  # where the uncut network fails too, the cut is not the reason


def _sensitive(exact: nn.Module, groups: Sequence[Group], keep: Tensor, inputs: tuple[Any, ...]) -> list[bool]:
    """For each group, True if the outputs change with its gates, by the gradient at `keep`; True without a gradient."""
    gates = keep.to(next(exact.parameters()).device, torch.float64).requires_grad_()
    found = gated_outputs(exact, groups, gates, inputs)
    outputs = [leaf.double().flatten() for leaf in found if leaf.is_floating_point() and leaf.requires_grad]
    if not outputs:
        return [True] * len(groups)
    output = torch.cat(outputs)
    generator = torch.Generator().manual_seed(0)
    mixed = output @ torch.rand(len(output), generator=generator, dtype=torch.float64).to(output.device)
    try:
        (slope,) = torch.autograd.grad(mixed, gates, materialize_grads=True)
    except RuntimeError:  # kernels without a gradient in evaluation, as cuDNN's recurrent ones
        return [True] * len(groups)
    least = SENSITIVE * float(output.detach().abs().max())
    return [bool((part.abs() > least).any()) for part in slope.split([group.units for group in groups])]


def _random_inputs(exact: nn.Module, inputs: tuple[Any, ...], draw: int) -> tuple[Any, ...]:
    """Random float64 numbers in place of real inputs, after a check that the network takes them."""
    generator = torch.Generator().manual_seed(3 * draw + 1)
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
        raise StructureError(
            f"the network cannot run in float64, which verification needs: {first_line(error)}"
        ) from error
    return result


def _refusal(refused: dict[str, str]) -> str:
    """One line for the first group that cannot be pruned, and the way out for all of them."""
    name, message = next(iter(refused.items()))
    others = f" (and of {len(refused) - 1} more)" if len(refused) > 1 else ""
    return (
        f"the channels of {name!r}{others} cannot be pruned safely: {message}; "
        f"keep them whole with filter_fn=lambda module, name: name not in {tuple(refused)}, or {WEIGHTS_INSTEAD}"
    )


def _verified(
    model: nn.Module, groups: list[Group], inputs: tuple[Any, ...], zero_pad: bool
) -> tuple[list[Group], dict[str, str]]:
    """The groups for which cut and gated network agree, and reasons for others that stay whole; refuses the rest."""
    if not groups:
        return [], {}
    generator = torch.Generator().manual_seed(2)

    def gap(chosen: list[Group]) -> _Gap:
        """The largest of two trials, and of up to `DRAWS` until every group has changed the outputs once."""
        gaps, untested = [], set(range(len(chosen)))
        for draw in range(DRAWS):
            exact = _randomised(model, draw)
            values = _random_inputs(exact, inputs, draw)
            halves = [torch.randperm(group.units, generator=generator) < (group.units + 1) // 2 for group in chosen]
            keep = torch.cat(halves)
            gaps.append(_compare(exact, chosen, keep, values))
            if gaps[-1].value > TOLERANCE:
                break
            untested -= {g for g, tested in enumerate(_sensitive(exact, chosen, keep, values)) if tested}
            if draw and not untested:
                break
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
            whole[group.name] = OUTPUT
        elif zero_pad:
            whole[group.name] = ZERO_PAD
        else:
            refused[group.name] = found.message
    if refused:
        raise StructureError(_refusal(refused))
    return good, whole
