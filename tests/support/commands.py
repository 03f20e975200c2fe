"""The command line in tests: short options, a user's own networks and data, the one line of an error, report pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

import dllp
from dllp.cli.main import main

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(dllp.__file__).parents[1])}
"""For processes: the package as it is tested here, installed or not."""
UNTRACED = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("COVERAGE", "COV_CORE"))}
"""For processes that Ctrl-C interrupts anywhere: within coverage's own lock it would leave them waiting for ever."""
FAST = ("--epochs", "2", "--batch-size", "128", "--keep-flops", "0.3", "--particles", "2")
NETS = """
import torch
from torch import nn

def small():
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *end)

def large():
    return nn.Sequential(nn.Conv2d(1, 8, 11), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))

def wide():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 7))

def text():
    return "no network"

def broken():
    raise ValueError("first line\\nsecond line")
"""


def short_run(parent: Path) -> None:
    """A finished run folder, called "first"."""
    assert main(["prune", *FAST, "--out", str(parent / "first"), "--quiet"]) == 0


def settle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make `folder` the current one, with a module of networks in it; returns the module's name."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "nets_" + "".join(c for c in folder.name if c.isalnum())
    (folder / f"{name}.py").write_text(NETS)
    return name


def npy(folder: Path, x: np.ndarray, y: np.ndarray) -> Path:
    """A data folder with the same arrays for training and test."""
    folder.mkdir()
    for part in ("train", "test"):
        np.save(folder / f"{part}_x.npy", x)
        np.save(folder / f"{part}_y.npy", y)
    return folder


def one_line(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """Standard error is one line of the command's with these words."""
    error = capsys.readouterr().err
    assert error.startswith("dllp: ") and error.endswith("\n") and error.count("\n") == 1, error
    for word in words:
        assert word in error, error


# ---- folders that all workers share


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


# ---- report pages


PAGE = "page.html"


def write_page(run: Path, folder: Path) -> None:
    """The page of a run."""
    assert main(["report", str(run), "--out", str(folder / PAGE), "--quiet"]) == 0


def plots(text: str) -> dict[str, Any]:
    """The figures of a page by name."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])
