"""Where the bytes of every image of a split lie: files of class folders or members of tar shards, millions of them.

Names and places are kept in a few arrays: worker processes share them, where a list of paths would be copied into each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dllp import files
from dllp.data import shards
from dllp.data.bad import Unreadable
from dllp.data.images import SUFFIXES
from dllp.errors import DataError

LARGEST = 2**28
"""Most bytes of one encoded image."""


@dataclass(frozen=True)
class Sources:
    """Images by number.

    Attributes:
        root: The folder that all names are relative to.
        names: The files' names, one after the other; `ends` (F,) says where each ends.
        file: (N,) which file holds each image, from byte `offset` (N,) on; `size` (N,) is -1 for the whole file.
    """

    root: str
    names: bytes
    ends: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.file)

    def subset(self, index: np.ndarray) -> Sources:
        """The images at `index` (M,), in that order."""
        return replace(self, file=self.file[index], offset=self.offset[index], size=self.size[index])

    def path(self, i: int) -> str:
        """The file that image `i` lies in."""
        k = int(self.file[i])
        start = int(self.ends[k - 1]) if k else 0
        return os.path.join(self.root, os.fsdecode(self.names[start : int(self.ends[k])]))

    def name(self, i: int) -> str:
        """What a message calls image `i`."""
        if self.size[i] < 0:
            return self.path(i)
        return f"{self.path(i)}:{shards.name_before(Path(self.path(i)), int(self.offset[i]))}"

    def read(self, i: int) -> bytes:
        """The encoded image."""
        size = int(self.size[i])
        try:
            return files.read_part(self.path(i), int(self.offset[i]), None if size < 0 else size, LARGEST, DataError)
        except DataError as error:
            raise Unreadable(str(error)) from None


def of_files(root: Path, paths: list[str]) -> Sources:
    """Whole files, by their names relative to `root`."""
    encoded = [os.fsencode(path) for path in paths]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    count = len(paths)
    zeros = np.zeros(count, np.int64)
    return Sources(str(root), b"".join(encoded), ends, np.arange(count, dtype=np.int32), zeros, zeros - 1)


def of_classes(root: Path, split: str) -> tuple[Sources, dict[str, int]]:
    """Images of split/<class>/, in the order of their names, and how many each class has."""
    paths: list[str] = []
    counts: dict[str, int] = {}
    for name in _folders(root, split):
        if not name.isprintable():
            raise DataError(f"{root / split / name} has a name that is no text: rename it")
        found = _images(root, os.path.join(split, name))
        if not found:
            kinds = ", ".join(sorted(SUFFIXES))
            raise DataError(f"{root / split / name} holds no image ({kinds}): fill it or remove it")
        counts[name] = len(found)
        paths += found
    if not counts:
        raise DataError(f"{root / split} holds no class folders: put the images into {split}/<class>/")
    return of_files(root, paths), counts


def of_shards(root: Path, files: list[Path]) -> tuple[Sources, np.ndarray]:
    """Images of tar shards, and the label (N,) of each."""
    tables = [shards.index(path) for path in files]
    place = of_files(root, [path.name for path in files])
    whole = np.concatenate(tables)
    numbers = np.repeat(np.arange(len(files), dtype=np.int32), [len(table) for table in tables])
    return replace(place, file=numbers, offset=whole["offset"], size=whole["size"]), whole["label"]


def _folders(root: Path, folder: str) -> list[str]:
    return sorted(entry.name for entry in _entries(root, folder) if entry.is_dir() and not entry.name.startswith("."))


def _images(root: Path, folder: str) -> list[str]:
    found = []
    for entry in _entries(root, folder):
        if os.path.splitext(entry.name)[1].lower() in SUFFIXES:
            if entry.is_symlink():
                files.contained(root, Path(entry.path), DataError)
            found.append(os.path.join(folder, entry.name))
    return sorted(found)


def _entries(root: Path, folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(files.contained(root, root / folder, DataError)) as found:
            return list(found)
    except OSError as error:
        raise DataError(f"cannot read {root / folder}: {error.strerror}") from None
