"""The axes of a network, read from one eager forward of a single example.

Every operation is seen with its concrete shapes (`TorchDispatchMode`): no graph is captured, whatever a forward does
just runs. Labels of axes are unified by :mod:`dllp.structure.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllp.structure.atoms import Label, freeze, fresh, segments, unify
from dllp.structure.attributes import Attributes
from dllp.structure.rules import MIXED, PRODUCT, Call, Form, Unknown, apply

INPUT = "its channels are the network's inputs"
OUTPUT = "its channels are the network's outputs"
ALIGNED = 8  # numbers of half precision in 16 bytes
COPIES = frozenset({"_to_copy", "clone", "contiguous", "alias", "detach"})
"""Operations whose output holds the numbers of their input."""


@dataclass
class Product:
    """A matrix product or convolution: `times` the product of the sizes of `labels` multiply-accumulates."""

    module: str  # that computed it
    weight: str | None  # name of the parameter in it, if there is one
    labels: list[Label]  # with a form: batch, outputs and inputs of a convolution, or rows, inputs and outputs
    times: int
    form: Form | None = None  # what it computes, where a layer alone can be timed


@dataclass
class Average:
    """A mean over an axis, counted from the last one, in a module that has no others inside."""

    module: str
    axis: int
    label: Label


@dataclass
class Trace:
    """Record of one forward of a single example, in the order of execution."""

    tensors: dict[str, list[Label]]  # of every parameter and buffer, by its name; shared ones have one label
    attributes: Attributes  # sizes that forwards took from attributes of modules
    products: list[Product] = field(default_factory=list)
    reads: set[tuple[str, int]] = field(default_factory=set)  # axes that a product adds up: gates multiply there
    writes: list[tuple[str, Label]] = field(default_factory=list)  # modules that make an axis, and its label
    averages: list[Average] = field(default_factory=list)  # in modules whose statistics can be gated
    aligned: list[Label] = field(default_factory=list)  # axes of which kernels take multiples of `ALIGNED` only

    def macs(self, model: nn.Module) -> dict[str, float]:
        """Multiply-accumulates of the modules that multiply by a weight of their own, in the order of execution."""
        result: dict[str, float] = {}
        modules = dict(model.named_modules())
        owners = {id(p): n for n, p in model.named_parameters()}
        for product in self.products:
            module = modules[product.module]
            own = {owners[id(p)] for p in module.parameters(recurse=False)}
            if product.weight in own or isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
                result[product.module] = result.get(product.module, 0.0) + _macs(product)
        return result


def _macs(product: Product) -> int:
    result = product.times
    for label in product.labels:
        result *= sum(torch.Size([atom.size for atom in segment]).numel() for segment in label)
    return result


class Axes(TorchDispatchMode):
    """Labels the axes of all tensors of a forward that runs inside it."""

    def __init__(self, model: nn.Module, attributes: Attributes) -> None:
        super().__init__()
        self.labels: dict[int, list[Label]] = {}
        self.held: list[Tensor] = []  # ids are of living tensors only
        self.stack: list[str] = []
        self.leaf = {name: not list(module.children()) for name, module in model.named_modules()}
        self.attentions = {name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
        self.sources: dict[int, str] = {}  # storages of parameters, and of their copies
        tensors: dict[str, list[Label]] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensors[name] = self.label(tensor)
        for name, parameter in model.named_parameters():
            self.sources[storage(parameter)] = name
        self.trace = Trace(tensors, attributes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = name_of(func)
        call = Call(name, args, kwargs or {}, func._schema, out)
        if name in COPIES and storage(call.tensors[0]) in self.sources:
            self.sources[storage(out)] = self.sources[storage(call.tensors[0])]
        try:
            apply(self, call)
        except (Unknown, AttributeError, LookupError, TypeError, ValueError):  # no rule, or a use it does not know
            for tensor in call.tensors:
                for label in self.label(tensor):
                    freeze(label, MIXED.format(name))
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and not any(tensor is known for known in call.tensors):
                    self.set(tensor, [fresh(size, MIXED.format(name)) for size in tensor.shape])
        return out

    @property
    def where(self) -> str:
        """Name of the module that runs."""
        return self.stack[-1]

    def label(self, tensor: Tensor) -> list[Label]:
        """The labels of a tensor's axes."""
        if id(tensor) not in self.labels:
            self.set(tensor, [fresh(size) for size in tensor.shape])
        return self.labels[id(tensor)]

    def set(self, tensor: Tensor, labels: list[Label]) -> None:
        self.held.append(tensor)
        self.labels[id(tensor)] = labels

    def contract(self, tensors: tuple[Tensor, Tensor], labels: tuple[Label, Label]) -> None:
        """Two axes are multiplied and added up."""
        if labels[0] == [()]:
            return
        unify(*labels)
        read = False
        for tensor, label in zip(tensors, labels, strict=True):
            name = self.sources.get(storage(tensor))
            axis = None if name is None else self._axis(name, label)
            if name is not None and axis is not None:
                self.trace.reads.add((name, axis))
                read = True
        if not read:
            freeze(labels[0], PRODUCT)

    def _axis(self, name: str, label: Label) -> int | None:
        """The axis of a parameter that has a label; None where that is not sure."""
        own = self.trace.tensors[name]
        found = [axis for axis, other in enumerate(own) if other is label]
        found = found or [axis for axis, other in enumerate(own) if segments(other) == segments(label)]
        return found[0] if len(found) == 1 else None

    def multiply(
        self, weight: Tensor | None, written: Label | None, labels: list[Label], times: int = 1,
        form: Form | None = None,
    ) -> None:  # fmt: skip
        """A product was computed; `written` is the axis that its weight makes."""
        name = None if weight is None else self.sources.get(storage(weight))
        self.trace.products.append(Product(self.where, name, labels, times, form))
        if written is not None and (name is not None or written != [()]):
            self.trace.writes.append((self.where, written))

    def average(self, label: Label, axis: int) -> None:
        """The current module takes a mean over an axis."""
        if self.leaf[self.where]:
            self.trace.averages.append(Average(self.where, axis, label))
        elif self.where not in self.attentions:  # seldom does anyone read its mean over heads: the verification tells
            freeze(label, MIXED.format("a mean over them"))

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(name)
        self.trace.attributes.counts[name] = 0
        if isinstance(module, _NormBase) and not module.affine and not module.track_running_stats and args:
            # it has no tensor that tells, and warns of a number of features that is not its own
            self.trace.attributes.sizes[name, "num_features", 0] = [self.label(args[0])[1]]

    def leave(self, *_: Any) -> None:
        self.stack.pop()


