"""Data sets by name, from folders and from arrays: in memory, batched on the device, or streamed from disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dllp.data import cifar10, image_folder, npy, sources
from dllp.data.arrays import (
    ArrayData,
    Augment,
    Batches,
    check_finite,
    check_labels,
    from_pair,
    holdout,
    stratified,
    validate,
)
from dllp.data.cifar10 import Progress
from dllp.data.loaders import LabelledBatches, LoaderBatches, Rows, StreamedBatches
from dllp.data.stream import IN_MEMORY, StreamBatches, StreamedData
from dllp.data.unreadable import MAX_BAD, Report, parse_fraction
from dllp.devices.device import undisturbed
from dllp.errors import DataError

__all__ = [
    "ArrayData", "Batches", "Dataset", "LabelledBatches", "LoaderBatches", "Rows", "StreamBatches", "StreamedBatches",
    "StreamedData", "check_finite", "check_labels", "from_pair", "holdout", "load", "names", "stratified", "validate",
]  # fmt: skip

MAX_IMAGE_SIZE = 2**13
DIGITS_SIDE, DIGITS_TEST = 8, 360


@dataclass(frozen=True)
class Dataset:
    """Training and test split, optionally a validation split, and test inputs of classes left out of training."""

    name: str
    train: ArrayData | StreamedData
    test: ArrayData
    classes: tuple[str, ...]
    validation: ArrayData | None = None
    left_out: ArrayData | None = None

    @property
    def num_classes(self) -> int:
        """Width of a network's output: classes, or columns of a regression's targets."""
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
    name_or_path: str | Path, *, root: str | Path | None = None, seed: int = 0, validation: float | int = 0,
    image_size: int | None = None, augment: Augment | None = None, workers: int | None = None,
    max_bad: str | float = MAX_BAD, progress: Progress | None = None, report: Report | None = None,
) -> Dataset:  # fmt: skip
    """Load a data set and check it.

    Args:
        name_or_path: `digits` (embedded), `cifar10`, a folder of class folders (train/<class>/*.png and val or
            test/<class>/*.png), of tar shards (train-000000.tar, ... and val- or test-000000.tar, ...), or of
            train_x.npy, train_y.npy, test_x.npy and test_y.npy.
        root: Folder in which `cifar10` is looked for first, before $DLLP_DATA and ~/.cache/dllp.
        seed: Seed of the validation split.
        validation: Number (int) or fraction (float) of training examples to hold out, stratified; 0 holds out none.
        image_size: Side to which images of class folders and shards are resized; other data are taken as they are.
        augment: `crop-flip`, `resized-crop` or `none` for training images; by default crop-flip for colour images
            in memory and resized-crop for streamed ones. With resized-crop and an image_size the images of any folder
            are streamed, because crops are cut from the originals.
        workers: Worker processes that decode streamed images; by default one for each core, up to 16.
        max_bad: Fraction of a split's images that may be unreadable, such as 0.1%: they are left out.
        progress: Called with (bytes so far, bytes in all) during a download, to draw a progress bar.
        report: Called with each image that is left out; as text it is one line, so that `print` will do.
    """
    name = str(name_or_path)
    parse_fraction(max_bad)
    if workers is not None and workers < 0:
        raise DataError(f"workers = {workers}: give the number of worker processes, from 0 up")
    if image_size is not None and not 1 <= image_size <= MAX_IMAGE_SIZE:
        raise DataError(f"image_size = {image_size}: a number of pixels from 1 to {MAX_IMAGE_SIZE} is needed")
    if name == "digits":
        data = Dataset(name, *_digits(), tuple("0123456789"))
    elif name == "cifar10":
        data = Dataset(name, *cifar10.load(root, progress), cifar10.CLASSES)
    else:
        data = _load_folder(Path(name_or_path).expanduser(), image_size, augment, workers, max_bad, report)
    sides = data.train.shape[1:]
    if image_size is not None and sides != (image_size, image_size):
        held = f"images of {'x'.join(map(str, sides))}" if sides else "tables"
        raise DataError(f"image_size = {image_size}: {name} holds {held}, which are not resized: leave out image_size")
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


def _digits() -> tuple[ArrayData, ArrayData]:
    """(train, test) of scikit-learn's digits, 1437 and 360, stratified; grey values v of 0..16 become 255 v / 16."""
    from sklearn.datasets import load_digits

    values, target = load_digits(return_X_y=True)
    x = torch.from_numpy(values).mul(255 / 16).round().to(torch.uint8).view(-1, 1, DIGITS_SIDE, DIGITS_SIDE)
    y = torch.from_numpy(target).long()
    held = torch.zeros(len(y), dtype=torch.bool)
    held[stratified(y, DIGITS_TEST, seed=0)] = True
    train = x[~held] / 255
    mean, std = (float(train.mean()),), (float(train.std()),)
    return ArrayData(x[~held], y[~held], mean, std), ArrayData(x[held], y[held], mean, std)


def _load_folder(
    path: Path, image_size: int | None, augment: Augment | None, workers: int | None, max_bad: str | float,
    report: Report | None,
) -> Dataset:  # fmt: skip
    if not path.is_dir():
        raise DataError(f"no data set and no folder is called {path}: give {', '.join(names())} or a folder")
    if npy.present(path):
        train, test, classes = npy.load(path)
        return Dataset(str(path), train, test, classes)
    splits, classes = image_folder.find(path, max_bad, report)
    count = sum(len(found.y) for found in splits.values())
    in_memory, size = False, (image_size or 0, image_size or 0)
    if not sources.find_shards(path) and (image_size is None or augment != "resized-crop"):
        size = size if image_size else image_folder.first_size(splits["train"].sources)
        in_memory = count * 3 * size[0] * size[1] <= IN_MEMORY
    if in_memory:
        split = image_folder.decode(splits, size, resize=image_size is not None)
    elif image_size is None:
        raise DataError(f"the {count} images of {path} are streamed: give their image_size, such as 224")
    else:
        split = image_folder.stream(splits, image_size, augment, workers)
    test, validation = (split["test"], split.get("val")) if "test" in split else (split["val"], None)
    return Dataset(str(path), split["train"], test, classes, validation)
