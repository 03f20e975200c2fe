"""Tar shards in WebDataset's convention: KEY.jpg and KEY.cls side by side in train-000000.tar, train-000001.tar, ...

A shard is never unpacked: its headers are read once, and from then on an image is a number of bytes at a place. Names
inside only tell which members belong together; they are never used as paths.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from dllp import files
from dllp.data.images import SUFFIXES
from dllp.errors import DataError

BLOCK = 512
EXTENDED = 2**16
"""Most bytes of an extended header: it holds a name and a few times."""
LABEL_BYTES = 16
MOST_CLASSES = 2**16
ENTRY = np.dtype([("offset", np.int64), ("size", np.int64), ("label", np.int64)])
_SHARD = re.compile(r"(train|val|test)-\d+\.tar")


class Member(NamedTuple):
    """One file of a shard: its bytes are at `offset`."""

    name: str
    offset: int
    size: int


def found(folder: Path) -> dict[str, list[Path]]:
    """Shards of each split, in the order of their names."""
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.tar")):
        match = _SHARD.fullmatch(path.name)
        if match:
            splits.setdefault(match[1], []).append(files.contained(folder, path, DataError))
    return splits


def index(path: Path) -> np.ndarray:
    """(N,) of :data:`ENTRY`: every image of a shard, in its order there."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with files.open_plain(path, DataError) as file:
        for member in members(file, path):
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
    return np.array([(*place, labels[key]) for key, place in images.items()], ENTRY)


def members(file: BinaryIO, path: Path) -> Iterator[Member]:
    """Every plain file of an uncompressed tar archive; each size is checked against that of the archive."""
    end = os.fstat(file.fileno()).st_size
    place, name = 0, ""
    while True:
        header = _header(file, path, place)
        if header is None:
            return
        place += BLOCK
        if not 0 <= header.size <= end - place:
            raise DataError(f"{path} is damaged at byte {place - BLOCK}: a member of {header.size} bytes does not fit")
        if header.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            name = _long_name(file, path, header.size, header.type)
        elif header.type in tarfile.REGULAR_TYPES and header.type not in (tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE):
            yield Member(name or header.name, place, header.size)
            name = ""
        elif header.type not in (tarfile.DIRTYPE, tarfile.XGLTYPE):
            raise DataError(f"{path} holds {header.name[:200]!r}, which is no plain file: leave out links and devices")
        place += -(-header.size // BLOCK) * BLOCK


def name_before(path: Path, offset: int) -> str:
    """The name in the header of the member whose bytes are at `offset`."""
    try:
        with files.open_plain(path, DataError) as file:
            header = _header(file, path, offset - BLOCK)
    except DataError:
        header = None
    return f"byte {offset}" if header is None else header.name


def _header(file: BinaryIO, path: Path, place: int) -> tarfile.TarInfo | None:
    """The header at a place; None at the archive's end."""
    try:
        file.seek(place)
        block = file.read(BLOCK)
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
        return None
    except (tarfile.TarError, ValueError) as error:
        raise DataError(f"{path} is damaged at byte {place} ({error}): write the shard anew, uncompressed") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _long_name(file: BinaryIO, path: Path, size: int, kind: bytes) -> str:
    """The name that an extended header gives to the member after it; empty where it gives none."""
    if size > EXTENDED:
        raise DataError(f"{path} has an extended header of {size} bytes: {EXTENDED} are the most that are read")
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
    if not text.isdigit() or len(text) > LABEL_BYTES or int(text) >= MOST_CLASSES:
        raise DataError(
            f"{path}: {member.name[-200:]!r} holds {text!r}: the number of a class is needed, below {MOST_CLASSES}"
        )
    return int(text)
