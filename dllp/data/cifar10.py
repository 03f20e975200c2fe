"""CIFAR-10 from arrays, extracted folders, the official archives, or the network, in that order."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from dllp.data import cifar10_files, npy
from dllp.data.arrays import ArrayData
from dllp.data.cifar10_files import BINARY, PYTHON, Arrays
from dllp.data.download import Progress, fetch, verify
from dllp.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.49140, 0.48216, 0.44653)
SIDE = 32
STD = (0.24703, 0.24349, 0.26159)


def arrays(root: str | Path | None = None, progress: Progress | None = None) -> tuple[ArrayData, ArrayData]:
    """(train, test), searched for in `root`, $DLLP_DATA and ~/.cache/dllp; downloaded into the first of them."""
    places = _places(root)
    parts = next((found for place in places if (found := _read(place)) is not None), None)
    if parts is None:
        target = places[0] / PYTHON.archive
        fetch(URL + PYTHON.archive, target, PYTHON.checksum, PYTHON.bytes, progress)
        parts = cifar10_files.read_archive(target, PYTHON)
    *train, test = parts
    return _data([x for x, _ in train], [y for _, y in train], True), _data([test[0]], [test[1]], False)


def _places(root: str | Path | None) -> list[Path]:
    named = [root, os.environ.get("DLLP_DATA"), "~/.cache/dllp"]
    if root is not None and not Path(root).expanduser().is_dir():
        raise DataError(f"the data root {root} is no folder: create it, or leave it out to use ~/.cache/dllp")
    return [Path(place).expanduser() for place in named if place]


def _read(place: Path) -> list[Arrays] | None:
    for folder in (place, place / "cifar10"):
        if npy.present(folder):
            return _from_npy(folder)
    for version in (PYTHON, BINARY):
        for folder in (place, place / version.folder):
            if (folder / version.members()[0]).is_file():
                return cifar10_files.read_folder(folder, version)
    for version in (PYTHON, BINARY):
        archive = place / version.archive
        if archive.is_file():
            verify(archive, version.checksum, URL + version.archive)
            return cifar10_files.read_archive(archive, version)
    return None


def _from_npy(folder: Path) -> list[Arrays]:
    for name in ("train_x.npy", "test_x.npy"):
        shape, dtype = npy.header(folder / name)
        if shape[1:] != (SIDE, SIDE, 3) or dtype != np.uint8:
            raise DataError(f"{folder / name} holds {dtype} of shape {shape}: CIFAR-10 is uint8 of (N, 32, 32, 3)")
    for name in ("train_y.npy", "test_y.npy"):
        shape, dtype = npy.header(folder / name)
        if dtype.kind not in "iu":
            raise DataError(
                f"{folder / name} holds {dtype} of shape {shape}: CIFAR-10's labels are integers from 0 to 9"
            )
    train_x, train_y, test_x, test_y = npy.read_set(folder)
    return [(x.transpose(0, 3, 1, 2), y) for x, y in ((train_x, train_y), (test_x, test_y))]


def _data(x: list[np.ndarray], y: list[np.ndarray], train: bool) -> ArrayData:
    images = torch.from_numpy(np.ascontiguousarray(np.concatenate(x)))
    labels = torch.from_numpy(np.concatenate(y).astype(np.int64))
    return ArrayData(images, labels, MEAN, STD, "crop-flip" if train else "none")
