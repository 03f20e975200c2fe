"""Files that strangers may have written, read under a cap on memory; and files written whole or not at all.

Bytes of plain files only, strict JSON and records in it, and the header of a safetensors file. Whatever is wrong is one
line that names the file and the field. SECURITY.md states the limits; nothing here runs what a file holds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from dllp.errors import ArtifactError, ConfigError, DllpError

T = TypeVar("T")
CAP_VARIABLE = "DLLP_MAX_BYTES"
CAP = 2**34
"""Most bytes that one file may make us hold, whatever it declares; $DLLP_MAX_BYTES overrides it."""
JSON_BYTES, JSON_VALUES, JSON_DEPTH = 2**25, 2**21, 32
HEADER_BYTES = 2**24
DIGITS = 25
"""A longer number is no number of ours: 64 bits need twenty digits, a float's shortest form fewer than twenty-five."""
TEXT = 4096
"""Most characters of a single setting."""
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def cap() -> int:
    """The limit in bytes, from the environment where it is set there."""
    text = os.environ.get(CAP_VARIABLE, "")
    if not text:
        return CAP
    if not text.isdecimal() or len(text) > DIGITS:
        raise ConfigError(f"${CAP_VARIABLE} = {text!r}: a number of bytes is needed")
    return int(text)


def as_path(name: object, kind: type[DllpError] = ArtifactError) -> Path:
    """What a user names a file or a folder by; raise for what none can be called."""
    if not isinstance(name, (str, os.PathLike)):
        raise kind(f"{name!r:.60} is no name of a file or folder: give a text or a pathlib.Path")
    path = Path(name)
    check_name(path, kind)
    try:
        os.lstat(path)
    except ValueError:
        raise kind(f"the name {path} has a NUL byte: choose another") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise kind(f"the name {str(path)[:60]}... is too long: choose a shorter one") from None
    return path


def check_name(name: str | os.PathLike[str], kind: type[DllpError] = ConfigError) -> None:
    """Raise where a name from the user is not UTF-8: settings files and safetensors could not be read back by it."""
    text = os.fspath(name)
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode(errors="backslashreplace").decode().replace(r"\udc", r"\x")  # Python's mark for such bytes
        raise kind(f"the name {shown} is not UTF-8: rename it, or choose another") from None


def open_plain(path: Path, kind: type[DllpError] = ArtifactError) -> BinaryIO:
    """Open a regular file; a pipe or a device, which may never end, is an error."""
    return os.fdopen(_opened(path, kind)[0], "rb")


