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
from typing import BinaryIO, NamedTuple

import numpy as np

from dllp import files
from dllp.data.arrays import MAX_CLASSES
from dllp.data.images import SUFFIXES
from dllp.data.unreadable import Unreadable
from dllp.errors import DataError

MAX_IMAGE_BYTES = 2**28
"""Most bytes of one encoded image."""
BLOCK = 512
MAX_EXTENDED_HEADER = 2**16
"""Most bytes of an extended tar header: it holds a name and a few times."""
LABEL_BYTES = 16
_SHARD = re.compile(r"(train|val|test)-\d+\.tar")


@dataclass(frozen=True)
class Sources:
    """Images by index.

    Attributes:
        root: The folder that all names are relative to.
        names: The files' names, concatenated; `ends` (F,) holds where each ends.
        file: (N,) index of the file that holds each image, from byte `offset` (N,) on; `size` (N,) is -1 for the
            whole file.
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
        """The name of image `i` in messages."""
        path, offset = self.path(i), int(self.offset[i])
        if self.size[i] < 0:
            return path
        try:
            with files.open_plain(Path(path), DataError) as file:
                header = _header(file, path, offset - BLOCK)
        except DataError:
            header = None
        return f"{path}:{f'byte {offset}' if header is None else header.name}"

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
    encoded = [os.fsencode(path) for path in paths]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    zeros = np.zeros(len(paths), np.int64)
    return Sources(str(root), b"".join(encoded), ends, np.arange(len(paths), dtype=np.int32), zeros, zeros - 1)


# ---- class folders


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


# ---- tar shards


class Member(NamedTuple):
    """One file of a shard: its bytes are at `offset`."""

    name: str
    offset: int
    size: int


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
                images[key] = member.offset, member.size
            elif suffix.lower() == "cls":
                labels[key] = _label(file, path, member)
    for key in images:
        if key not in labels:
            raise DataError(f"{path}: image {key[-200:]!r} has no .cls beside it: add one with the number of its class")
    if not images:
        raise DataError(f"{path} holds no images: KEY.jpg and KEY.cls are needed")
    return np.array([(*place, labels[key]) for key, place in images.items()], np.int64)


def _members(file: BinaryIO, path: Path) -> Iterator[Member]:
    """Every plain file of an uncompressed tar archive; each size is checked against that of the archive.

    Python's tarfile would take a damaged header for the archive's end, and read an extended header of any size.
    """
    end = os.fstat(file.fileno()).st_size
    place, name = 0, ""
    while (header := _header(file, path, place)) is not None:
        place += BLOCK
        if not 0 <= header.size <= end - place:
            raise DataError(f"{path} is damaged at byte {place - BLOCK}: a member of {header.size} bytes does not fit")
        if header.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            name = _long_name(file, path, header.size, header.type)
        elif header.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield Member(name or header.name, place, header.size)
            name = ""
        elif header.type not in (tarfile.DIRTYPE, tarfile.XGLTYPE):
            raise DataError(f"{path} holds {header.name[:200]!r}, which is no plain file: leave out links and devices")
        place += -(-header.size // BLOCK) * BLOCK


def _header(file: BinaryIO, path: Path | str, place: int) -> tarfile.TarInfo | None:
    """The header at a place; None at the archive's end."""
    try:
        file.seek(place)
        return tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
    except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
        return None
    except (tarfile.TarError, ValueError) as error:
        raise DataError(f"{path} is damaged at byte {place} ({error}): write the shard anew, uncompressed") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _long_name(file: BinaryIO, path: Path, size: int, kind: bytes) -> str:
    """The name that an extended header gives to the member after it; empty where it gives none."""
    if size > MAX_EXTENDED_HEADER:
        raise DataError(f"{path} has an extended header of {size} bytes: at most {MAX_EXTENDED_HEADER} are read")
    content = file.read(size)
    if kind == tarfile.GNUTYPE_LONGNAME:
        return content.rstrip(b"\0").decode("utf-8", "surrogateescape")
    if re.search(rb"(?:^|\n)\d+ (?:size|GNU\.sparse[^=]*)=", content):
        raise DataError(f"{path} holds a sparse member or one above 8 GiB: no image is, write the shard anew")
    match = re.search(rb"(?:^|\n)\d+ path=([^\n]*)\n", content)
    return match[1].decode("utf-8", "surrogateescape") if match else ""


def _label(file: BinaryIO, path: Path, member: Member) -> int:
    file.seek(member.offset)
    text = file.read(min(member.size, LABEL_BYTES + 1)).strip()
    if not text.isdigit() or len(text) > LABEL_BYTES or int(text) >= MAX_CLASSES:
        raise DataError(
            f"{path}: {member.name[-200:]!r} holds {text!r}: the number of a class is needed, below {MAX_CLASSES}"
        )
    return int(text)
