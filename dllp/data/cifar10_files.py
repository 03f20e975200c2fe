"""The official CIFAR-10 files, read without trusting them: pickled (python version) and raw (binary version)."""

from __future__ import annotations

import gzip
import io
import pickle  # nosec B403
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from dllp import files
from dllp.errors import DataError

PIXELS = 3 * 32 * 32
SIZE_LIMIT = 40 * 2**20
"""No member of the official archives is larger than 31 MB."""
ARCHIVE_LIMIT = 200 * 2**20
"""Nor is all of one, unpacked, larger than 187 MB."""

Arrays = tuple[np.ndarray, np.ndarray]


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


def read_folder(folder: Path, version: Version) -> list[Arrays]:
    """(images uint8 (n, 3, 32, 32), labels) of each member of an extracted archive."""
    parts = []
    for name in version.members():
        path = folder / name
        try:
            content = files.read_bytes(path, SIZE_LIMIT, DataError)
        except DataError as error:
            raise DataError(f"{error}: extract {version.archive} again") from None
        parts.append(version.decode(content, str(path)))
    return parts


def read_archive(path: Path, version: Version) -> list[Arrays]:
    """The same from the archive itself; members are read in memory by exact name, nothing is extracted."""
    wanted = {f"{version.folder}/{name}": name for name in version.members()}
    found: dict[str, Arrays] = {}
    try:
        with (
            files.open_plain(path, DataError) as packed,
            gzip.GzipFile(fileobj=packed) as unpacked,
            tarfile.open(fileobj=cast("io.BytesIO", _Limited(unpacked)), mode="r|") as tar,
        ):
            for member in tar:
                name = wanted.get(member.name)
                if name is None:
                    continue
                file = tar.extractfile(member) if member.isreg() and member.size <= SIZE_LIMIT else None
                if file is None:
                    raise DataError(f"{member.name} in {path} is no plain file of the expected size: get it again")
                found[name] = version.decode(file.read(), f"{path}:{member.name}")
    except DataError:
        raise
    except Exception as error:  # a damaged archive can raise almost anything
        raise DataError(f"{path} is no readable archive ({error}): delete it and get it again") from None
    missing = [name for name in version.members() if name not in found]
    if missing:
        raise DataError(f"{path} lacks {missing[0]}: delete it and get it again")
    return [found[name] for name in version.members()]


class _Limited:
    """A stream that ends with an error where more comes out of an archive than was ever packed into it."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self.file, self.left = file, ARCHIVE_LIMIT

    def read(self, size: int) -> bytes:
        content = self.file.read(min(size, self.left + 1))
        self.left -= len(content)
        if self.left < 0:
            raise OSError(f"more than {ARCHIVE_LIMIT} bytes are packed into it")
        return content


def decode_binary(content: bytes, place: str) -> Arrays:
    """Records of one label byte and 3072 pixel bytes."""
    if not content or len(content) % (PIXELS + 1):
        raise DataError(f"{place} is damaged: {len(content)} bytes are no whole number of records")
    records = np.frombuffer(content, np.uint8).reshape(-1, PIXELS + 1)
    return _checked(records[:, 1:], records[:, 0].astype(np.int64), place)


def decode_python(content: bytes, place: str) -> Arrays:
    """A pickled dictionary with `data` (n, 3072) and `labels`."""
    try:
        _scan(content)
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = batch[b"data"], batch[b"labels"]
        if not isinstance(pixels, _Array) or pixels.value is None:
            raise TypeError("no array of pixels")
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
            raise TypeError("no list of labels in 0..9")
    except Exception as error:  # a damaged pickle can raise almost anything
        raise DataError(f"{place} is no CIFAR-10 batch ({type(error).__name__}: {error}): get it again") from None
    return _checked(pixels.value, np.array(labels, np.int64), place)


def _checked(pixels: np.ndarray, labels: np.ndarray, place: str) -> Arrays:
    if pixels.ndim != 2 or pixels.shape != (len(labels), PIXELS) or (len(labels) and labels.max() > 9):
        raise DataError(f"{place} is damaged: pixels of shape {pixels.shape} for {len(labels)} labels in 0..9")
    return pixels.reshape(-1, 3, 32, 32), labels


_FIXED = {
    **dict.fromkeys(b"(.0N]})aeslubtR\x85\x86\x87\x88\x89", 0),
    **{ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("q"): 1, ord("r"): 4, ord("h"): 1, ord("j"): 4, 0x80: 1},
}
"""Opcodes of protocol 2 that these files need, and the bytes that follow each."""
_COUNTED = {ord("U"): 1, ord("C"): 1, ord("T"): 4, ord("X"): 4, ord("B"): 4, 0x8A: 1}
"""Opcodes with a length in so many bytes, and then content of that length."""
_MEMO = frozenset(b"qr")
_RARE = frozenset(b")t\x85\x86\x87hjR")
_MOST_RARE = 24
"""These build tuples, call a name and repeat what was read: enough of them make hashing or copying endless."""


def _scan(content: bytes) -> None:
    """Raise unless the pickle holds only what these files need; no length and no place may lie outside the file."""
    position, opcodes, rare = 0, 0, 0
    while position < len(content):
        code = content[position]
        position, opcodes, rare = position + 1, opcodes + 1, rare + (code in _RARE)
        if code in _FIXED:
            argument = int.from_bytes(content[position : position + _FIXED[code]], "little")
            position += _FIXED[code]
            if code in _MEMO and argument > opcodes:
                raise pickle.UnpicklingError(f"a place {argument} that no entry has")
        elif code in _COUNTED:
            argument = int.from_bytes(content[position : position + _COUNTED[code]], "little")
            position += _COUNTED[code] + argument
        elif code == ord("c"):
            for _ in range(2):
                position = content.find(b"\n", position) + 1
                if not position:
                    raise pickle.UnpicklingError("a name without an end")
        else:
            raise pickle.UnpicklingError(f"opcode {code} has no place in it")
        if rare > _MOST_RARE or position > len(content):
            raise pickle.UnpicklingError("it is cut off or not made like the official files")
        if code == ord("."):
            return
    raise pickle.UnpicklingError("it does not end")


class _Array:
    """Stands in for numpy's array while unpickling; admits uint8 only, so that no code of numpy's runs on the file."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes) or fortran not in (False, True):
            raise pickle.UnpicklingError("an array of something else than bytes")
        self.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Dtype:
    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which mean nothing for uint8."""


class _Make:
    """A callable without attributes, so that a pickle cannot change it."""

    __slots__ = ("__call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_Make__call", call)

    def __call__(self, *args: Any) -> Any:
        return self.__call(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("an attempt to change the reader")


def _dtype(code: Any, *_: Any) -> _Dtype:
    if code not in (b"u1", "u1"):
        raise pickle.UnpicklingError(f"an array of {code!r}, not of bytes")
    return _Dtype()


class _Unpickler(pickle.Unpickler):
    """Admits the three names these files hold, each replaced by a stand-in; containers and numbers need none."""

    _ADMITTED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Make(lambda *_: _Array()),
        ("numpy", "ndarray"): None,
        ("numpy", "dtype"): _Make(_dtype),
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in self._ADMITTED:
            raise pickle.UnpicklingError(f"{module_name + '.' + global_name!r} has no place in it")
        return self._ADMITTED[module_name, global_name]


PYTHON = Version(
    "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170498071, "cifar-10-batches-py", "", decode_python
)
BINARY = Version(
    "cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    170052171,
    "cifar-10-batches-bin",
    ".bin",
    decode_binary,
)
