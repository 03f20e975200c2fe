"""Residual branches: at x + f(x) the operand that depends on the other is a branch, whose removal leaves the shortcut.

They are read from the dataflow of one eager forward. A branch ends in an affine map (the last projection, the factors
of a layer scale or of a batch norm): there its gate multiplies, weights and biases. What computes for the branch alone
goes with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllp.errors import StructureError
from dllp.structure.axes import COPIES, countable, name_of, storage, watched

GONE = "!"  # beginning of a recipe's entries for modules that are gone; they say what stands in their place
IDENTITY, ZEROS, RETURNS = "!identity", "!zeros", "!returns "
PRODUCTS = frozenset(["addmm", "mm", "convolution", "bmm", "baddbmm"])
NORMS = frozenset(
    [
        "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
        "native_layer_norm", "_fused_rms_norm", "native_group_norm",
    ]
)  # fmt: skip
ZERO_AT_ZERO = COPIES | frozenset(
    [
        "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "permute", "transpose", "unsqueeze", "squeeze",
        "expand", "slice", "select", "roll", "constant_pad_nd", "native_dropout", "neg", "relu", "relu6", "leaky_relu",
        "gelu", "silu", "mish", "hardswish", "tanh", "hardtanh", "elu", "mean", "avg_pool2d", "_adaptive_avg_pool2d",
        "pixel_shuffle", "_to_copy", "mul", "div",
    ]
)  # fmt: skip
"""Operations that make 0 of 0."""


@dataclass(frozen=True)
class Branch:
    """A residual branch: parameters of its last affine maps, and {module: its recipe entry} of what goes with it."""

    name: str
    parameters: tuple[str, ...]
    gone: Mapping[str, str]


@dataclass
class Operation:
    """One operation on activations: values it reads and makes, by number, and the parameters in it."""

    name: str
    module: str
    reads: list[int]
    makes: list[int]
    parameters: list[str]
    shapes: list[torch.Size]
    writes: bool


@dataclass
class Called:
    """A module's call: its arguments, and the values of what it returned."""

    arguments: dict[str, Any]
    reads: set[int]
    output: Any
    values: list[int | None] = field(default_factory=list)
    count: int = 1


