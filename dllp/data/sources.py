"""Places of the encoded images of a split: files of class folders or members of tar shards, millions of them.

Names and offsets are kept in a few arrays, which worker processes share; a list of paths would be copied into each.

Shards follow WebDataset's convention: KEY.jpg and KEY.cls side by side in train-000000.tar, train-000001.tar, ... They
are never unpacked: headers are read once, and from then on an image is a range of bytes. Names inside only say which
members belong together; they are never used as paths.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dllp import files
from dllp.data.arrays import MAX_CLASSES
from dllp.data.images import SUFFIXES
from dllp.data.unreadable import Unreadable
from dllp.errors import DataError

MAX_IMAGE_BYTES = 2**28  # most bytes of one encoded image
BLOCK = 512
EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME)
MAX_EXTENDED_HEADER = 2**16  # most bytes of an extended tar header: it holds a name and a few times
LABEL_BYTES = 16
_SHARD = re.compile(r"(train|val|test)-\d+\.tar")


@dataclass(frozen=True)
class Sources:
    """N images by index, in F files."""

    root: str  # the folder that all names are relative to
    names: np.ndarray  # (F,) encoded names of the files
    file: np.ndarray  # (N,) index of the file that holds each image
    offset: np.ndarray  # (N,) its first byte
    size: np.ndarray  # (N,) -1 for the whole file

    def __len__(self) -> int:
        return len(self.file)

    def subset(self, index: np.ndarray) -> Sources:
        """The images at `index` (M,), in that order."""
        return replace(self, file=self.file[index], offset=self.offset[index], size=self.size[index])

    def path(self, i: int) -> str:
        """The file that image `i` lies in."""
        return os.path.join(self.root, os.fsdecode(bytes(self.names[self.file[i]])))

    def name(self, i: int) -> str:
        """The name of image `i` in messages."""
        path, offset = self.path(i), int(self.offset[i])
        if self.size[i] < 0:
            return path
        try:
            header = files.read_part(path, offset - BLOCK, BLOCK, BLOCK, DataError)
            return f"{path}:{tarfile.TarInfo.frombuf(header, 'utf-8', 'surrogateescape').name}"
        except (DataError, tarfile.TarError):
            return f"{path}:byte {offset}"

    def read(self, i: int) -> bytes:
        """The encoded image."""
        size = int(self.size[i])
        part = int(self.offset[i]), None if size < 0 else size
        try:
            return files.read_part(self.path(i), *part, MAX_IMAGE_BYTES, DataError)
        except DataError as error:
            raise Unreadable(str(error)) from None


def from_files(root: Path, paths: list[str]) -> Sources:
    """Whole files, by their names relative to `root`."""
    names, zeros = np.array([os.fsencode(path) for path in paths]), np.zeros(len(paths), np.int64)
    return Sources(str(root), names, np.arange(len(paths), dtype=np.int32), zeros, zeros - 1)


def from_class_folders(root: Path, split: str) -> tuple[Sources, dict[str, int]]:
    """Images of split/<class>/, in the order of their names, and how many each class has."""
    paths: list[str] = []
    counts: dict[str, int] = {}
    folders = (entry.name for entry in scan(root, split) if entry.is_dir() and not entry.name.startswith("."))
    for name in sorted(folders):
        if not name.isprintable():
            raise DataError(f"{root / split / name} has a name that is no text: rename it")
        found = image_files(root, os.path.join(split, name))
        if not found:
            kinds = ", ".join(sorted(SUFFIXES))
            raise DataError(f"{root / split / name} holds no image ({kinds}): fill it or remove it")
        counts[name] = len(found)
        paths += found
    if not counts:
        raise DataError(f"{root / split} holds no class folders: put the images into {split}/<class>/")
    return from_files(root, paths), counts


def image_files(root: Path, folder: str) -> list[str]:
    """Sorted names, relative to `root`, of the images in root/folder; links must not lead out of `root`."""
    found = []
    for entry in scan(root, folder):
        if os.path.splitext(entry.name)[1].lower() in SUFFIXES:
            if entry.is_symlink():
                files.contained(root, Path(entry.path), DataError)
            found.append(os.path.join(folder, entry.name))
    return sorted(found)


def scan(root: Path, folder: str) -> list[os.DirEntry[str]]:
    """Entries of root/folder, which must not lie outside of `root`."""
    try:
        with os.scandir(files.contained(root, root / folder, DataError)) as found:
            return list(found)
    except OSError as error:
        raise DataError(f"cannot read {root / folder}: {error.strerror}") from None


def find_shards(folder: Path) -> dict[str, list[Path]]:
    """Shards of each split, in the order of their names."""
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.tar")):
        match = _SHARD.fullmatch(path.name)
        if match:
            splits.setdefault(match[1], []).append(files.contained(folder, path, DataError))
    return splits


def from_shards(root: Path, paths: list[Path]) -> tuple[Sources, np.ndarray]:
    """Images of tar shards in their order there, and the label (N,) of each."""
    tables = [_index_shard(path) for path in paths]
    offset, size, label = np.ascontiguousarray(np.concatenate(tables).T)
    file = np.repeat(np.arange(len(paths), dtype=np.int32), [len(table) for table in tables])
    return replace(from_files(root, [path.name for path in paths]), file=file, offset=offset, size=size), label


class _Header(tarfile.TarInfo):
    """A checked tar header: tarfile alone takes a damaged one for the archive's end, and extended ones of any size."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:  # type: ignore[override]
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise DataError(str(error)) from None

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENDED and not 0 <= self.size <= MAX_EXTENDED_HEADER:
            raise DataError(f"an extended header of {self.size} bytes")
        if self.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, *EXTENDED):
            raise DataError(f"{self.name[:200]!r} is no plain file")
        return super()._proc_member(archive)  # type: ignore[misc]


