"""CIFAR-10 from arrays, extracted folders, the official archives (python and binary version), or the network.

The files are read without trusting them: downloads and archives are compared with the published checksum, archives are
not unpacked on disk, and the python version's pickles are parsed as plain values, without the pickle module.
"""

from __future__ import annotations

import hashlib
import os
import pickletools  # nosec B403
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from dllp import files
from dllp.data import npy
from dllp.data.arrays import ArrayData
from dllp.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
PIXELS = 3 * SIDE * SIDE
MEAN, STD = (0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)
MEMBER_LIMIT = 40 * 2**20  # most bytes of an extracted file: the official ones have 31 MB

Arrays = tuple[np.ndarray, np.ndarray]  # images uint8 (n, 3, 32, 32) and labels (n,)
Progress = Callable[[int, int | None], None]  # called with the bytes so far and, where known, the bytes in all


class Version(NamedTuple):
    """One of the two published forms."""

    archive: str
    checksum: str
    bytes: int
    folder: str
    suffix: str
    decode: Callable[[bytes, str], Arrays]

    def members(self) -> tuple[str, ...]:
        """Names of the five training files and the test file."""
        return (*(f"data_batch_{i}{self.suffix}" for i in range(1, 6)), f"test_batch{self.suffix}")


def load(root: str | Path | None = None, progress: Progress | None = None) -> tuple[ArrayData, ArrayData]:
    """(train, test), searched for in `root`, $DLLP_DATA and ~/.cache/dllp; downloaded into the first of them."""
    if root is not None and not Path(root).expanduser().is_dir():
        raise DataError(f"the data root {root} is no folder: create it, or leave it out to use ~/.cache/dllp")
    named = (root, os.environ.get("DLLP_DATA"), "~/.cache/dllp")
    places = [Path(place).expanduser() for place in named if place]
    batches = next((found for place in places if (found := _read(place)) is not None), None)
    if batches is None:
        target = places[0] / PYTHON.archive
        download(URL + PYTHON.archive, target, PYTHON.checksum, PYTHON.bytes, progress)
        batches = read_archive(target, PYTHON)
    *train, test = batches
    return _split(train, "crop-flip"), _split([test], "none")


def _split(batches: list[Arrays], augment: Any) -> ArrayData:
    images = torch.from_numpy(np.ascontiguousarray(np.concatenate([x for x, _ in batches])))
    labels = torch.from_numpy(np.concatenate([y for _, y in batches]).astype(np.int64))
    return ArrayData(images, labels, MEAN, STD, augment)


def _read(place: Path) -> list[Arrays] | None:
    for folder in (place, place / "cifar10"):
        if npy.present(folder):
            return _read_npy(folder)
    for version in (PYTHON, BINARY):
        for folder in (place, place / version.folder):
            if (folder / version.members()[0]).is_file():
                return read_folder(folder, version)
    for version in (PYTHON, BINARY):
        archive = place / version.archive
        if archive.is_file():
            verify(archive, version.checksum, URL + version.archive)
            return read_archive(archive, version)
    return None


def _read_npy(folder: Path) -> list[Arrays]:
    train_x, train_y, test_x, test_y = npy.read_arrays(folder)
    if train_x.shape[1:] != (SIDE, SIDE, 3) or train_x.dtype != np.uint8 or test_x.dtype != np.uint8:
        raise DataError(f"{folder} holds {train_x.dtype} of shape {train_x.shape}: CIFAR-10 is uint8 (N, 32, 32, 3)")
    for part, y in (("train", train_y), ("test", test_y)):
        if y.dtype.kind not in "iu":
            raise DataError(f"{folder / part}_y.npy holds {y.dtype} of shape {y.shape}: give integers from 0 to 9")
    return [(x.transpose(0, 3, 1, 2), y) for x, y in ((train_x, train_y), (test_x, test_y))]


def read_folder(folder: Path, version: Version) -> list[Arrays]:
    """Each member of an extracted archive."""
    paths = [folder / name for name in version.members()]
    try:
        contents = [files.read_bytes(path, MEMBER_LIMIT, DataError) for path in paths]
    except DataError as error:
        raise DataError(f"{error}: extract {version.archive} again") from None
    return [version.decode(content, str(path)) for content, path in zip(contents, paths, strict=True)]


def read_archive(path: Path, version: Version) -> list[Arrays]:
    """Each member of an archive whose checksum was verified, read in memory: nothing is extracted."""
    names = [f"{version.folder}/{name}" for name in version.members()]
    try:
        with tarfile.open(path, "r|gz") as tar:
            found = {member.name: tar.extractfile(member).read() for member in tar if member.name in names}  # type: ignore
        contents = [found[name] for name in names]
    except Exception as error:  # a damaged archive can raise almost anything
        raise DataError(f"{path} is no readable archive ({error}): delete it and get it again") from None
    return [version.decode(content, f"{path}:{name}") for content, name in zip(contents, names, strict=True)]