class Flow(TorchDispatchMode):
    """Records which operation reads what another has made; a tensor that is changed in place is a new value."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {storage(p): name for name, p in model.named_parameters() if p.dim()}
        self.buffers = {storage(b) for b in model.buffers()}
        self.operations: list[Operation] = []
        self.calls: dict[str, Called] = {}
        self.stack: list[str] = []
        self.held: list[Tensor] = []  # ids are of living tensors only
        self.number: dict[int, int] = {}
        self.alike: dict[int, list[Tensor]] = {}
        self.count = 0

    def value(self, tensor: Tensor) -> int:
        """The number of a tensor's present value."""
        return self.number[id(tensor)] if id(tensor) in self.number else self._new(tensor)

    def _new(self, tensor: Tensor) -> int:
        if id(tensor) not in self.number:
            self.held.append(tensor)
            self.alike.setdefault(storage(tensor), []).append(tensor)
        self.number[id(tensor)] = self.count
        self.count += 1
        return self.number[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        names = [self.parameters[storage(t)] for t in given if storage(t) in self.parameters]
        active = [t for t in given if storage(t) not in self.parameters and storage(t) not in self.buffers]
        reads, shapes = [self.value(t) for t in active], [t.shape for t in active]
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        name = name_of(func)
        if not active and names:  # a parameter in another shape or precision
            if name in COPIES:
                self.parameters |= {storage(t): names[0] for t in made}
            if all(storage(t) in self.parameters for t in made):
                return out
        changed: dict[int, Tensor] = {}
        for tensor, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(tensor, Tensor) and argument.alias_info and argument.alias_info.is_write:
                changed |= {id(t): t for t in self.alike.get(storage(tensor), [tensor])}
        new = {id(t): t for t in made} | changed
        reads += [self.value(t) for t in changed.values() if self.value(t) not in reads]
        makes = [self._new(t) for t in new.values()]
        self.operations.append(Operation(name, self.stack[-1], reads, makes, names, shapes, bool(changed)))
        return out

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(name)
        if name in self.calls:
            self.calls[name].count += 1
            return
        given = {str(i): value for i, value in enumerate(args)} | kwargs
        self.calls[name] = Called(given, {self.value(t) for t in given.values() if isinstance(t, Tensor)}, None)

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()
        several = output if isinstance(output, (tuple, list)) else [output]
        self.calls[name].output = output
        self.calls[name].values = [self.value(t) if isinstance(t, Tensor) else None for t in several]


def observed(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Flow, set[int]]:
    """The dataflow of one forward of a network, a scratch copy in evaluation mode, and the values of its outputs."""
    flow = Flow(model)
    with watched(model, flow.enter, flow.leave), torch.no_grad(), countable(), flow:
        output = model(*inputs)
    return flow, {flow.value(t) for t in tree_leaves(output) if isinstance(t, Tensor)}


def branches(model: nn.Module, inputs: tuple[Any, ...]) -> list[Branch]:
    """The residual branches of a network, a scratch copy in evaluation mode, in the order of execution."""
    found = list(_Reader(model, *observed(model, inputs)).branches())
    parents = [_common(branch.gone) for branch in found]
    return [
        replace(branch, name=parent) if parent and parents.count(parent) == 1 else branch
        for parent, branch in zip(parents, found, strict=True)
    ]


def within(name: str, modules: Container[str]) -> bool:
    """True if a module is one of `modules`, or inside one of them."""
    parts = name.split(".")
    return any(".".join(parts[:k]) in modules for k in range(1, len(parts) + 1))


def _common(names: Iterable[str]) -> str:
    """The innermost module that holds all of the named ones."""
    levels = list(zip(*(name.split(".") for name in names), strict=False))
    depth = next((d for d, parts in enumerate(levels) if len(set(parts)) > 1), len(levels))
    return ".".join(parts[0] for parts in levels[:depth])


class _Reader:
    """Finds branches in the dataflow of a forward."""

    def __init__(self, model: nn.Module, flow: Flow, outputs: set[int]) -> None:
        self.model, self.flow, self.operations = model, flow, flow.operations
        self.maker: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {value: [-1] for value in outputs}
        self.before: dict[int, int] = {}  # {value: bits of the values that it depends on}
        self.users: dict[str, list[int]] = {}
        for i, operation in enumerate(self.operations):
            known = 0
            for value in operation.reads:
                self.readers.setdefault(value, []).append(i)
                known |= self.before.get(value, 0) | 1 << value
            for value in operation.makes:
                self.maker[value], self.before[value] = i, known
            for name in operation.parameters:
                self.users.setdefault(name, []).append(i)
        self.idle = self._only_for(set(range(len(self.operations))), None)
        self.inside: dict[str, set[int]] = {}  # operations by module, and by all those around it
        for i, operation in enumerate(self.operations):
            path = operation.module
            while path and i not in self.idle:
                self.inside.setdefault(path, set()).add(i)
                path = path.rpartition(".")[0]
        owners: dict[int, set[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(name)
        self.owners = list(owners.values())

    def branches(self) -> Iterator[Branch]:
        for i, operation in enumerate(self.operations):
            if operation.name != "add" or len(operation.shapes) != 2 or operation.shapes[0] != operation.shapes[1]:
                continue
            a, b = operation.reads[:2]
            for shortcut, end in ((a, b), (b, a)):
                if self.before.get(end, 0) >> shortcut & 1 and self.readers[end] == [i]:
                    branch = self._branch(shortcut, end, set(range(i)))
                    if branch is not None:
                        yield branch

    def _only_for(self, among: set[int], end: int | None) -> set[int]:
        """The operations whose results nobody reads, but for those of this set and for the reader of `end`."""
        found: set[int] = set()
        for i in sorted(among, reverse=True):
            values = self.operations[i].makes
            if all(value == end or all(reader in found for reader in self.readers.get(value, ())) for value in values):
                found.add(i)
        return found

    def _branch(self, shortcut: int, end: int, before: set[int]) -> Branch | None:
        """The branch that makes the value `end`; None where it has no last affine map, or no module goes with it."""
        own = self._only_for(before, end)
        names = self._gated(end, own)
        gone = self._gone(own - self.idle)
        if not names or not gone:
            return None
        ends = self._ends(end, own, gone)
        if ends is None:
            return None
        # without its modules an operation in place would change the shortcut itself: begin with zeros there
        loose = any(self.operations[i].writes and not within(self.operations[i].module, gone) for i in own)
        starts = {name for name in gone if loose and shortcut in self.flow.calls[name].reads}
        zeros = {name for name, entry in gone.items() if entry == IDENTITY and name in ends | starts}
        return Branch(min(ends), tuple(names), gone | dict.fromkeys(zeros, ZEROS))

    def _gated(self, value: int, own: set[int]) -> list[str] | None:
        """Parameters of the affine maps that make a value: it is 0 where they are; None where there are none."""
        i = self.maker.get(value)
        if i is None or i not in own:
            return None
        operation = self.operations[i]
        if any(user not in own for name in operation.parameters for user in self.users[name]):
            return None
        if operation.parameters and operation.name in PRODUCTS | NORMS | {"mul"}:
            matrix = operation.name in NORMS or len(operation.reads) == 1
            return list(dict.fromkeys(operation.parameters)) if matrix else None
        if operation.name in ("add", "sub"):
            parts = [self._gated(read, own) for read in operation.reads]
            if any(part is None for part in parts):
                return None
            return list(dict.fromkeys(name for part in (operation.parameters, *parts) for name in part or ()))
        for read in self._factors(operation):
            found = self._gated(read, own)
            if found is not None:
                return found
        return None

    def _ends(self, value: int, own: set[int], gone: Mapping[str, str]) -> set[str] | None:
        """The removed modules that a value comes from: it is 0 where they return zeros; None where it is not."""
        i = self.maker.get(value)
        if i is None or i not in own:
            return None
        operation = self.operations[i]
        module = next((name for name in gone if within(operation.module, [name])), None)
        if module is not None:
            return {module}
        if operation.name in ("add", "sub") and not operation.parameters:
            parts = [self._ends(read, own, gone) for read in operation.reads]
            return None if any(part is None for part in parts) else {name for part in parts for name in part or ()}
        for read in self._factors(operation):
            found = self._ends(read, own, gone)
            if found is not None:
                return found
        return None

    @staticmethod
    def _factors(operation: Operation) -> list[int]:
        """The values any of which makes the result of an operation 0."""
        known = operation.name in ZERO_AT_ZERO
        return operation.reads[: None if operation.name == "mul" else 1] if known else []

    def _gone(self, own: set[int]) -> dict[str, str]:
        """{module: what it becomes}: the outermost modules that compute for a branch alone."""
        result: dict[str, str] = {}
        for name, work in self.inside.items():
            if work <= own and not within(name, result):
                entry = self._becomes(name)
                if entry is not None:
                    result = {n: e for n, e in result.items() if not within(n, [name])}
                    result[name] = entry
        return result

    def _becomes(self, name: str) -> str | None:
        """Stand-in for a module that is gone; None where it is needed, or its calls cannot be answered."""
        call = self.flow.calls.get(name)
        shared = any(
            any(within(n, [name]) for n in names) and not all(within(n, [name]) for n in names) for names in self.owners
        )
        if call is None or call.count > 1 or shared:
            return None
        tensors = [value for value in call.arguments.values() if isinstance(value, Tensor)]
        if list(call.arguments) == ["0"] and tensors and isinstance(call.output, Tensor):
            return IDENTITY
        several = isinstance(call.output, (tuple, list))
        found: list[int | str | None] = []
        for leaf, value in zip(call.output if several else [call.output], call.values, strict=True):
            passed = [key for key, given in call.arguments.items() if given is leaf]
            if leaf is None:
                found.append(None)
            elif value is None or not tensors:
                return None
            elif passed:
                found.append(passed[0])
            elif all(reader in self.idle | self.inside[name] for reader in self.readers.get(value, ())):
                found.append(None)  # nobody outside reads it
            elif leaf.shape != tensors[0].shape:
                return None
            else:
                found.append(0)
        return RETURNS + json.dumps(found if several else found[0])


class NoBranch:
    """The forward of an emptied module: zeros in the shape of the first tensor that it is given.

    `returns` is 0 for these zeros, None, the argument of a name or number, or a list for a tuple; `layer` the number of
    an attention's layer in a cache of keys and values.
    """

    def __init__(self, returns: Any, layer: int | None) -> None:
        self.returns, self.layer = returns, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {str(i): value for i, value in enumerate(args)} | kwargs
        x = next(value for value in given.values() if isinstance(value, Tensor))
        for cache in given.values() if self.layer is not None else ():
            if hasattr(cache, "get_seq_length") and hasattr(cache, "update"):
                # others ask a cache, by its first layer, how many tokens it has seen: one number counts each of them
                zeros = x.new_zeros(len(x), 1, x.shape[1], 1)
                cache.update(zeros, zeros, self.layer)
        if isinstance(self.returns, list):
            return tuple(self._one(what, x, given) for what in self.returns)
        return self._one(self.returns, x, given)

    @staticmethod
    def _one(what: Any, x: Tensor, given: Mapping[str, Any]) -> Any:
        return x.new_zeros(x.shape) if what == 0 else given.get(what)


def check_removal(name: str, entry: str, rest: list[int]) -> None:
    """StructureError for an entry, read from a file, that no removal has written."""
    known = entry in (IDENTITY, ZEROS)
    if entry.startswith(RETURNS):
        try:
            found = json.loads(entry.removeprefix(RETURNS))
        except (ValueError, RecursionError):
            found = {}
        known = all(
            what is None or isinstance(what, str) or (type(what) is int and what == 0)
            for what in (found if isinstance(found, list) else [found])
        )
    if not known or rest or not name:
        raise StructureError(f"the recipe of {name!r}, entry {entry!r:.60}, removes it in no known way")


def remove(model: nn.Module, name: str, entry: str) -> None:
    """Replace a plain layer in place as `entry` says; what is called with several arguments stays, without tensors."""
    path, _, leaf = name.rpartition(".")
    parent, old = model.get_submodule(path), model.get_submodule(name)
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # which keeps it from calling a kernel with the weights of its modules
    if entry.startswith(RETURNS):
        layer = getattr(old, "layer_idx", None)
        for held in (old._parameters, old._buffers, old._modules):
            for key in held:
                held[key] = None
        old.forward = NoBranch(json.loads(entry.removeprefix(RETURNS)), layer)
        return
    new = nn.Identity() if entry == IDENTITY else nn.Threshold(math.inf, 0.0)  # nothing is above infinity
    setattr(parent, leaf, new.train(old.training))
