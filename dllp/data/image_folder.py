"""Image data sets: class folders (train/<class>/*.png) and tar shards, decoded into memory or streamed from disk."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from dllp import files
from dllp.data import images, npy, sources
from dllp.data.arrays import ArrayData, Augment, channel_statistics, default_augment
from dllp.data.sources import Sources
from dllp.data.stream import StreamedData, decode_all
from dllp.data.unreadable import Report, Unreadable, UnreadableImages
from dllp.errors import DataError

SPLITS = ("train", "val", "test")
CLASS_NAMES = "classes.txt"  # beside shards: the name of each class, one on a line, in the order of their numbers
CLASS_NAMES_BYTES = 2**22
SAMPLE = 1024  # training images, evenly spread, whose mean and standard deviation normalise all streamed images


class Found(NamedTuple):
    """The images of one split, their labels (N,), and those that turn out to be unreadable."""

    sources: Sources
    y: torch.Tensor
    unreadable: UnreadableImages


def find(folder: Path, max_bad: str | float, report: Report | None) -> tuple[dict[str, Found], tuple[str, ...]]:
    """Splits and classes of train/<class>/* or train-*.tar, and val or test beside it; train must have every class."""
    shards = sources.find_shards(folder)
    names = [name for name in SPLITS if (name in shards if shards else (folder / name).is_dir())]
    if "train" not in names or len(names) < 2:
        raise DataError(
            f"{folder} holds {' and '.join(names) or 'no splits'}: give train/<class>/ and val/<class>/ (or test/), or "
            f"train-000000.tar and val-000000.tar (or test-), or {', '.join(npy.FILES)}"
        )
    if shards:
        parts = {name: sources.from_shards(folder, shards[name]) for name in names}
        classes = _class_names(folder, 1 + max(int(y.max()) for _, y in parts.values()))
    else:
        found = {name: sources.from_class_folders(folder, name) for name in names}
        classes = tuple(sorted({c for _, counts in found.values() for c in counts}))
        number = {c: k for k, c in enumerate(classes)}
        parts = {
            name: (place, np.repeat([number[c] for c in counts], list(counts.values())))
            for name, (place, counts) in found.items()
        }
    known = np.unique(parts["train"][1])
    if len(known) < 2:
        raise DataError(f"the training images in {folder} are of one class only: at least two are needed")
    for name, (_, y) in parts.items():
        extra = np.setdiff1d(y, known)
        if len(extra):
            raise DataError(f"class {classes[extra[0]]!r} of {name} in {folder} is missing in train: add or remove it")
    return {
        name: Found(place, torch.from_numpy(y), UnreadableImages(len(y), max_bad, report))
        for name, (place, y) in parts.items()
    }, classes


def _class_names(folder: Path, count: int) -> tuple[str, ...]:
    if not (folder / CLASS_NAMES).exists():
        return tuple(map(str, range(count)))
    path = files.contained(folder, folder / CLASS_NAMES, DataError)
    text = files.read_bytes(path, CLASS_NAMES_BYTES, DataError).decode(errors="replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(names) < count or not all(name.isprintable() for name in names):
        raise DataError(f"{path} names {len(names)} classes, but the labels need {count}: one name on each line")
    return names


def stream(splits: dict[str, Found], image_size: int, augment: Augment | None, workers: int | None) -> dict[str, Any]:
    """Training images stay on disk and are streamed, the others are decoded once."""
    split = {
        name: StreamedData(found.sources, found.y, image_size, found.unreadable, augment="none", workers=workers)
        for name, found in splits.items()
    }
    train = split["train"]
    count = min(SAMPLE, len(train))
    mean, std = channel_statistics(train.subset(torch.arange(count) * len(train) // count).decoded().x)
    split = {name: replace(part, mean=mean, std=std) for name, part in split.items()}
    held = {name: part.decoded() for name, part in split.items() if name != "train"}
    return held | {"train": replace(split["train"], augment=augment or "resized-crop")}


def decode(splits: dict[str, Found], size: tuple[int, int], resize: bool) -> dict[str, Any]:
    """All images in memory as RGB of `size` (width, height), which they must have unless `resize` is given."""
    loaded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, found in splits.items():
        pixels, read = _decode(found.sources, size, found.unreadable, resize)
        loaded[name] = pixels, found.y[read]
    mean, std = channel_statistics(loaded["train"][0])
    split = {name: ArrayData(x, y, mean, std) for name, (x, y) in loaded.items()}
    return split | {"train": replace(split["train"], augment=default_augment(split["train"].x))}


def decode_folder(folder: Path, size: tuple[int, int]) -> torch.Tensor:
    """(N, 3, H, W) uint8: every image of a folder and of the folders in it, resized to `size` = (H, W)."""
    folders = sorted(e.name for e in sources.scan(folder, "") if e.is_dir() and not e.name.startswith("."))
    names = [name for place in ("", *folders) for name in sources.image_files(folder, place)]
    if not names:
        raise DataError(f"{folder} holds no image ({', '.join(sorted(images.SUFFIXES))}): give another folder")
    found = sources.from_files(folder, names)
    return _decode(found, (size[1], size[0]), UnreadableImages(len(names)), resize=True)[0]


def first_size(found: Sources) -> tuple[int, int]:
    """Width and height of the first readable image."""
    first = ""
    for i in range(len(found)):
        try:
            with warnings.catch_warnings(action="ignore"):
                return images.open_image(io.BytesIO(found.read(i))).size
        except Unreadable as error:
            first = first or f"{found.name(i)} ({error})"
    raise DataError(f"none of {len(found)} training images can be read, such as {first}: replace them")


def _decode(
    found: Sources, size: tuple[int, int], unreadable: UnreadableImages, resize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (M, 3, H, W) and the indices (M,) of the readable images."""
    width, height = size
    if len(found) * 3 * height * width > files.cap():
        raise DataError(
            f"{len(found)} images of {width}x{height} take more than the {files.cap()} bytes of "
            f"${files.CAP_VARIABLE}: give a smaller image_size"
        )

    def decode(i: int) -> np.ndarray:
        image = images.open_image(io.BytesIO(found.read(i)))
        if image.size != size and not resize:
            raise DataError(
                f"{found.path(i)} is {image.width}x{image.height} but others are {width}x{height}: "
                "give image_size to resize them all"
            )
        with images.alone(image):
            image = images.to_rgb(image)
            image = image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)
        return np.asarray(image).transpose(2, 0, 1)

    return decode_all(found, (height, width), unreadable, decode)