def decode_binary(content: bytes, place: str) -> Arrays:
    """Records of one label byte and 3072 pixel bytes."""
    if not content or len(content) % (PIXELS + 1):
        raise DataError(f"{place} is damaged: {len(content)} bytes are no whole number of records")
    records = np.frombuffer(content, np.uint8).reshape(-1, PIXELS + 1)
    return _checked(records[:, 1:], records[:, 0].astype(np.int64), place)


def decode_python(content: bytes, place: str) -> Arrays:
    """A pickled dictionary with `data` (n, 3072) and `labels`."""
    try:
        items = parse_pickle(content)
        pixels, labels = (items[2 * items[::2].index(key) + 1] for key in ("data", "labels"))
        (call, (kind, *_)), (_, shape, ((dtype, (code, *_)), _), fortran, values) = pixels
        if (call, kind, dtype, code) != ("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype", "u1"):
            raise TypeError("data is no array of bytes")
        pixels = np.frombuffer(values.encode("latin-1"), np.uint8).reshape(shape, order="F" if fortran else "C")
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
            raise TypeError("labels is no list of integers in 0..9")
    except Exception as error:  # a damaged pickle can raise almost anything
        raise DataError(f"{place} is no CIFAR-10 batch ({type(error).__name__}: {error}): get it again") from None
    return _checked(pixels, np.array(labels, np.int64), place)


def _checked(pixels: np.ndarray, labels: np.ndarray, place: str) -> Arrays:
    if pixels.ndim != 2 or pixels.shape != (len(labels), PIXELS) or (len(labels) and labels.max() > 9):
        raise DataError(f"{place} is damaged: pixels of shape {pixels.shape} for {len(labels)} labels in 0..9")
    return pixels.reshape(-1, 3, SIDE, SIDE), labels


_LITERALS = frozenset({"SHORT_BINSTRING", "BINSTRING", "BININT", "BININT1", "BININT2", "LONG1", "GLOBAL"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def parse_pickle(content: bytes) -> Any:
    """The value in a pickle as these files have it (protocol 2 by Python 2): no name is imported, nothing is called.

    A dictionary is the list [key, value, key, value, ...], because hashing keys of a hostile file could take for ever.
    A name is its text, a call the pair (name, arguments), and an object with state the pair (call, state).
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[cast("int", argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[cast("int", argument)])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([])
        elif name in ("APPEND", "SETITEM", "APPENDS", "SETITEMS"):
            start = marks.pop() if name.endswith("S") else len(stack) - (1 if name == "APPEND" else 2)
            stack[start - 1] += stack[start:]
            del stack[start:]
        elif name.startswith("TUPLE"):
            start = marks.pop() if name == "TUPLE" else len(stack) - int(name[-1])
            stack[start:] = [tuple(stack[start:])]
        elif name in ("REDUCE", "BUILD"):
            stack[-2:] = [(stack[-2], stack[-1])]
        elif name == "STOP":
            return stack[-1]
        elif name != "PROTO":
            raise ValueError(f"unexpected opcode {name}")
    raise ValueError("it does not end")


PYTHON = Version(
    "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170498071, "cifar-10-batches-py", "", decode_python
)
BINARY = Version(
    "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170052171, "cifar-10-batches-bin", ".bin",
    decode_binary,
)  # fmt: skip


def verify(path: Path, checksum: str, url: str) -> None:
    """Raise unless the file has the MD5 that its publisher states; they state nothing stronger."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != checksum:
        raise DataError(f"{path} is damaged (MD5 {found}, expected {checksum}): delete it and get it again from {url}")


def download(url: str, target: Path, checksum: str, limit: int, progress: Progress | None = None) -> None:
    """Download at most `limit` bytes; `target` appears only once its checksum is right."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
            part = Path(folder) / target.name
            # Our own addresses only, never one out of a file.
            with urllib.request.urlopen(url, timeout=30) as source, part.open("wb") as sink:  # noqa: S310 # nosec B310
                size, done = source.headers.get("Content-Length"), 0
                while block := source.read(1 << 20):
                    done += len(block)
                    if done > limit:
                        raise OSError(f"more than the expected {limit} bytes arrived")
                    sink.write(block)
                    if progress is not None:
                        progress(done, int(size) if size else None)
            verify(part, checksum, url)
            os.replace(part, target)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise DataError(
            f"cannot download {url} ({reason}): get {target.name} on a machine with a network and put it into "
            f"{target.parent}"
        ) from None
