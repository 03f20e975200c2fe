"""Sizes that a forward takes from attributes of its modules (`num_heads`, `split_size`), found while it runs.

A forward that says `x.view(batch, tokens, self.num_heads, self.head_dim)` fails after a cut unless the attribute is
rewritten. During the trace every integer attribute is a number that knows where it comes from; a function of PyTorch
that is given one tells which axis has that size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from dllp.structure.atoms import Label, divided, section
from dllp.structure.following import asked_sizes

SIZED = (nn.Linear, _ConvNd, _NormBase, nn.Embedding, nn.PReLU)
"""Modules whose attributes follow from the shapes of their tensors."""
SHAPING = frozenset({"view", "reshape", "expand", "zeros", "ones", "empty", "full", "new_zeros", "new_ones"})
DIVIDING = frozenset({"split", "split_with_sizes", "unsafe_split"})
OTHER = frozenset({"unflatten", "layer_norm", "rms_norm", "repeat", "narrow", "repeat_interleave"})


Source = tuple[str, str, int]  # a module, the path of its attribute, and the position in it


class Sized(int):
    """An integer that knows the attributes it was computed from: a sum of products of them."""

    terms: list[list[tuple[int, Source]]]

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Sized) and len(self.terms) == len(other.terms) == 1:
            return _sized(int(self) * int(other), [self.terms[0] + other.terms[0]])
        return int(self) * other

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Sized):
            return _sized(int(self) + int(other), self.terms + other.terms)
        return int(self) + other


def _sized(value: int, terms: list[list[tuple[int, Source]]]) -> Sized:
    result = Sized(value)
    result.terms = terms
    return result


def _is_int(value: Any) -> bool:
    return type(value) is int


class Attributes(TorchFunctionMode):
    """Finds the axes that integer attributes of a network stand for; they are replaced in the given copy."""

    labels: Callable[[Tensor], list[Label]]  # of a tensor; set by the trace, as the next
    stack: list[str]  # names of the modules that run

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sizes: dict[Source, list[Label]] = {}  # axes that had the size of an attribute
        self.views: dict[tuple[str, int], list[Label]] = {}  # by module, numbered in each of its forwards
        self.counts: dict[str, int] = {}
        self.modules = dict(model.named_modules())
        for name, module in model.named_modules():
            if isinstance(module, SIZED):
                continue
            _replace(vars(module), name, "")
            config = getattr(module, "config", None)
            if hasattr(config, "__dict__") and not isinstance(config, nn.Module):
                vars(module)["config"] = own = copy.copy(config)
                _replace(vars(own), name, "config.")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if asked_sizes(name, args) is not None and isinstance(out, Tensor):
            where = self.stack[-1]
            self.views.setdefault((where, self.counts[where]), self.labels(out))
            for module in set(self.stack):
                self.counts[module] += 1
        if name == "__getitem__":
            self._item(args[0], args[1])
        elif name == "scaled_dot_product_attention" and (kwargs or {}).get("enable_gqa"):
            self._repeats(args[0], args[1])
        elif name in SHAPING | DIVIDING | OTHER:
            given = [*args[name not in ("zeros", "ones", "empty", "full") :], *(kwargs or {}).values()]
            sizes = list(_flat(given))
            if any(isinstance(size, Sized) for size in sizes):
                self._sizes(name, sizes, list(args[1:]), out, (kwargs or {}).get("dim", 0))
        return out

    def _repeats(self, query: Tensor, key: Tensor) -> None:
        """Queries share keys: forwards that are given a mask repeat keys by an attribute, which this call did without.

        It is the one that has this size in all modules of the class (a number of layers has not).
        """
        times = query.shape[1] // key.shape[1]
        found = divided(self.labels(query)[1], [key.shape[1], times]) if 1 < times < query.shape[1] else None
        if found is None:
            return
        module = self.modules[self.stack[-1]]
        alike = [vars(other) for other in self.modules.values() if type(other) is type(module)]
        for path in vars(module):
            if all(type(values.get(path)) is Sized and values[path] == times for values in alike):
                self._found(vars(module)[path], found[1])

    def _sizes(self, name: str, sizes: list[Any], given: list[Any], out: Any, dim: int) -> None:
        if name in DIVIDING:
            axis = given[1] if len(given) > 1 else dim
            for size, part in zip(sizes if isinstance(given[0], (list, tuple)) else sizes[:1], out, strict=False):
                self._found(size, self.labels(part)[axis])
        elif isinstance(out, Tensor):
            if name in SHAPING and len(sizes) == out.dim():
                for size, label in zip(sizes, self.labels(out), strict=True):
                    self._found(size, label)
            else:
                for size in (size for size in sizes if isinstance(size, Sized)):
                    same = [label for label, n in zip(self.labels(out), out.shape, strict=True) if n == size]
                    if same:
                        self._found(size, same[0])

    def _item(self, x: Tensor, index: Any) -> None:
        """x[..., a:b] with attributes a and b: the sizes of x[..., :a] and x[..., :b]."""
        index = index if isinstance(index, tuple) else (index,)
        used = sum(which is not None and which is not Ellipsis for which in index)
        axis = 0
        for which in index:
            if which is Ellipsis:
                axis += x.dim() - used
            elif which is not None:
                for bound in (which.start, which.stop) if isinstance(which, slice) else ():
                    if isinstance(bound, Sized) and 0 < bound <= x.shape[axis]:
                        label = section(self.labels(x)[axis], 0, int(bound))
                        if label is not None:
                            self._found(bound, label)
                axis += 1

    def _found(self, size: Any, label: Label) -> None:
        """An axis has the size of an attribute, or of a sum (parts one after the other) of products of some."""
        start = 0
        for term in size.terms if isinstance(size, Sized) else ():
            length = math.prod(value for value, _ in term)
            part = label if length == size else section(label, start, start + length)
            factors = [part] if part is None or len(term) == 1 else divided(part, [value for value, _ in term])
            for (_, source), factor in zip(term, factors or [], strict=False):
                if factor is not None:
                    self.sizes.setdefault(source, []).append(factor)
            start += length


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _replace(values: dict[str, Any], module: str, prefix: str) -> None:
    """Let integers, and those in lists and tuples, know where they are read from."""
    for key, value in list(values.items()):
        path = prefix + key
        if _is_int(value):
            values[key] = _sized(value, [[(value, (module, path, 0))]])
        elif type(value) in (list, tuple) and value and all(map(_is_int, value)):
            values[key] = type(value)(_sized(v, [[(v, (module, path, i))]]) for i, v in enumerate(value))


def read(module: nn.Module, path: str) -> list[int] | None:
    """The integers of an attribute; None where it has none."""
    value: Any = module
    for key in path.split("."):
        value = getattr(value, key, None)
    if _is_int(value):
        return [value]
    return list(value) if type(value) in (list, tuple) and value and all(map(_is_int, value)) else None


def write(module: nn.Module, path: str, numbers: list[int]) -> None:
    """Set an attribute; an object that holds it (a configuration) may be shared, and is copied first."""
    owner: Any = module
    *holders, key = path.split(".")
    for holder in holders:
        setattr(owner, holder, copy.copy(getattr(owner, holder)))
        owner = getattr(owner, holder)
    old = getattr(owner, key)
    setattr(owner, key, numbers[0] if _is_int(old) else type(old)(numbers))
