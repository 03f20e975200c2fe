"""Files read under a cap on memory, and written whole or not at all.

Plain files only, strict JSON whose values are held to annotated types, and one line that names the file where anything
is wrong with it. SECURITY.md states the limits; nothing here runs what a file holds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args, get_origin

from dllp.config import fits, in_words, types_of
from dllp.errors import ArtifactError, ConfigError, DllpError

T = TypeVar("T")
CAP_VARIABLE = "DLLP_MAX_BYTES"
CAP = 2**34
"""Most bytes that one file may make us hold, whatever it declares; $DLLP_MAX_BYTES overrides it."""
JSON_BYTES, JSON_VALUES = 2**25, 2**21


def cap() -> int:
    """The limit in bytes, from the environment where it is set there."""
    text = os.environ.get(CAP_VARIABLE, "")
    if text and not text.isdecimal():
        raise ConfigError(f"${CAP_VARIABLE} = {text!r}: a number of bytes is needed")
    return int(text or CAP)


def contained(folder: Path, path: Path, kind: type[DllpError] = ArtifactError) -> Path:
    """`path` itself; an error where it is a link that leads out of `folder`."""
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # a loop of links
        raise kind(f"cannot read {path}: {getattr(error, 'strerror', None) or 'a loop of links'}") from None
    if not inside:
        raise kind(f"{path} is a link that leads out of {folder}: put the file itself there")
    return path


def open_plain(path: Path | str, kind: type[DllpError] = ArtifactError) -> BinaryIO:
    """Open a regular file; a pipe or a device, which may never end, is an error."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise kind(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise kind(f"cannot read {path}: it is no regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, limit: int, kind: type[DllpError] = ArtifactError) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    return read_part(path, 0, None, limit, kind)


def read_part(path: Path | str, offset: int, size: int | None, limit: int, kind: type[DllpError]) -> bytes:
    """`size` bytes of a regular file from `offset` on, or all the rest: at most `limit`, and never fewer than asked."""
    with open_plain(path, kind) as file:
        wanted = os.fstat(file.fileno()).st_size - offset if size is None else size
        if wanted > limit:
            raise kind(f"{path} has {wanted} bytes, more than the {limit} that are read")
        try:
            file.seek(offset)
            content = file.read(wanted)
        except OSError as error:
            raise kind(f"cannot read {path}: {error.strerror}") from None
    if len(content) < wanted:
        raise kind(f"{path} is cut off: {len(content)} of {wanted} bytes are there")
    return content


def read_json(path: Path) -> Any:
    """The value in a JSON file; an ArtifactError names the file."""
    return parse_json(read_bytes(path, JSON_BYTES), path)


def parse_json(content: bytes, place: object) -> Any:
    """Strict JSON: UTF-8, finite numbers, no name twice in one object, limited size."""
    if len(content) > JSON_BYTES or sum(content.count(mark) for mark in (b",", b"[", b"{")) > JSON_VALUES:
        raise ArtifactError(
            f"{place} is too large for JSON: at most {JSON_BYTES} bytes and {JSON_VALUES} values are read"
        )
    try:
        return json.loads(content.decode(), parse_float=_finite, parse_constant=_finite, object_pairs_hook=_object)
    except RecursionError:
        raise ArtifactError(f"{place} is nested too deeply: the file is damaged") from None
    except ValueError as error:
        raise ArtifactError(f"{place} is not valid JSON ({error}): the file is damaged") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:25]} is not finite")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object holds one name twice")
    return result


def typed(hint: type[T], value: Any, place: object, name: str = "") -> T:
    """A JSON value as its annotated type: dataclasses are made of objects, all else is returned as it is.

    Names that a dataclass lacks are ignored: files may hold computed values besides. An error names the `place` and the
    `name` of the value in it: `run.json: history[3].loss[0] must be a number`.
    """
    if fits(value, hint):
        return value
    if is_dataclass(hint) and isinstance(value, dict):
        hints, parts = types_of(hint), {}
        for field in fields(hint):
            inner = f"{name}.{field.name}".lstrip(".")
            if field.name in value:
                parts[field.name] = typed(hints[field.name], value[field.name], place, inner)
            elif field.default is MISSING and field.default_factory is MISSING:
                raise ArtifactError(f"{place}: {inner} is missing")
        return hint(**parts)
    if get_origin(hint) is list and isinstance(value, list):
        (inner,) = get_args(hint)
        return [typed(inner, part, place, f"{name}[{i}]") for i, part in enumerate(value)]  # type: ignore[return-value]
    if get_origin(hint) is dict and isinstance(value, dict):
        inner = get_args(hint)[1]
        found = {key: typed(inner, part, place, f"{name}.{key}".lstrip(".")) for key, part in value.items()}
        return found  # type: ignore[return-value]
    raise ArtifactError(f"{place}: {name or 'the document'} must be {in_words(hint)}")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all; a link or whatever else has the name is replaced."""
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
    """Write what a user names: the file that a link leads to is replaced, a pipe or a device is written into.

    Never for files in folders that may be a stranger's: a link in there could lead anywhere.
    """
    try:
        if path.is_dir():
            raise ArtifactError(f"cannot write {path}: it is a folder; give a file")
        if _is_stdout(path):  # opened anew, a file would be written from its start, over lines that are in it
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
            return
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
    except OSError as error:
        raise _unwritable(path, error) from None
    write_bytes(Path(os.path.realpath(path)) if path.is_symlink() else path, content)


def _is_stdout(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something without a number
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    return False


def _unwritable(path: Path, error: OSError) -> ArtifactError:
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
    return ArtifactError(f"cannot write {path}: {reason}; free some space or choose another folder")


def write_json(path: Path, value: Any, *, named: bool = False) -> None:
    """JSON with a trailing newline, by :func:`write_bytes` or, where a user names the file, :func:`write_named`.

    NaN is an error, so that every reader can parse it.
    """
    (write_named if named else write_bytes)(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())