def storage(tensor: Tensor) -> int:
    """The memory that a tensor shares with its views."""
    return tensor.untyped_storage()._cdata


@contextmanager
def watched(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call enter(name, module, args, kwargs) before a module runs, leave(name, module, args, output) after."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(leave, name), always_call=True).remove)
        yield


def name_of(operation: Any) -> str:
    """Name of an operation of ATen, of one in place without its underscore."""
    packet = operation._overloadpacket.__name__
    return packet if packet.startswith("__") else packet.rstrip("_") or packet


@contextmanager
def countable() -> Iterator[None]:
    """Compute recurrent layers and attention by matrix products: no one sees into fused kernels."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.backends.mkldnn.flags(enabled=False),
            torch.backends.cudnn.flags(enabled=False),
            sdpa_kernel(SDPBackend.MATH),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def trace(model: nn.Module, inputs: tuple[Any, ...]) -> Trace:
    """Run one forward of a network, a scratch copy in evaluation mode, and label its axes."""
    attributes = Attributes(model)
    axes = Axes(model, attributes)
    attributes.labels, attributes.stack = axes.label, axes.stack
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, Tensor):
            axes.set(tensor, [fresh(size, INPUT) for size in tensor.shape])
    with watched(model, axes.enter, axes.leave), torch.no_grad(), countable(), attributes, axes:
        output = model(*inputs)
    for product in axes.trace.products:  # the heads of PyTorch's own attention, which no view of its own shows
        if product.weight is None and isinstance(model.get_submodule(product.module), nn.MultiheadAttention):
            attributes.sizes[product.module, "num_heads", 0] = [product.labels[0]]
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor):
            for label in axes.label(tensor):
                freeze(label, OUTPUT)
    return axes.trace
