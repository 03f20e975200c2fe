"""Data sets of any size: class folders or tar shards, the training images streamed, the test images decoded once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dllp import files
from dllp.data import shards, sources
from dllp.data.arrays import ArrayData, Augment
from dllp.data.bad import MAX_BAD, Tally, Tell
from dllp.data.folder import statistics
from dllp.data.sources import Sources
from dllp.data.stream import StreamedData
from dllp.errors import DataError

NAMES = "classes.txt"
"""Beside shards: the name of each class, one on a line, in the order of their numbers."""
NAMES_BYTES = 2**22
SAMPLE = 1024
"""Training images, evenly spread, whose mean and spread normalise all."""


@dataclass(frozen=True)
class Found:
    """Every split of a folder: where its images lie and their labels (N,), by name; train is always among them."""

    splits: dict[str, tuple[Sources, torch.Tensor]]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return sum(len(place) for place, _ in self.splits.values())


def in_classes(folder: Path) -> Found:
    """train/<class>/* and val or test/<class>/*: a class that training never shows is an error."""
    parts = {name: sources.of_classes(folder, name) for name in _present(folder)}
    if len(parts) < 2:
        raise DataError(f"{folder} has neither val/ nor test/ beside train/: put <class>/*.png folders into one")
    classes = tuple(parts["train"][1])
    if len(classes) < 2:
        raise DataError(f"{folder / 'train'} holds {len(classes)} class folders: at least two are needed")
    splits = {}
    for name, (place, counts) in parts.items():
        extra = sorted(set(counts) - set(classes))
        if extra:
            raise DataError(f"class {extra[0]!r} of {folder / name} is missing in {folder / 'train'}: add or remove it")
        number = {c: k for k, c in enumerate(classes)}
        splits[name] = place, torch.from_numpy(np.repeat([number[c] for c in counts], list(counts.values())))
    return Found(splits, classes)


def in_shards(folder: Path) -> Found:
    """train-*.tar and val- or test-*.tar."""
    files = shards.found(folder)
    if "train" not in files or len(files) < 2:
        raise DataError(f"{folder} needs train-000000.tar, ... and val-000000.tar, ... (or test-): write both")
    parts = {name: sources.of_shards(folder, paths) for name, paths in files.items()}
    splits = {name: (place, torch.from_numpy(np.ascontiguousarray(y))) for name, (place, y) in parts.items()}
    shown = splits["train"][1].unique()
    if len(shown) < 2:
        raise DataError(f"the shards train-*.tar in {folder} hold one class only: at least two are needed")
    for name, (_, y) in splits.items():
        extra = y[~torch.isin(y, shown)]
        if len(extra):
            raise DataError(f"class {int(extra[0])} of {name}-*.tar in {folder} is missing in train-*.tar: add it")
    count = int(shown.max()) + 1
    classes = _names(folder, count) if (folder / NAMES).exists() else tuple(map(str, range(count)))
    return Found(splits, classes)


def _present(folder: Path) -> list[str]:
    return [name for name in ("train", "val", "test") if (folder / name).is_dir()]


def _names(folder: Path, count: int) -> tuple[str, ...]:
    path = files.contained(folder, folder / NAMES, DataError)
    text = files.read_bytes(path, NAMES_BYTES, DataError).decode(errors="replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(names) < count or not all(name.isprintable() for name in names):
        raise DataError(f"{path} names {len(names)} classes, but the labels need {count}: one name on each line")
    return names


def stream(
    found: Found, image_size: int, *, augment: Augment | None = None, workers: int | None = None,
    max_bad: str | float = MAX_BAD, tell: Tell | None = None,
) -> tuple[StreamedData, ArrayData, ArrayData | None]:  # fmt: skip
    """(train, test, validation): training images stay where they are; validation is val where there is a test too."""
    split = {
        name: StreamedData(place, y, image_size, Tally(len(place), max_bad, tell), augment="none", workers=workers)
        for name, (place, y) in found.splits.items()
    }
    train = split["train"]
    count = min(SAMPLE, len(train))
    spread = torch.arange(count) * len(train) // count
    mean, std = statistics(train.subset(spread).decoded().x)
    split = {name: replace(part, mean=mean, std=std) for name, part in split.items()}
    held = {name: part.decoded() for name, part in split.items() if name != "train"}
    train = replace(split["train"], augment=augment or "resized-crop")
    return train, held.get("test", held.get("val")), held.get("val") if "test" in held else None  # type: ignore
