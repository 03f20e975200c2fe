"""Activation checkpointing: blocks of a network keep their inputs only and are recomputed in the backward pass.

The recomputation uses the same weights (gated ones too), the same random numbers and copies of the earlier buffers:
running statistics are updated once, and every number equals that of the first pass.
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
    """Names of the modules to recompute, "" for the network itself.

    Where the network has modules so small, a stage holds at most about the square root of the number of layers: the
    memory kept between stages and that of recomputing one are then about equal.
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
    """The stages below a module: children of at most `limit` layers, or the modules of that size inside them."""
    found = []
    for name, child in module.named_children():
        layers, path = _layers(child), f"{prefix}{name}"
        if layers < 2:
            continue
        smaller = [] if layers <= limit or is_chain(child) else _inside(child, f"{path}.", limit)
        covered = sum(_layers(module.get_submodule(inner.removeprefix(prefix))) for inner in smaller)
        listed = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # which are never called themselves
        found += smaller if listed or covered > layers / 2 else [path]
    return found


def _layers(module: nn.Module) -> int:
    """Number of modules with parameters of their own."""
    return sum(bool(part._parameters) for part in module.modules())


def is_chain(module: nn.Module) -> bool:
    """True if a module is a plain sequence of single layers, as in VGG."""
    return type(module) is nn.Sequential and _layers(module) > 1 and all(_layers(part) < 2 for part in module)


class Recompute:
    """Activation checkpointing; `random` once a network has drawn random numbers, which no graph could draw again."""

    def __init__(self) -> None:
        self.random = False

    @contextmanager
    def __call__(self, network: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Checkpoint the named stages of the network within this context."""
        cuda = next(network.parameters()).is_cuda
        capturing = cuda and torch.cuda.is_current_stream_capturing()
        if capturing and self.random:
            raise RuntimeError("recompute cannot replay the random numbers of dropout in a CUDA graph")
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
    """Replace the stage's forward by `call`, within this context."""
    own, plain = stage.__dict__.get("forward"), stage.forward
    stage.forward = lambda *args, **named: call(stage, plain, random, *args, **named)
    try:
        yield
    finally:
        del stage.forward
        if own is not None:
            stage.forward = own


def _call(stage: nn.Module, plain: Callable[..., Any], random: bool, *args: Any, **named: Any) -> Any:
    """Call a stage under `torch.utils.checkpoint`; the recomputation uses its tensors as they are now."""
    if not torch.is_grad_enabled():
        return plain(*args, **named)
    weights = dict(stage.named_parameters(remove_duplicate=False))
    buffers = _copies(dict(stage.named_buffers(remove_duplicate=False)))
    passes = iter([plain])

    def compute(*args: Any, **named: Any) -> Any:
        first = next(passes, None)
        if first is not None:
            return first(*args, **named)
        # copied again, since there may be two backward passes
        return functional_call(stage, {**weights, **_copies(buffers)}, args, named, tie_weights=False)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=random, **named)


def _chain_call(stage: nn.Sequential, plain: Callable[..., Any], random: bool, x: Any) -> Any:
    """Checkpoint a chain of single layers in pieces of about the square root of their number."""
    layers = list(stage)
    size = math.isqrt(max(1, len(layers) - 1)) + 1
    for start in range(0, len(layers), size):
        piece = nn.Sequential(*layers[start : start + size])
        x = _call(piece, piece.forward, random, x)
    return x


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor; tied tensors stay tied."""
    made = {id(tensor): tensor.clone() for tensor in tensors.values()}
    return {name: made[id(tensor)] for name, tensor in tensors.items()}
