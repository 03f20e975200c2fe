"""Folders that take long to make: one worker makes them, and all of them see them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` fills, whichever worker of this test run is the first to need it; nobody may change it."""
    own = factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, whole = root / name, root / f"{name}.whole"
    with FileLock(root / f"{name}.lock"):
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a worker left whose attempt has failed
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder
