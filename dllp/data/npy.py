"""Arrays in .npy files: the header is checked before any memory is taken, and nothing is unpickled."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dllp.errors import DataError

FILES = ("train_x.npy", "train_y.npy", "test_x.npy", "test_y.npy")


def present(folder: Path) -> bool:
    """Whether `folder` holds the four arrays of a data set."""
    return all((folder / name).is_file() for name in FILES)


def read_set(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """train_x, train_y, test_x, test_y; inputs uint8 (N, H, W, C) or (N, H, W), or floats (N, F) or (N, C, H, W)."""
    headers = {name: header(folder / name) for name in FILES}
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
    if headers["train_x.npy"][0][1:] != headers["test_x.npy"][0][1:]:
        raise DataError(f"train_x.npy and test_x.npy in {folder} hold inputs of different shapes: make them equal")
    a, b, c, d = (np.load(folder / name, allow_pickle=False) for name in FILES)
    return a, b, c, d


def header(path: Path) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array in `path`; the file's size must be what they say."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            body = path.stat().st_size - file.tell()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise DataError(f"{path} is no .npy array: write it with numpy.save") from None
    if dtype.hasobject:
        raise DataError(f"{path} holds Python objects, which are not loaded: save plain numbers")
    if body != math.prod(shape) * dtype.itemsize:
        raise DataError(f"{path} is damaged ({body} bytes of data, its header says {shape} {dtype}): write it again")
    return shape, dtype
