"""Batches of any structure: tensors in tuples, lists and dicts that are cut, moved and copied together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map


def plain(batch: Any) -> Any:
    """The batch with every mapping as a dict: those of other libraries (BatchEncoding) are no trees to PyTorch."""
    if isinstance(batch, Mapping):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [plain(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as arguments of a network: a dict by name, a tuple or list in order, anything else alone."""
    inputs = plain(inputs)
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def apply(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor changed."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors(batch: Any) -> list[Tensor]:
    """All tensors of a batch, in the order of its structure."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def count(batch: Any) -> int:
    """Examples in a batch: the length of its first tensor that has one; 0 where none has."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 0)


def nbytes(batch: Any) -> int:
    """Bytes of all tensors of a batch."""
    return sum(tensor.nbytes for tensor in tensors(batch))


def part(batch: Any, of: slice) -> Any:
    """Some examples of a batch; tensors of another length than it has examples belong to all of them."""
    size = count(batch)
    return apply(batch, lambda tensor: tensor[of] if tensor.dim() and len(tensor) == size else tensor)


def split(batch: Any, parts: int) -> list[Any]:
    """So many parts of a batch, their sizes differing by one example at most."""
    if parts == 1:
        return [batch]
    size = count(batch)
    ends = [k * (size // parts) + min(k, size % parts) for k in range(parts + 1)]
    return [part(batch, slice(begin, end)) for begin, end in pairwise(ends)]


def chunks(batch: Any, size: int) -> list[Any]:
    """Parts of at most `size` examples."""
    return [part(batch, slice(k, k + size)) for k in range(0, max(1, count(batch)), size)]


def signature(batch: Any) -> Any:
    """Structure, shapes, dtypes and plain values of a batch: equal for batches that one CUDA graph can serve."""
    leaves, structure = tree_flatten(batch)
    return str(structure), tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)


def copy_(target: Any, source: Any) -> None:
    """Write a batch over one of the same structure and shapes."""
    for old, new in zip(tensors(target), tensors(source), strict=True):
        old.copy_(new)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on a device."""
    return apply(plain(batch), lambda tensor: tensor.to(device, non_blocking=True))
