"""Checks of a network and its inputs before it is traced, and errors of its forward explained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dllp.devices import trees
from dllp.devices.device import undisturbed
from dllp.errors import StructureError, first_line
from dllp.structure.axes import Trace, trace
from dllp.structure.slicing import copied

UNFIT = (RuntimeError, NotImplementedError, ValueError, IndexError)
"""Errors of a forward pass on inputs that do not fit; their subclasses (out of memory) have other causes."""
WRAPPERS = (torch.jit.ScriptModule, nn.DataParallel, nn.parallel.DistributedDataParallel)


@contextmanager
def explained(inputs: Any, cut: bool) -> Iterator[None]:
    """Explain the error of a network that fails on inputs of any structure although it took the first examples."""
    try:
        yield
    except UNFIT as error:
        x = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), torch.zeros(0))
        if type(error) not in UNFIT or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise
        why = "its forward depends on the examples: filter_fn can keep layers whole" if cut else "look at its examples"
        if x.dim() and len(x) == 1:
            why += "; where it cannot learn from a single one, use drop_last=True or another batch size"
        what = f"the {'cut ' * cut}network fails on a batch of shape {tuple(x.shape)}"
        raise StructureError(f"{what} ({first_line(error)}): {why}") from error


def first_example(model: nn.Module, example: Any) -> tuple[Any, ...]:
    """The first example of each input, a tensor or a structure of them, on the network's device."""
    check_network(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    if not trees.count(inputs):
        raise StructureError("the example must be a tensor (or a tuple of them) with at least one example in it")
    return trees.apply(trees.part(inputs, slice(0, 1)), lambda x: x.detach().to(device))


@contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Restore random states afterwards, enable gradients, silence warnings."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    ordinals = sorted(d.index or 0 for d in devices)
    with torch.random.fork_rng(devices=ordinals), undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_network(model: object) -> None:
    """Raise for an object that is no network, hides its layers, or has lazy ones."""
    if not isinstance(model, nn.Module):
        raise StructureError(f"the network is {model!r:.60}: give an instance of nn.Module")
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise StructureError("the network has lazy layers: run it once on an example first")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise StructureError(f"{name!r} is on the meta device, without numbers: load the network's weights first")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise StructureError(f"{name!r} has a hook on its gradient, which a run would not call: remove the hook")
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise StructureError(
                f"the network's state holds {key!r}, a {type(value).__name__}, and files hold tensors only: remove "
                "get_extra_state, or give the network before it was quantized"
            )
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS) or hasattr(module, "_orig_mod"):  # of torch.compile
            raise StructureError(
                f"{repr(name) if name else 'the network'} is a {type(module).__name__}: give the plain network that it "
                "was made from (such as its .module or ._orig_mod)"
            )


def trainable_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode with every parameter trainable, in the memory of the old ones."""
    result = copied(model, shared=True).eval()
    for parameter in result.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
        parameter.grad = None
    return result


def misfit(model: nn.Module, inputs: list[Tensor], error: Exception) -> str:
    """One line for a network that cannot take the inputs, with a way out where dtypes differ."""
    shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
    kinds, given = (
        " and ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()}))
        for tensors in (model.parameters(), inputs)
    )
    differ = given and kinds != given
    way_out = f"; its weights are {kinds} but inputs {given}: convert the network with .float()" if differ else ""
    return f"the network cannot take inputs of shape {shapes}: {first_line(error)}{way_out}"


def observe(model: nn.Module, inputs: tuple[Any, ...]) -> Trace:
    """Run a scratch copy of a network and label its axes; StructureError where it cannot take the inputs."""
    tensors = trees.tensors(inputs)
    versions = [x._version for x in tensors]
    try:
        output = trainable_copy(model)(*inputs)
    except Exception as error:
        raise StructureError(misfit(model, tensors, error)) from error
    if versions != [x._version for x in tensors]:  # every particle would see the changes of those before it
        raise StructureError("the network changes its inputs in place: let its forward begin with x = x.clone()")
    found = trace(copied(model, shared=True).eval(), inputs)
    if found.products and not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(output)):
        raise StructureError("the network's graph cannot be traced: its forward switches gradients off")
    return found