def _opened(path: Path | str, kind: type[DllpError]) -> tuple[int, int]:
    """Handle and size of a regular file."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise kind(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise kind(f"cannot read {path}: it is no regular file")
    return handle, status.st_size


def read_part(path: Path | str, offset: int, size: int | None, limit: int, kind: type[DllpError]) -> bytes:
    """`size` bytes of a regular file from `offset` on, or all the rest: at most `limit`, and never fewer than asked."""
    handle, end = _opened(path, kind)
    try:
        wanted = end - offset if size is None else size
        if wanted > limit:
            raise kind(f"{path}: {wanted} bytes are more than the {limit} that are read")
        if offset:
            os.lseek(handle, offset, os.SEEK_SET)
        content = os.read(handle, wanted)
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror}") from None
    finally:
        os.close(handle)
    if len(content) < wanted:
        raise kind(f"{path} is cut off: {len(content)} of {wanted} bytes are there")
    return content


def read_bytes(path: Path, limit: int, kind: type[DllpError] = ArtifactError) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_plain(path, kind) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise kind(f"{path} has {size} bytes, more than the {limit} such a file may have")
        try:
            return file.read(limit)
        except OSError as error:
            raise kind(f"cannot read {path}: {error.strerror}") from None


def contained(folder: Path, path: Path, kind: type[DllpError] = ArtifactError) -> Path:
    """`path` itself, or an error where it is a link that leads out of `folder`."""
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # a loop of links
        raise kind(f"cannot read {path}: {getattr(error, 'strerror', None) or 'a loop of links'}") from None
    if not inside:
        raise kind(f"{path} is a link that leads out of {folder}: put the file itself there")
    return path


# ---- JSON


def parse_json(content: bytes, place: object, kind: type[DllpError] = ArtifactError) -> Any:
    """Strict JSON: UTF-8, finite numbers of sane length, no name twice in one object, limited depth and size."""
    if len(content) > JSON_BYTES or sum(content.count(mark) for mark in (b",", b"[", b"{")) > JSON_VALUES:
        raise kind(f"{place} is too large for JSON: at most {JSON_BYTES} bytes and {JSON_VALUES} values are read")
    try:
        value = json.loads(
            content.decode(), parse_float=_float, parse_int=_int, parse_constant=_constant, object_pairs_hook=_object
        )
        _check_depth(value)
    except RecursionError:
        raise kind(f"{place} is nested too deeply: {JSON_DEPTH} levels are read") from None
    except _Unfit as error:
        raise kind(f"{place}: {error}") from None
    except ValueError as error:
        raise kind(f"{place} is not valid JSON: the file is damaged ({error})") from None
    return value


class _Unfit(ValueError):
    """Valid JSON that no file of ours holds."""


def _int(text: str) -> int:
    if len(text) > DIGITS:
        raise _Unfit(f"a number of {len(text)} digits is no number of ours")
    return int(text)


def _float(text: str) -> float:
    value = float(text) if len(text) <= 2 * DIGITS else math.nan
    if not math.isfinite(value):
        raise _Unfit("a number is not finite or too long")
    return value


def _constant(text: str) -> float:
    raise _Unfit(f"{text} is no number in JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _Unfit("an object holds one name twice")
    return result


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(JSON_DEPTH):
        level = [
            part
            for entry in level
            if isinstance(entry, (dict, list))
            for part in (entry.values() if isinstance(entry, dict) else entry)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return
    raise RecursionError


def check_settings(values: Any, place: object, kind: type[DllpError] = ArtifactError) -> dict[str, Any]:
    """A mapping of names to single values or short lists of numbers: what settings are, whoever wrote them."""
    if not isinstance(values, dict):
        raise kind(f"{place} holds no settings")
    for name, value in values.items():
        if not isinstance(name, str) or len(name) > 64:
            raise kind(f"{place}: {str(name)[:64]!r} is no name of a setting")
        entries = value if isinstance(value, list) and len(value) <= 8 else [value]
        for entry in entries:
            if isinstance(entry, str):
                fits = len(entry) <= TEXT and (entry.isprintable() or not entry)
            elif isinstance(entry, int):
                fits = -(2**63) <= entry < 2**64
            else:
                fits = entry is None or isinstance(entry, float)
            if not fits:
                raise kind(f"{place}: {name} must be a number, a word, or a short list of them")
    return values


# ---- records


def records(cls: type[T], values: Any, path: Path, drop: tuple[str, ...] = ()) -> list[T]:
    """A list of records without the fields in `drop`, or an ArtifactError that names the file and the field."""
    if not isinstance(values, list):
        raise ArtifactError(f"{path}: a list of records is needed")
    return [_record(cls, value, path, drop) for value in values]


def _record(cls: type[T], value: Any, path: Path, drop: tuple[str, ...]) -> T:
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: a record is no mapping")
    try:
        made = cls(**{name: part for name, part in value.items() if name not in drop})
    except TypeError as error:
        raise ArtifactError(f"{path}: a record is not of this version ({error})") from None
    for name, hint in get_type_hints(cls).items():
        if not fits(getattr(made, name), hint):
            raise ArtifactError(f"{path}: {name!r} of a record is of the wrong kind")
    return made


def fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has an annotated type; whole numbers are floats too, and every number is finite."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(fits(value, part) for part in inner)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(fits(part, inner[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(k, str) and fits(v, inner[1]) for k, v in value.items())
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


# ---- safetensors


class Declared(NamedTuple):
    """What a header says about one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def tensors_header(
    path: Path, kind: type[DllpError] = ArtifactError, limit: int | None = None
) -> tuple[dict[str, Declared], dict[str, str]]:
    """Tensors and metadata that a safetensors file declares; together they are the whole file, no byte twice.

    Args:
        limit: Most bytes of tensors, where the caller knows; :func:`cap` holds in any case.
    """
    with open_plain(path, kind) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(HEADER_BYTES, size - 8):
            raise kind(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}")
        body, most = size - 8 - length, cap() if limit is None else min(limit, cap())
        if body > most:
            raise kind(f"{path} holds {body} bytes of tensors, more than the {most} that are read")
        content = file.read(length)
    header = parse_json(content.rstrip(b" "), f"the header of {path}", kind)
    if not isinstance(header, dict):
        raise kind(f"the header of {path} is no object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise kind(f"{path}: '__metadata__' must map names to text")
    found, ranges = {}, []
    for name, entry in header.items():
        found[name], place = _declared(path, name, entry, kind)
        ranges.append(place)
    expected = 0
    for begin, end in sorted(ranges):
        if begin != expected:
            raise kind(f"{path}: the tensors overlap or leave a gap at byte {expected}")
        expected = end
    if expected != body:
        raise kind(f"{path} holds {body} bytes of tensors, but its header declares {expected}")
    return found, metadata


def _declared(path: Path, name: str, entry: Any, kind: type[DllpError]) -> tuple[Declared, tuple[int, int]]:
    if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise kind(f"{path}: tensor {name[:200]!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise kind(f"{path}: tensor {name[:200]!r} has the unknown dtype {str(dtype)[:40]!r}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or len(numbers) > 16 or any(type(n) is not int or n < 0 for n in numbers):
            raise kind(f"{path}: {what} of tensor {name[:200]!r} must be a few numbers from 0 up")
    declared = Declared(dtype, tuple(shape))
    if len(offsets) != 2 or offsets[1] - offsets[0] != declared.bytes:
        raise kind(f"{path}: tensor {name[:200]!r} is {dtype} of shape {shape}, but its data_offsets are {offsets}")
    return declared, (offsets[0], offsets[1])


# ---- writing


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all; a link or whatever else has the name is replaced."""
    if not path.name:
        raise ArtifactError(f"cannot write {path}: it is a folder; give a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the folder itself may be what is missing
            temporary.unlink()
        raise _unwritable(path, error) from None


def write_named(path: Path, content: bytes) -> None:
    """Write what a user names: a link stays, and the file that it leads to is replaced.

    A pipe or a device is no file that could be replaced: the content goes into it. Never for files in folders that may
    be a stranger's: a link in there could lead anywhere.
    """
    try:
        stream = _open_stream(path)
        if stream is not None:
            with stream:
                stream.write(content)
            return
    except OSError as error:
        raise _unwritable(path, error) from None
    write_bytes(Path(os.path.realpath(path)) if path.is_symlink() else path, content)


def _unwritable(path: Path, error: OSError) -> ArtifactError:
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
    return ArtifactError(f"cannot write {path}: {reason}; free some space or choose another folder")


def _open_stream(path: Path) -> BinaryIO | None:
    """What stands at `path` where it is a pipe, a device, or what our own output goes to; None where a file belongs."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    for own in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something without one
            descriptor = own.fileno()
            if os.path.samestat(found, os.fstat(descriptor)):
                own.flush()  # opened anew, a file would be written from its start, over lines that are in it
                return os.fdopen(os.dup(descriptor), "wb")
    if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
        return None
    return os.fdopen(os.open(path, os.O_WRONLY), "wb")


def write_json(path: Path, value: Any, *, named: bool = False) -> None:
    """JSON with a trailing newline, by :func:`write_bytes` or, where a user names the file, :func:`write_named`.

    NaN is an error, so that every reader can parse it.
    """
    (write_named if named else write_bytes)(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())