def _index_shard(path: Path) -> np.ndarray:
    """(N, 3) int64: offset, size and label of every image of a shard."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with files.open_plain(path, DataError) as file:
        for member in _members(file, path):
            folder, _, base = member.name.rpartition("/")
            stem, _, suffix = base.partition(".")
            key = f"{folder}/{stem}"
            if "." + suffix.lower() in SUFFIXES:
                if key in images:
                    raise DataError(f"{path} holds two images called {stem[:200]!r}: give each its own key")
                images[key] = member.offset_data, member.size
            elif suffix.lower() == "cls":
                file.seek(member.offset_data)
                labels[key] = _label(file.read(min(member.size, LABEL_BYTES + 1)), f"{path}: {member.name[-200:]!r}")
    for key in images:
        if key not in labels:
            raise DataError(f"{path}: image {key[-200:]!r} has no .cls beside it: add one with the number of its class")
    if not images:
        raise DataError(f"{path} holds no images: KEY.jpg and KEY.cls are needed")
    return np.array([(*place, labels[key]) for key, place in images.items()], np.int64)


def _members(file: BinaryIO, path: Path) -> Iterator[tarfile.TarInfo]:
    """Every plain file of an uncompressed tar archive; each size is checked against that of the archive."""
    end = os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as shard:
            while (member := shard.next()) is not None:
                shard.members.clear()  # type: ignore[attr-defined] # it would keep all of them
                if not 0 <= member.size <= end - member.offset_data or member.issparse():
                    raise DataError(f"member of {member.size} bytes does not fit")
                if member.isreg():
                    yield member
    except Exception as error:  # a damaged archive can raise almost anything
        raise DataError(f"{path} is damaged ({error}): write the shard anew, uncompressed") from None


def _label(text: bytes, place: str) -> int:
    text = text.strip()
    if not text.isdigit() or len(text) > LABEL_BYTES or int(text) >= MAX_CLASSES:
        raise DataError(f"{place} holds {text!r}: the number of a class is needed, below {MAX_CLASSES}")
    return int(text)
