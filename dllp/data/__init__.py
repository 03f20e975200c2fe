"""Data sets: by name, from folders, from arrays; in memory, batched on the device, or streamed from disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dllp import files
from dllp.data import cifar10, digits, folder, large, npy, shards
from dllp.data.arrays import ArrayData, Augment, Batches
from dllp.data.bad import MAX_BAD, Tell, share
from dllp.data.checks import check_finite, check_labels, from_pair, validate
from dllp.data.download import Progress
from dllp.data.loaders import BatchSource, LoaderBatches
from dllp.data.split import holdout, stratified
from dllp.data.stream import IN_MEMORY, StreamBatches, StreamedData
from dllp.data.workers import check as check_workers
from dllp.devices.torch_context import undisturbed
from dllp.errors import DataError

__all__ = [
    "ArrayData", "BatchSource", "Batches", "Dataset", "LoaderBatches", "StreamBatches", "StreamedData", "check_finite",
    "check_labels", "from_pair", "holdout", "load", "names", "stratified", "validate",
]  # fmt: skip


MOST_CLASSES, LARGEST_IMAGE = 2**16, 2**13
"""Limits on what a file may ask for: classes are counted up to the largest label."""


@dataclass(frozen=True)
class Dataset:
    """Training and test split, a validation split where one was asked for, and test inputs of classes left out."""

    name: str
    train: ArrayData | StreamedData
    test: ArrayData
    classes: tuple[str, ...]
    validation: ArrayData | None = None
    left_out: ArrayData | None = None

    @property
    def num_classes(self) -> int:
        """Width a network's output needs: classes, or columns of a regression's targets."""
        return len(self.classes) if self.train.is_classification else self.train.y.shape[1]

    @property
    def in_channels(self) -> int:
        return self.train.shape[0]

    @property
    def image_size(self) -> int:
        """Shorter side of the images; 1 for tables."""
        return min(self.train.shape[1:], default=1)


def names() -> tuple[str, ...]:
    """Data sets that :func:`load` knows by name."""
    return ("digits", "cifar10")


@undisturbed()
def load(
    name_or_path: str | Path,
    *,
    root: str | Path | None = None,
    seed: int = 0,
    validation: float | int = 0,
    image_size: int | None = None,
    augment: Augment | None = None,
    workers: int | None = None,
    max_bad: str | float = MAX_BAD,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> Dataset:
    """A data set, checked.

    Args:
        name_or_path: `digits` (embedded), `cifar10`, a folder of class folders (train/<class>/*.png and val or
            test/<class>/*.png), of tar shards (train-000000.tar, ... and val- or test-000000.tar, ...), or of
            train_x.npy, train_y.npy, test_x.npy and test_y.npy.
        root: Where `cifar10` is looked for first, before $DLLP_DATA and ~/.cache/dllp.
        seed: Fixes the validation split.
        validation: Number (int) or fraction (float) of training examples to hold out, stratified; 0 holds out none.
        image_size: Side to which images of class folders and shards are resized; other data are taken as they are.
        augment: `crop-flip`, `resized-crop` or `none` for training images; by default crop-flip for colour images
            in memory and resized-crop for those that are streamed. With resized-crop and an image_size the images of
            any folder are streamed, because parts are cut from the originals.
        workers: Processes that decode streamed images; by default one for each core, up to 16.
        max_bad: Share of a split's images that may be unreadable, such as 0.1%: they are left out.
        progress: Called with (bytes so far, bytes in all) during a download, to draw a progress bar.
        tell: Called with each image that is left out; as text it is one line, so that `print` will do.
    """
    name = str(name_or_path)
    share(max_bad)
    check_workers(workers)
    if image_size is not None and not 1 <= image_size <= LARGEST_IMAGE:
        raise DataError(f"image_size = {image_size}: a number of pixels from 1 to {LARGEST_IMAGE} is needed")
    if name == "digits":
        _check_side(name, image_size, digits.SIDE, digits.SIDE)
        train, test = digits.arrays()
        data = Dataset(name, train, test, tuple("0123456789"))
    elif name == "cifar10":
        _check_side(name, image_size, cifar10.SIDE, cifar10.SIDE)
        train, test = cifar10.arrays(root, progress)
        data = Dataset(name, train, test, cifar10.CLASSES)
    else:
        options = dict(augment=augment, workers=workers, max_bad=max_bad, tell=tell)
        data = _from_path(Path(name_or_path).expanduser(), image_size, options)
    classes = len(data.classes) or None
    if isinstance(data.train, ArrayData):
        validate(data.train, classes, f"the training split of {name}")
    if data.test.is_classification:
        check_labels(data.test.y, classes, f"the test split of {name}")
    check_finite(data.test.y, f"targets of the test split of {name}")
    check_finite(data.test.x, f"inputs of the test split of {name}")
    if augment is not None:
        data = replace(data, train=replace(data.train, augment=augment))
    if validation:
        train, held = holdout(data.train, validation, seed)
        data = replace(data, train=train, validation=held.decoded() if isinstance(held, StreamedData) else held)
    return data


def _from_path(path: Path, image_size: int | None, options: dict[str, Any]) -> Dataset:
    if not path.is_dir():
        raise DataError(f"no data set and no folder is called {path}: give {', '.join(names())} or a folder")
    if npy.present(path):
        for file in npy.FILES:
            files.contained(path, path / file, DataError)
        data = _from_npy(path)
        _check_side(str(path), image_size, *data.train.shape[1:])
        return data
    if shards.found(path):
        return _streamed(path, large.in_shards(path), image_size, options)
    if not folder.is_image_folder(path):
        raise DataError(
            f"{path} holds neither train/<class>/ folders, nor train-000000.tar, nor {', '.join(npy.FILES)}: "
            "add one of the three"
        )
    found = large.in_classes(path)
    size = (image_size, image_size) if image_size else folder.first_size(found.splits["train"][0])
    from_originals = options["augment"] == "resized-crop" and image_size is not None
    if from_originals or len(found) * 3 * size[0] * size[1] > IN_MEMORY:
        return _streamed(path, found, image_size, options)
    shared = {name: options[name] for name in ("max_bad", "tell")}
    train, test, validation = folder.arrays(found.splits, size, resize=image_size is not None, **shared)
    return Dataset(str(path), train, test, found.classes, validation)


def _check_side(name: str, image_size: int | None, *sides: int) -> None:
    """Raise where another size is asked for of data that are taken as they are."""
    if image_size is not None and sides != (image_size, image_size):
        held = f"images of {'x'.join(map(str, sides))}" if sides else "tables"
        raise DataError(
            f"image_size = {image_size}: {name} holds {held}, which are not resized: leave out image_size, or give "
            "class folders or shards"
        )


def _streamed(path: Path, found: large.Found, image_size: int | None, options: dict[str, Any]) -> Dataset:
    if image_size is None:
        raise DataError(f"the {len(found)} images of {path} are streamed: give their image_size, such as 224")
    train, test, validation = large.stream(found, image_size, **options)
    return Dataset(str(path), train, test, found.classes, validation)


def _from_npy(path: Path) -> Dataset:
    train_x, train_y, test_x, test_y = npy.read_set(path)
    x = _channels_first(train_x)
    del train_x  # beside its copy it may be most of the memory there is
    held = _channels_first(test_x)
    del test_x
    image = x.dtype == torch.uint8
    mean, std = folder.statistics(x) if image else (None, None)
    augment = folder.default_augment(x) if image else "none"
    train = from_pair(x, train_y, mean=mean, std=std, augment=augment)
    test = from_pair(held, test_y, mean=mean, std=std, learned=False)
    if train.is_classification != test.is_classification or train.y.shape[1:] != test.y.shape[1:]:
        raise DataError(f"train_y.npy and test_y.npy in {path} differ in kind: both integers, or both floats")
    one, other = ([size for size in split.target_shape if size > 1] for split in (train, test))
    if one != other:
        raise DataError(f"targets of shape {one} in train_y.npy but {other} in test_y.npy of {path}: both must agree")
    if train.is_classification and int(train.y.max()) >= MOST_CLASSES:
        raise DataError(
            f"label {int(train.y.max())} in {path / 'train_y.npy'}: at most {MOST_CLASSES} classes are read"
        )
    classes = tuple(str(c) for c in range(int(train.y.max()) + 1)) if train.is_classification else ()
    return Dataset(str(path), train, test, classes)


def _channels_first(x: np.ndarray) -> torch.Tensor:
    if x.dtype != np.uint8:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x))
