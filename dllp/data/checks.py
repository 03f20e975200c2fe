"""Checks of inputs and labels before training; each mistake is one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllp.data.arrays import ArrayData, Augment, is_integer
from dllp.errors import DataError

CHUNK = 2**22


def from_pair(
    x: Any,
    y: Any,
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    augment: Augment = "none",
    integers: bool = False,
    learned: bool = True,
) -> ArrayData:
    """Data from two tensors or arrays.

    Inputs are (N, C, H, W) or (N, F) and stay uint8 or become float32; with `integers` other integers become int64.
    Labels are converted by :func:`as_targets`. Training data (`learned`) is validated; a test set may have one class.
    """
    x, given = _tensor(x, "inputs"), _tensor(y, "labels")
    y = as_targets(given)
    if x.ndim < 2:
        raise DataError(f"inputs of shape {tuple(x.shape)}: give (examples, features) or (examples, channels, ...)")
    if x.dtype != torch.uint8:
        x = x.long() if integers and is_integer(x) else x.float()
    data = ArrayData(x, y, mean, std, augment, tuple(given.shape[1:]) if given.is_floating_point() else ())
    if learned:
        validate(data)
    return data


def as_targets(y: Tensor) -> Tensor:
    """Integers or booleans (N,) or (N, 1) -> int64 classes (N,); real numbers (N, ...) -> float32 targets (N, K)."""
    if y.is_floating_point():
        return y.float().reshape(len(y), -1) if len(y) else y.float()
    return y.squeeze(1).long() if y.ndim == 2 else y.long()


def validate(data: ArrayData, num_classes: int | None = None, place: str = "the data") -> None:
    """Raise a DataError for data that cannot be trained on; `num_classes` is the width of the network's output."""
    if len(data) == 0:
        raise DataError(f"{place} is empty: at least one example is needed")
    check_plain(data.x, f"inputs of {place}")
    check_finite(data.x, f"inputs of {place}")
    if not data.is_classification:
        check_finite(data.y, f"targets of {place}")
        return
    check_labels(data.y, num_classes, place)
    if bool((data.y == data.y[0]).all()):
        raise DataError(f"{place} holds one class only ({int(data.y[0])}): at least two are needed")


def check_labels(y: Tensor, num_classes: int | None = None, place: str = "the data") -> None:
    """Raise unless `y` (N,) holds int64 in [0, num_classes)."""
    if y.dtype != torch.int64:
        raise DataError(f"labels of {place} are {y.dtype}: int64 classes are needed (labels.long())")
    if y.ndim != 1:
        raise DataError(f"labels of {place} have shape {tuple(y.shape)}: give one integer class for each example")
    low, high = (int(v) for v in y.aminmax())
    if low < 0:
        raise DataError(f"label {low} in {place} is negative: classes count from 0")
    if num_classes == 1:
        raise DataError(f"the network has one output for the classes of {place}: it needs one for each, two at least")
    if num_classes is not None and high >= num_classes:
        raise DataError(f"label {high} in {place} is out of range for {num_classes} classes: use 0..{num_classes - 1}")


def check_plain(x: Tensor, what: str) -> None:
    """Raise unless `x` is a dense tensor of real numbers, one at least for each example."""
    if x.layout != torch.strided or x.is_complex():
        raise DataError(f"{what} are {'complex' if x.is_complex() else 'sparse'}: give a dense tensor of real numbers")
    if not x.ndim or (len(x) and not x.numel()):
        raise DataError(f"{what} have shape {tuple(x.shape)}: give one number at least for each example")


def check_finite(x: Tensor, place: str) -> None:
    """Raise where a floating-point tensor holds NaN or infinity, naming the first such example."""
    if not x.is_floating_point() or not x.numel():
        return
    rows = max(1, CHUNK // x[0].numel())  # in parts: PyTorch's own check takes as much memory again
    if not all(bool(torch.isfinite(part).all()) for part in x.split(rows)):
        bad = int((~torch.isfinite(x.reshape(len(x), -1))).any(1).nonzero()[0])
        raise DataError(f"NaN or infinity in the {place}, first in example {bad}: clean the data before training")


def _tensor(value: Any, what: str) -> Tensor:
    try:
        if not isinstance(value, Tensor):
            array = np.ascontiguousarray(value)
            value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))  # PyTorch knows no other
    except (TypeError, ValueError):
        raise DataError(f"{what} of type {type(value).__name__} are no numbers: give a tensor or an array") from None
    check_plain(value, what)
    return value.detach()
