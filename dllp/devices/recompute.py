"""Blocks of a network that keep their inputs only, and are computed again when the backward pass needs them.

The second pass sees the same weights (a gate's among them), the same random numbers and copies of the buffers as they
were: running statistics move once, and every number is the one that the first pass had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from dllp.errors import StructureError


def stages(network: nn.Module) -> list[str]:
    """Names of the modules to compute again, "" for the network itself.

    None holds more than about the root of the number of layers, where the network is made of modules so small: what is
    kept between stages and what is computed again within one are then about equal.
    """
    limit = math.isqrt(max(1, _layers(network) - 1)) + 1
    found = [""] if is_chain(network) else _inside(network, "", limit)
    if not found:
        raise StructureError(
            "recompute finds no blocks in the network: put its layers into modules of their own or nn.Sequential, or "
            "leave recompute out"
        )
    return found


def _inside(module: nn.Module, prefix: str, limit: int) -> list[str]:
    """The stages among a module's children: each child that is small enough, or what is small enough inside it."""
    found = []
    for name, child in module.named_children():
        layers, path = _layers(child), f"{prefix}{name}"
        if layers < 2:
            continue
        smaller = [] if layers <= limit or is_chain(child) else _inside(child, f"{path}.", limit)
        covered = sum(_layers(module.get_submodule(inner.removeprefix(prefix))) for inner in smaller)
        listed = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # no module that is called
        found += smaller if listed or covered > layers / 2 else [path]
    return found


def _layers(module: nn.Module) -> int:
    """How many of its modules have parameters of their own."""
    return sum(bool(part._parameters) for part in module.modules())


def is_chain(module: nn.Module) -> bool:
    """Whether it calls single layers one after the other, as VGG does."""
    return type(module) is nn.Sequential and _layers(module) > 1 and all(_layers(part) < 2 for part in module)


class Recompute:
    """Computes networks with their stages kept small.

    Attributes:
        random: Whether a network was seen to draw random numbers: a captured graph could not draw them again.
    """

    def __init__(self) -> None:
        self.random = False

    @contextmanager
    def __call__(self, network: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """While this lasts, the named stages of the network keep their inputs only."""
        cuda = next(network.parameters()).is_cuda
        capturing = cuda and torch.cuda.is_current_stream_capturing()
        if capturing and self.random:
            raise RuntimeError("recompute cannot draw the random numbers of dropout again in a graph")
        before = torch.cuda.get_rng_state() if cuda and not capturing else None
        with ExitStack() as stack:
            for name in names:
                stage = network.get_submodule(name)
                call = _chain_call if is_chain(stage) else _call
                stack.enter_context(_forward(stage, call, not capturing))
            yield
        if before is not None:
            self.random |= not torch.equal(before, torch.cuda.get_rng_state())


@contextmanager
def _forward(stage: nn.Module, call: Callable[..., Any], random: bool) -> Iterator[None]:
    """Let `call` stand in for the stage's own forward."""
    own, plain = stage.__dict__.get("forward"), stage.forward
    stage.forward = lambda *args, **named: call(stage, plain, random, *args, **named)
    try:
        yield
    finally:
        del stage.forward
        if own is not None:
            stage.forward = own


def _call(stage: nn.Module, plain: Callable[..., Any], random: bool, *args: Any, **named: Any) -> Any:
    """The stage's outputs; its tensors as they are now are what the second pass will use."""
    if not torch.is_grad_enabled():
        return plain(*args, **named)
    weights = dict(stage.named_parameters(remove_duplicate=False))
    buffers = _copies(dict(stage.named_buffers(remove_duplicate=False)))
    passes = iter([plain])

    def compute(*args: Any, **named: Any) -> Any:
        first = next(passes, None)
        if first is not None:
            return first(*args, **named)
        # copies again: the backward pass may come here twice
        return functional_call(stage, {**weights, **_copies(buffers)}, args, named, tie_weights=False)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=random, **named)


def _chain_call(stage: nn.Sequential, plain: Callable[..., Any], random: bool, x: Any) -> Any:
    """A chain of single layers in pieces, each with about the root of their number."""
    layers = list(stage)
    size = math.isqrt(max(1, len(layers) - 1)) + 1
    for start in range(0, len(layers), size):
        piece = nn.Sequential(*layers[start : start + size])
        x = _call(piece, piece.forward, random, x)
    return x


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor; one that has two names stays one."""
    made = {id(tensor): tensor.clone() for tensor in tensors.values()}
    return {name: made[id(tensor)] for name, tensor in tensors.items()}
