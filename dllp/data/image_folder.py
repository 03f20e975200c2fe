"""Image data sets: class folders (train/<class>/*.png) and tar shards, decoded into memory or streamed from disk."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dllp import files
from dllp.data import images, reader, sources
from dllp.data.arrays import ArrayData, Augment, channel_statistics, default_augment
from dllp.data.sources import Sources
from dllp.data.stream import StreamedData
from dllp.data.unreadable import MAX_BAD, Report, Unreadable, UnreadableImages, shortened
from dllp.errors import DataError

CLASS_NAMES = "classes.txt"
"""Beside shards: the name of each class, one on a line, in the order of their numbers."""
CLASS_NAMES_BYTES = 2**22
SAMPLE = 1024
"""Training images, evenly spread, whose mean and standard deviation normalise all streamed images."""
THREAD_CHUNK = 64
"""Images that a thread decodes before it takes the next ones."""
LARGE = 2**24
"""Pixels of an image above which it is decoded alone: by many threads at once such images would fill the memory."""
ALONE = threading.Lock()


@dataclass(frozen=True)
class ImageSplits:
    """Images and labels (N,) of each split of a data set, by name; `train` is always among them."""

    splits: dict[str, tuple[Sources, torch.Tensor]]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return sum(len(place) for place, _ in self.splits.values())


Parts = tuple[ArrayData | StreamedData, ArrayData, ArrayData | None]
"""(train, test, validation); validation is val where there is a test split too, else None."""


def find_class_folders(folder: Path) -> ImageSplits:
    """train/<class>/* and val or test/<class>/*; a class that is missing in train is an error."""
    present = [name for name in ("train", "val", "test") if (folder / name).is_dir()]
    parts = {name: sources.from_class_folders(folder, name) for name in present}
    if len(parts) < 2:
        raise DataError(f"{folder} has neither val/ nor test/ beside train/: put <class>/*.png folders into one")
    classes = tuple(parts["train"][1])
    if len(classes) < 2:
        raise DataError(f"{folder / 'train'} holds {len(classes)} class folders: at least two are needed")
    number = {c: k for k, c in enumerate(classes)}
    splits = {}
    for name, (place, counts) in parts.items():
        extra = sorted(set(counts) - set(classes))
        if extra:
            raise DataError(f"class {extra[0]!r} of {folder / name} is missing in {folder / 'train'}: add or remove it")
        splits[name] = place, torch.from_numpy(np.repeat([number[c] for c in counts], list(counts.values())))
    return ImageSplits(splits, classes)


def find_shards(folder: Path) -> ImageSplits:
    """train-*.tar and val- or test-*.tar; a class that is missing in train is an error."""
    paths = sources.find_shards(folder)
    if "train" not in paths or len(paths) < 2:
        raise DataError(f"{folder} needs train-000000.tar, ... and val-000000.tar, ... (or test-): write both")
    parts = {name: sources.from_shards(folder, shards) for name, shards in paths.items()}
    splits = {name: (place, torch.from_numpy(y)) for name, (place, y) in parts.items()}
    known = splits["train"][1].unique()
    if len(known) < 2:
        raise DataError(f"the shards train-*.tar in {folder} hold one class only: at least two are needed")
    for name, (_, y) in splits.items():
        extra = y[~torch.isin(y, known)]
        if len(extra):
            raise DataError(f"class {int(extra[0])} of {name}-*.tar in {folder} is missing in train-*.tar: add it")
    return ImageSplits(splits, _class_names(folder, int(known.max()) + 1))


def _class_names(folder: Path, count: int) -> tuple[str, ...]:
    if not (folder / CLASS_NAMES).exists():
        return tuple(map(str, range(count)))
    path = files.contained(folder, folder / CLASS_NAMES, DataError)
    text = files.read_bytes(path, CLASS_NAMES_BYTES, DataError).decode(errors="replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(names) < count or not all(name.isprintable() for name in names):
        raise DataError(f"{path} names {len(names)} classes, but the labels need {count}: one name on each line")
    return names


def stream(
    found: ImageSplits, image_size: int, *, augment: Augment | None = None, workers: int | None = None,
    max_bad: str | float = MAX_BAD, report: Report | None = None,
) -> Parts:  # fmt: skip
    """Training images stay on disk and are streamed, the others are decoded once."""
    split = {
        name: StreamedData(
            place, y, image_size, UnreadableImages(len(place), max_bad, report), augment="none", workers=workers
        )
        for name, (place, y) in found.splits.items()
    }
    train = split["train"]
    count = min(SAMPLE, len(train))
    mean, std = channel_statistics(train.subset(torch.arange(count) * len(train) // count).decoded().x)
    split = {name: replace(part, mean=mean, std=std) for name, part in split.items()}
    held = {name: part.decoded() for name, part in split.items() if name != "train"}
    train = replace(split["train"], augment=augment or "resized-crop")
    return train, held["test" if "test" in held else "val"], held.get("val") if "test" in held else None


def decode(
    found: ImageSplits, size: tuple[int, int], *, resize: bool = False, max_bad: str | float = MAX_BAD,
    report: Report | None = None,
) -> Parts:  # fmt: skip
    """All images decoded into memory as RGB and normalised by the statistics of the training images.

    With `resize` all are resized (bilinear) to `size`, width and height; without it all must have that size already.
    """
    loaded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, (place, y) in found.splits.items():
        pixels, read = _decode(place, size, UnreadableImages(len(place), max_bad, report), resize)
        loaded[name] = pixels, y[read]
    mean, std = channel_statistics(loaded["train"][0])
    split = {name: ArrayData(x, y, mean, std) for name, (x, y) in loaded.items()}
    train = replace(split["train"], augment=default_augment(split["train"].x))
    return train, split["test" if "test" in split else "val"], split.get("val") if "test" in split else None


def decode_folder(folder: Path, size: tuple[int, int], max_bad: str | float = 0.0) -> torch.Tensor:
    """(N, 3, H, W) uint8: every image of a folder and of the folders in it, resized to `size` = (H, W)."""
    folders = sorted(e.name for e in sources.scan(folder, "") if e.is_dir() and not e.name.startswith("."))
    names = [name for place in ("", *folders) for name in sources.image_files(folder, place)]
    if not names:
        raise DataError(f"{folder} holds no image ({', '.join(sorted(images.SUFFIXES))}): give another folder")
    found = sources.from_files(folder, names)
    return _decode(found, (size[1], size[0]), UnreadableImages(len(names), max_bad), resize=True)[0]


def first_size(found: Sources) -> tuple[int, int]:
    """Width and height of the first readable image."""
    reasons = []
    for i in range(len(found)):
        try:
            with images.warnings_ignored():
                return images.open_image(io.BytesIO(found.read(i))).size
        except Unreadable as error:
            reasons.append(f"{found.name(i)} ({error})")
    raise DataError(f"none of {len(found)} training images can be read: {shortened(reasons)}")


def _decode(
    found: Sources, size: tuple[int, int], unreadable: UnreadableImages, resize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (M, 3, H, W) and the indices (M,) of the readable images; threads do, for Pillow releases the GIL."""
    width, height = size
    if len(found) * 3 * height * width > files.cap():
        raise DataError(
            f"{len(found)} images of {width}x{height} take more than the {files.cap()} bytes of "
            f"${files.CAP_VARIABLE}: give a smaller image_size"
        )
    pixels = np.empty((len(found), 3, height, width), np.uint8)

    def fill(start: int) -> list[tuple[int, str]]:
        """Decode the images from `start` on; returns unreadable ones."""
        failed = []
        for i in range(start, min(start + THREAD_CHUNK, len(found))):
            try:
                pixels[i] = images.as_array(_decode_one(found, i, size, resize)).transpose(2, 0, 1)
            except Unreadable as error:
                failed.append((i, str(error)))
        return failed

    with images.warnings_ignored(), ThreadPoolExecutor(reader.cores()) as pool:
        failed = {i: reason for some in pool.map(fill, range(0, len(found), THREAD_CHUNK)) for i, reason in some}
    unreadable.add((found.name(i), reason) for i, reason in failed.items())
    read = [i for i in range(len(found)) if i not in failed]
    for k, i in enumerate(read):
        if k != i:
            pixels[k] = pixels[i]
    return torch.from_numpy(pixels[: len(read)]), torch.tensor(read, dtype=torch.int64)


def _decode_one(found: Sources, i: int, size: tuple[int, int], resize: bool) -> Image.Image:
    image = images.open_image(io.BytesIO(found.read(i)))
    if image.size != size and not resize:
        raise DataError(
            f"{found.path(i)} is {image.width}x{image.height} but others are {size[0]}x{size[1]}: "
            "give image_size to resize them all"
        )
    with ALONE if image.width * image.height > LARGE else nullcontext():
        image = images.to_rgb(image)
        return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)
