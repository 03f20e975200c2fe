"""What one forward of a single example shows: calls, multiply-accumulates, and channels padded with zeros."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dllp.errors import StructureError
from dllp.slicing import side_sizes
from dllp.surroundings import undisturbed


def check_network(model: object) -> None:
    """Raise where what is given for a network is none."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise StructureError(f"the network is {kind}: give an instance of nn.Module")


def first_example(model: nn.Module, example: Tensor | tuple) -> tuple[Any, ...]:
    """The first example of each input, where the network is."""
    check_network(model)
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
def isolated(model: nn.Module) -> Iterator[None]:
    """Random states as before, gradients on (the graph is read from autograd), and silence."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    ordinals = sorted(d.index or 0 for d in devices)
    with torch.random.fork_rng(devices=ordinals), undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trainable_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode with every parameter trainable: Torch-Pruning overlooks frozen layers."""
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise StructureError("the network has lazy layers: run it once on an example first")
    try:
        result = copy.deepcopy(model).eval()
    except Exception as error:
        raise StructureError(f"the network cannot be copied: {first_line(error)}") from error
    for parameter in result.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
        parameter.grad = None
    return result


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _other_precision(model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """The way out where parameters and inputs are floats of different widths."""
    given = {x.dtype for x in inputs if isinstance(x, Tensor) and x.is_floating_point()}
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return "; convert it with network.float()" if torch.float32 in given and own - given else ""


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
class Trace:
    """What one forward of a single example shows; `macs` is in the order of execution."""

    macs: dict[str, float] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    total: float = 0.0
    zero_pad: bool = False


def observe(model: nn.Module, inputs: tuple[Any, ...]) -> Trace:
    """Run one forward, hooks in place for its duration; StructureError where the network cannot take the inputs."""
    trace = Trace()

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
        way = _other_precision(model, inputs)
        raise StructureError(f"the network cannot take inputs of shape {shapes}: {first_line(error)}{way}") from error
    finally:
        for handle in handles:
            handle.remove()
    if trace.macs and not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(output)):
        raise StructureError("the network's graph cannot be traced: its forward switches gradients off")
    trace.total = counter.get_total_flops() / 2
    trace.zero_pad = pads.found
    return trace
