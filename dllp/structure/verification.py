"""The proof that a cut network equals the gated one, in float64 on random weights and inputs.

Groups that do not stand it are found and kept whole, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dllp.devices.trees import apply, tensors
from dllp.errors import StructureError, first_line
from dllp.structure.axes import OUTPUT
from dllp.structure.slicing import Group, copied, cut, gap, gated_outputs, recipe
from dllp.structure.trace import first_example, isolated, trainable_copy

TOLERANCE = 1e-9
SENSITIVE = 1e-6  # a group whose gates change the outputs by less, relative to the largest, is not verified
DRAWS = 8  # most random weights tried until all groups change the outputs, which a ReLU may hold at 0
TRIALS = 48  # most comparisons for finding the groups that fail; what is left then stays whole
WEIGHTS_INSTEAD = "use granularity='weight' or method magnitude-l2"  # the way out where channels cannot be pruned
NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Doubled(TorchDispatchMode):
    """Turns casts to narrower floating-point numbers inside a network into casts to float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value in NARROW else value

        args = [wide(a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {k: wide(v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The products of experts, which PyTorch has not in float64; `offs` (E,) are the ends of their parts.

    Rows (T, K) by matrices (E, K, N), matrices (E, M, K) by columns (K, T), or, in a backward pass, (M, T) by (T, N).
    """
    ends = [0, *offs.tolist()]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in pairwise(ends)])
    if b.dim() == 3:
        parts = [a[start:end] @ b[e] for e, (start, end) in enumerate(pairwise(ends))]
        return torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.shape[2])])
    parts = [a[e] @ b[:, start:end] for e, (start, end) in enumerate(pairwise(ends))]
    return torch.cat([*parts, a.new_zeros(a.shape[1], b.shape[1] - ends[-1])], dim=1)


@contextmanager
def exactly() -> Iterator[None]:
    """Compute in float64, whatever numbers a forward asks for."""
    default, fast = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    torch.set_default_dtype(torch.float64)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with Doubled():
            yield
    finally:
        torch.set_default_dtype(default)
        torch.backends.mha.set_fastpath_enabled(fast)


class Gap(NamedTuple):
    """Relative difference of gated and cut network; `output` where it changes the outputs' shape."""

    value: float
    output: bool
    message: str


def verify(model: nn.Module, groups: Sequence[Group], keep: Tensor, example: Tensor | tuple) -> float:
    """keep (U,) bool -> largest relative float64 difference of gated and cut network; StructureError beyond 1e-9."""
    inputs = first_example(model, example)
    with isolated(model):
        exact, worst = trainable_copy(model).double(), 0.0
        for draw in range(DRAWS):
            values = _random_inputs(copied(exact, shared=True), inputs, draw)
            found, tested = compare(exact, groups, keep, values, sensitive=True)
            if found.value > TOLERANCE:
                raise StructureError(f"the channels cannot be pruned safely: {found.message}; {WEIGHTS_INSTEAD}")
            worst = max(worst, found.value)
            if any(tested):
                break
    return worst


def unsound(model: nn.Module, groups: list[Group], inputs: tuple[Any, ...]) -> dict[Group, str]:
    """{group: reason} of the groups for which cut and gated network do not agree."""
    reasons: dict[Group, str] = {}
    try:
        if groups:
            _sound(_Trials(model, inputs), groups, reasons)
    except StructureError as error:
        return dict.fromkeys(groups, str(error))
    return reasons


def _sound(trials: _Trials, groups: list[Group], whole: dict[Group, str]) -> list[Group]:
    """The groups that agree together; alike ones are tried together, since they mostly fail together."""
    found = trials(groups)
    if found.value <= TOLERANCE:
        return groups
    if len(groups) == 1:
        whole[groups[0]] = OUTPUT if found.output else found.message
        return []
    if trials.left <= 0:
        whole.update(dict.fromkeys(groups, found.message))
        return []
    good: list[Group] = []
    for part in _parts(groups):
        # beside those that are known to agree; alone where they fail, so that a reason is their own
        both = [*good, *part]
        if good and trials(both).value <= TOLERANCE:
            good = both
            continue
        alone = _sound(trials, part, whole)
        if good and alone and trials([*good, *alone]).value > TOLERANCE:
            whole.update(dict.fromkeys(alone, found.message))
        else:
            good += alone
    return good


def _parts(groups: list[Group]) -> list[list[Group]]:
    """Groups of one make, or two halves where all are."""
    alike: dict[Any, list[Group]] = {}
    for group in groups:
        make = (group.kind, group.width, frozenset((p.name.rpartition(".")[2], p.axis, p.role) for p in group.slices))
        alike.setdefault(make, []).append(group)
    middle = len(groups) // 2
    return list(alike.values()) if len(alike) > 1 else [groups[:middle], groups[middle:]]


class _Trials:
    """Comparisons on random float64 copies of one network."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.model, self.inputs, self.left = model, inputs, TRIALS
        self.drawn: dict[int, tuple[nn.Module, tuple[Any, ...]]] = {}
        self.generator = torch.Generator().manual_seed(2)
        self._draw(0)

    def _draw(self, draw: int) -> tuple[nn.Module, tuple[Any, ...]]:
        if draw not in self.drawn:
            exact = _randomised(self.model, draw)
            values = _random_inputs(copied(exact, shared=True), self.inputs, draw)  # a forward may leave things behind
            if draw > 1:
                return exact, values
            self.drawn[draw] = exact, values
        return self.drawn[draw]

    def __call__(self, groups: list[Group]) -> Gap:
        """The largest of two trials, and of up to `DRAWS` until every group has changed the outputs once."""
        self.left -= 1
        gaps, untested = [], set(range(len(groups)))
        for draw in range(DRAWS):
            exact, values = self._draw(draw)
            keep = torch.cat([self._some(group, (g + draw) % 2 == 0) for g, group in enumerate(groups)])
            found, tested = compare(exact, groups, keep, values, sensitive=bool(untested), training=draw == 0)
            gaps.append(found)
            if found.value > TOLERANCE:
                break
            untested -= {g for g, one in enumerate(tested) if one}
            if draw and not untested:
                break
        return max(gaps)

    def _some(self, group: Group, closed: bool) -> Tensor:
        """(units,) bool: a random share of a group, another in each; a branch is open or `closed`, in turns."""
        units = group.units
        if group.gone:
            return torch.tensor([not closed])
        count = int(torch.randint(max(units // 4, 1), units, (), generator=self.generator))
        return torch.randperm(units, generator=self.generator) < count


def compare(
    exact: nn.Module, groups: Sequence[Group], keep: Tensor, inputs: tuple[Any, ...], *, sensitive: bool,
    training: bool = True,
) -> tuple[Gap, list[bool]]:  # fmt: skip
    """The difference of the gated and the cut network, and the groups that change the outputs."""
    network, small = copied(exact, shared=True), cut(exact, recipe(exact, groups, keep), shared=True)
    with exactly():
        try:
            with torch.no_grad():
                actual = tensors(small(*inputs))
        except Exception as error:
            message = f"the cut network fails ({first_line(error)}): its forward counts on all of them"
            return Gap(math.inf, False, message), []
        gates = keep.to(next(exact.parameters()).device, torch.float64).requires_grad_(sensitive)
        try:
            with torch.set_grad_enabled(sensitive):
                expected = gated_outputs(network, groups, gates, inputs)
        except Exception as error:
            return Gap(math.inf, False, f"the gated network fails ({first_line(error)})"), []
        value = gap([a.detach() for a in actual], [e.detach() for e in expected])
        if value is None:
            return Gap(math.inf, True, "the cut network has outputs of another shape"), []
        if value > TOLERANCE:
            mixed = "as its forward moves or mixes them (shuffle, flip, padding, softmax, inputs put in front)"
            return Gap(value, False, f"the cut network differs from the gated one by {value:.1e}, {mixed}"), []
        failure = _training_failure(exact, groups, keep, inputs) if training else ""
        if failure:
            message = f"the cut network fails in training ({failure}): it counts on all of them"
            return Gap(math.inf, False, message), []
        return Gap(value, False, ""), _sensitive(expected, gates, groups) if sensitive else []


def _training_failure(exact: nn.Module, groups: Sequence[Group], keep: Tensor, inputs: tuple[Any, ...]) -> str:
    """The error of the cut network in training mode, in which a forward may call other layers; empty without one."""
    pairs = tree_map(lambda x: torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() else x, inputs)

    def failure(network: nn.Module) -> str:
        try:
            with torch.no_grad():  # with two examples, since batch norms refuse a single one
                network.train()(*pairs)
        except Exception as error:
            return first_line(error)
        return ""

    found = failure(cut(exact, recipe(exact, groups, keep), shared=True))
    # where the uncut network fails too, the cut is not the reason
    return found if found and not failure(copied(exact, shared=True)) else ""


def _sensitive(found: Sequence[Tensor], gates: Tensor, groups: Sequence[Group]) -> list[bool]:
    """For each group, True if the outputs change with its gates, by the gradient at them; True without a gradient."""
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


def _randomised(model: nn.Module, draw: int) -> nn.Module:
    """A float64 copy with random parameters and buffers, none of them near 0 or equal, which could hide an error."""
    result = copied(model, shared=True)
    generator = torch.Generator().manual_seed(3 * draw)
    with torch.no_grad():
        for tensor in result.parameters():
            if tensor.is_floating_point():
                value = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-1, 1, generator=generator)
                value.add_(value.sign(), alpha=0.5)
                fan_in = tensor[0].numel() if tensor.dim() > 1 else 1
                tensor.data = value.mul_(math.sqrt(2 / max(fan_in, 2))).to(tensor.device, torch.float64)
        for tensor in result.buffers():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    return result.double()


def _random_inputs(exact: nn.Module, inputs: tuple[Any, ...], draw: int) -> tuple[Any, ...]:
    """Random float64 numbers in place of real inputs, after a check that the network takes them."""
    generator = torch.Generator().manual_seed(3 * draw + 1)

    def drawn(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)

    result = apply(inputs, drawn)
    try:
        with torch.no_grad(), exactly():
            exact(*result)
    except Exception as error:
        why = f"the network cannot run in float64, which verification needs: {first_line(error)}"
        raise StructureError(why) from error
    return result
