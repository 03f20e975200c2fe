"""Folders of arrays in .npy files: headers are checked before any memory is taken, and nothing is unpickled."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from dllp import files
from dllp.data.arrays import MAX_CLASSES, ArrayData, channel_statistics, default_augment, from_pair
from dllp.errors import DataError

FILES = ("train_x.npy", "train_y.npy", "test_x.npy", "test_y.npy")


def present(folder: Path) -> bool:
    """True where `folder` holds the four arrays of a data set."""
    return all((folder / name).is_file() for name in FILES)


def load(folder: Path) -> tuple[ArrayData, ArrayData, tuple[str, ...]]:
    """(train, test, classes); a regression has no classes."""
    for name in FILES:
        files.contained(folder, folder / name, DataError)
    train_x, train_y, test_x, test_y = read_arrays(folder)
    x, held = _channels_first(train_x), _channels_first(test_x)
    image = x.dtype == torch.uint8
    mean, std = channel_statistics(x) if image else (None, None)
    train = from_pair(x, np.array(train_y), mean=mean, std=std, augment=default_augment(x) if image else "none")
    test = from_pair(held, np.array(test_y), mean=mean, std=std)
    if train.is_classification != test.is_classification:
        raise DataError(f"train_y.npy and test_y.npy in {folder} differ in kind: both integers, or both floats")
    one, other = ([size for size in split.target_shape if size > 1] for split in (train, test))
    if one != other:
        raise DataError(f"targets of shape {one} in train_y.npy but {other} in test_y.npy of {folder}: both must agree")
    if not train.is_classification:
        return train, test, ()
    highest = int(train.y.max())
    if highest >= MAX_CLASSES:
        raise DataError(f"label {highest} in {folder / 'train_y.npy'}: at most {MAX_CLASSES} classes are read")
    return train, test, tuple(map(str, range(highest + 1)))


def _channels_first(x: np.ndarray) -> torch.Tensor:
    if x.dtype != np.uint8:
        return torch.from_numpy(np.array(x, np.float32, order="C"))
    return torch.from_numpy(np.array(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2), order="C"))


def read_arrays(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """train_x, train_y, test_x, test_y, mapped: uint8 (N, H, W, C) or (N, H, W), or floats (N, F) or (N, C, H, W)."""
    arrays = {name: _open(folder / name) for name in FILES}
    for part in ("train", "test"):
        x, y = arrays[f"{part}_x.npy"], arrays[f"{part}_y.npy"]
        image = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 3)))
        if not image and not (x.dtype.kind == "f" and x.ndim in (2, 4)):
            raise DataError(
                f"{folder / part}_x.npy holds {x.dtype} of shape {x.shape}: give uint8 images (N, H, W, 1 or 3) or "
                "floats (N, F) or (N, C, H, W)"
            )
        if y.dtype.kind not in "iuf" or y.shape[:1] != x.shape[:1]:
            raise DataError(f"{folder / part}_y.npy holds {y.dtype} of shape {y.shape}: give one number for each input")
    if arrays["train_x.npy"].shape[1:] != arrays["test_x.npy"].shape[1:]:
        raise DataError(f"train_x.npy and test_x.npy in {folder} hold inputs of different shapes: make them equal")
    a, b, c, d = arrays.values()
    return a, b, c, d


def _open(path: Path) -> np.memmap:
    """The array in `path`, its header checked, its numbers not read yet."""
    with files.open_plain(path, DataError) as file:
        shape, dtype, fortran = read_header(file, os.fstat(file.fileno()).st_size, str(path))
        if 0 in shape:
            raise DataError(f"{path} is empty: at least one example is needed")
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def read_header(file: BinaryIO, size: int, place: str) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape, dtype and Fortran order of an array in `size` bytes; only plain numbers, and exactly that many."""
    try:
        with warnings.catch_warnings(action="ignore"):  # numpy warns that headers by Python 2 are slow to parse
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
    except OSError as error:
        raise DataError(f"cannot read {place}: {error.strerror or error}") from None
    except Exception:  # numpy parses the header as Python literals: a damaged one can raise almost anything
        raise DataError(f"{place} is no .npy array: write it with numpy.save") from None
    if dtype.hasobject:
        raise DataError(f"{place} holds Python objects, which are not loaded: save plain numbers")
    if dtype.kind not in "biuf" or dtype.shape or len(shape) > 8 or any(type(n) is not int or n < 0 for n in shape):
        raise DataError(f"{place} holds {dtype} of shape {shape}: plain numbers in a few dimensions are needed")
    declared, body = math.prod(shape) * dtype.itemsize, size - file.tell()
    if body != declared:
        raise DataError(f"{place} is damaged ({body} bytes of data, its header says {shape} {dtype}): write it again")
    if declared > files.cap():
        raise DataError(f"{place} holds {declared} bytes, more than the {files.cap()} of ${files.CAP_VARIABLE}")
    return shape, dtype, bool(fortran)
