"""Stratified splits."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from dllp.data.arrays import ArrayData, generator
from dllp.data.stream import StreamedData
from dllp.errors import DataError

Split = TypeVar("Split", bound=ArrayData | StreamedData)


def holdout(data: Split, size: float | int, seed: int = 0) -> tuple[Split, Split]:
    """(training, validation): `size` examples (int) or that fraction (float in (0, 1)), each class in proportion.

    The validation part is not augmented.
    """
    count = (round(size * len(data)) if 0 < size < 1 else 0) if isinstance(size, float) else size
    if not 0 < count < len(data):
        raise DataError(
            f"a validation split of {size} leaves nothing on one side of {len(data)} examples: "
            "give a fraction in (0, 1) or a smaller number"
        )
    held = torch.zeros(len(data), dtype=torch.bool)
    held[stratified(data.y.cpu(), count, seed)] = True
    everything = torch.arange(len(data))
    return data.subset(everything[~held]), replace(data.subset(everything[held]), augment="none")


def stratified(y: Tensor, count: int, seed: int) -> Tensor:
    """Indices of `count` random examples, each class in proportion (largest remainders); plain for float targets."""
    order = torch.randperm(len(y), generator=generator(seed, 3))
    if y.is_floating_point():
        return order[:count]
    sizes = torch.bincount(y)
    share = sizes * (count / len(y))
    take = share.floor().long()
    rest = torch.argsort(share - take, descending=True, stable=True)
    take[rest[: count - int(take.sum())]] += 1
    labels = y[order]
    return torch.cat([order[labels == c][: int(n)] for c, n in enumerate(take)])
