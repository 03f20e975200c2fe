"""Views of a cut module that have other sizes than its forward asks for; :mod:`dllp.structure.views` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

VIEWS = frozenset({"view", "reshape"})


def asked_sizes(name: str, args: tuple[Any, ...]) -> list[int] | None:
    """The sizes that a view is asked for; None for anything else."""
    if name not in VIEWS or len(args) < 2:
        return None
    sizes = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    # an exporter has symbols for sizes that may change
    return sizes if all(isinstance(size, (int, torch.SymInt)) for size in sizes) else None


class Following(TorchFunctionMode):
    """Gives the views of a forward other sizes than it asks for."""

    def __init__(self, sizes: Mapping[int, list[int]]) -> None:
        super().__init__()
        self.sizes, self.count = sizes, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = asked_sizes(getattr(func, "__name__", ""), args)
        if asked is not None:
            sizes = self.sizes.get(self.count)
            self.count += 1
            if sizes is not None and len(sizes) == len(asked):
                return func(args[0], tuple(own or size for own, size in zip(sizes, asked, strict=True)))
        return func(*args, **(kwargs or {}))


class FollowingForward:
    """The forward of a cut module with the sizes that its views have now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.sizes: dict[int, list[int]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Following(self.sizes):
            return type(self.module).forward(self.module, *args, **kwargs)


def follow(module: nn.Module, entry: str, sizes: list[int]) -> None:
    """Let a view of a module have other sizes, in place; `entry` is `@call/rank`."""
    forward = vars(module).get("forward")
    if not isinstance(forward, FollowingForward):
        forward = FollowingForward(module)
        module.forward = forward  # type: ignore[assignment]
    forward.sizes[int(entry[1:].partition("/")[0])] = sizes
