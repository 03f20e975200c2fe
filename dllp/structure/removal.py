"""What the modules of a removed residual branch become, so that its shortcut is all that remains."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dllp.errors import StructureError

GONE = "!"
"""Beginning of a recipe's entries for modules that are gone; they say what stands in their place."""
IDENTITY, ZEROS, RETURNS = "!identity", "!zeros", "!returns "


class NoBranch:
    """The forward of an emptied module: zeros in the shape of the first tensor that it is given.

    Args:
        returns: 0 for these zeros, None, or the argument of that name or number; a list of them for a tuple.
        layer: Number of an attention's layer in a cache of keys and values.
    """

    def __init__(self, returns: Any, layer: int | None) -> None:
        self.returns, self.layer = returns, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {str(i): value for i, value in enumerate(args)} | kwargs
        x = next(value for value in given.values() if isinstance(value, Tensor))
        for cache in given.values() if self.layer is not None else ():
            if hasattr(cache, "get_seq_length") and hasattr(cache, "update"):
                # others ask a cache how many tokens it has seen: keys and values without numbers are counted, too
                empty = x.new_zeros(len(x), 1, x.shape[1], 0)
                cache.update(empty, empty, self.layer)
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
    """Take a module out of a network, in place; `entry` says what it becomes.

    A plain layer is replaced by one of PyTorch's own. What is called with several arguments stays, without tensors.
    """
    path, _, leaf = name.rpartition(".")
    parent, old = model.get_submodule(path), model.get_submodule(name)
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # which keeps it from calling a kernel with the weights of its modules
    if entry.startswith(RETURNS):
        layer = getattr(old, "layer_idx", None)
        for held in (old._parameters, old._buffers, old._modules):
            for key in held:
                held[key] = None
        old.forward = NoBranch(json.loads(entry.removeprefix(RETURNS)), layer)  # type: ignore[assignment]
        return
    new = nn.Identity() if entry == IDENTITY else nn.Threshold(math.inf, 0.0)  # nothing is above infinity
    setattr(parent, leaf, new.train(old.training))
