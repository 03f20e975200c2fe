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
from dllp.data.arrays import MAX_CLASSES, ArrayData, channel_statistics, default_augment
from dllp.data.checks import from_pair
from dllp.errors import DataError

FILES = ("train_x.npy", "train_y.npy", "test_x.npy", "test_y.npy")


def present(folder: Path) -> bool:
    """Return whether `folder` holds the four arrays of a data set."""
    return all((folder / name).is_file() for name in FILES)


def load(folder: Path) -> tuple[ArrayData, ArrayData, tuple[str, ...]]:
    """(train, test, classes); a regression has no classes."""
    for name in FILES:
        files.contained(folder, folder / name, DataError)
    train_x, train_y, test_x, test_y = read_arrays(folder)
    x = _channels_first(train_x)
    del train_x  # beside its copy it may be most of the memory there is
    held = _channels_first(test_x)
    del test_x
    image = x.dtype == torch.uint8
    mean, std = channel_statistics(x) if image else (None, None)
    train = from_pair(x, train_y, mean=mean, std=std, augment=default_augment(x) if image else "none")
    test = from_pair(held, test_y, mean=mean, std=std, learned=False)
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
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x))


def read_arrays(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """train_x, train_y, test_x, test_y; inputs uint8 (N, H, W, C) or (N, H, W), or floats (N, F) or (N, C, H, W)."""
    headers = {name: _header(folder / name) for name in FILES}
    for part in ("train", "test"):
        shape, dtype = headers[f"{part}_x.npy"]
        image = dtype == np.uint8 and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)))
        if not image and not (dtype.kind == "f" and len(shape) in (2, 4)):
            raise DataError(
                f"{folder / part}_x.npy holds {dtype} of shape {shape}: give uint8 images (N, H, W, 1 or 3) or "
                "floats (N, F) or (N, C, H, W)"
            )
        labels, kind = headers[f"{part}_y.npy"]
        if kind.kind not in "iuf" or not labels or labels[0] != shape[0]:
            raise DataError(f"{folder / part}_y.npy holds {kind} of shape {labels}: give one number for each input")
        if 0 in shape or 0 in labels:
            raise DataError(f"{folder / part}_x.npy or {part}_y.npy is empty: at least one example is needed")
    if headers["train_x.npy"][0][1:] != headers["test_x.npy"][0][1:]:
        raise DataError(f"train_x.npy and test_x.npy in {folder} hold inputs of different shapes: make them equal")
    a, b, c, d = (_read(folder / name) for name in FILES)
    return a, b, c, d


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array in `path`; the file's size must be what they say."""
    with files.open_plain(path, DataError) as file:
        shape, dtype, _ = read_header(file, os.fstat(file.fileno()).st_size, str(path))
    return shape, dtype


def _read(path: Path) -> np.ndarray:
    with files.open_plain(path, DataError) as file:
        shape, dtype, fortran = read_header(file, os.fstat(file.fileno()).st_size, str(path))
        try:
            flat = np.fromfile(file, dtype, count=math.prod(shape))
        except (OSError, MemoryError) as error:
            raise DataError(f"cannot read {path}: {error}") from None
    return flat.reshape(shape, order="F" if fortran else "C")


def read_header(file: BinaryIO, size: int, place: str) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape, dtype and Fortran order of an array in `size` bytes; only plain numbers, and exactly that many."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns that headers by Python 2 are slow to parse
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
