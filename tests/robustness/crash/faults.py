"""Disks that fail: every open, write, flush, rename and removal of a run is counted, and one of them goes wrong.

Installed in the process that trains, before the command starts; nothing in the package knows of it.
"""

from __future__ import annotations

import builtins
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dllp import files
from dllp.runs import folder

Kind = Literal["kill", "full", "denied", "lost"]
"""SIGKILL in the operation; no space; permission denied once; permission lost for good."""
ERRORS = {"full": errno.ENOSPC, "denied": errno.EACCES, "lost": errno.EACCES}


class Fault:
    """Goes wrong at the `at`-th operation, and for good where the kind is `lost`; counts without `kind`."""

    def __init__(self, kind: Kind | None = None, at: int = 0) -> None:
        self.kind, self.at, self.count = kind, at, 0

    def __call__(self, half: Callable[[], object] | None = None) -> None:
        self.count += 1
        if self.kind is None or (self.count != self.at and not (self.kind == "lost" and self.count > self.at)):
            return
        if half is not None:
            half()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]))

    def install(self) -> None:
        """Watch what the package writes."""
        files.open = folder.open = self._open  # pyright: ignore
        os.fsync = self._before(os.fsync)
        os.replace = self._before(os.replace)
        Path.unlink = self._before(Path.unlink)
        Path.mkdir = self._before(Path.mkdir)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any, **options: Any) -> Any:
            self()
            return function(*arguments, **options)

        return faulty

    def _open(self, path: Path, mode: str, **options: Any) -> Any:
        self()
        return _File(builtins.open(path, mode, **options), self)


class _File:
    """A file whose writes may tear: half of the bytes arrive."""

    def __init__(self, file: Any, fault: Fault) -> None:
        self.file, self.fault = file, fault

    def write(self, content: Any) -> int:
        def half() -> None:
            self.file.write(content[: len(content) // 2])
            self.file.flush()

        self.fault(half)
        return self.file.write(content)

    def flush(self) -> None:
        self.fault()
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()
