"""Files that are there whole or not at all, and what users name instead of a file: a link, a pipe, a device."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO

from dllp.errors import ArtifactError


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
