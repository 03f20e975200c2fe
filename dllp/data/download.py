"""Verified downloads: a file appears under its name only when its checksum is right."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dllp.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far and the bytes in all, where known."""


def md5(path: Path) -> str:
    """Hexadecimal MD5 of a file; the publishers of these data sets give nothing stronger."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def verify(path: Path, checksum: str, url: str) -> None:
    """Raise unless the file has the checksum its publisher gives."""
    found = md5(path)
    if found != checksum:
        raise DataError(f"{path} is damaged (MD5 {found}, expected {checksum}): delete it and get it again from {url}")


def fetch(url: str, target: Path, checksum: str, limit: int, progress: Progress | None = None) -> None:
    """Download `url` to `target`; more than `limit` bytes are an error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
            part = Path(folder) / target.name
            # Our own addresses only, never one out of a file.
            with urllib.request.urlopen(url, timeout=30) as source, part.open("wb") as sink:  # noqa: S310 # nosec B310
                size = int(source.headers["Content-Length"]) if source.headers.get("Content-Length") else None
                _copy(source, sink, size, limit, progress)
            verify(part, checksum, url)
            os.replace(part, target)
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot download {url} ({reason}): get {target.name} on a machine with a network and put it into "
            f"{target.parent}"
        ) from None


def _copy(source: IO[bytes], sink: IO[bytes], size: int | None, limit: int, progress: Progress | None) -> None:
    done = 0
    while block := source.read(1 << 20):
        done += len(block)
        if done > limit:
            raise OSError(f"more than the expected {limit} bytes arrived")
        sink.write(block)
        if progress is not None:
            progress(done, size)
