"""Runs of nine steps, and what stops them half-way."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dllp.api import OnStep
from dllp.cli.main import main
from dllp.runs.checkpoints import Checkpoints
from tests.support.commands import npy

SHORT = ("--model", "mlp", "--granularity", "weight", "--gate-linear", "--keep-params", "0.3", "--epochs", "3",
         "--particles", "2")  # fmt: skip
"""Nine steps of a small network, twice."""


def examples(folder: Path) -> str:
    """A data folder of 96 examples; returns its path."""
    rng = np.random.default_rng(0)
    y = np.arange(96) % 4
    return str(npy(folder, (rng.normal(size=(96, 6)) + y[:, None]).astype(np.float32), y))


def command(data: str, out: Path, *words: str) -> list[str]:
    return ["prune", "--data", data, "--batch-size", "32", "--quiet", "--out", str(out), *SHORT, *words]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, act: OnStep, training: str = "pruned") -> None:
    """Act after a step of one of the trainings, before its checkpoint is due."""
    after = Checkpoints.after_step

    def faulty(self: Checkpoints, now: int, *rest: Any, **options: Any) -> None:
        if now == step and self.folder.name == training:
            act(self)  # pyright: ignore
        after(self, now, *rest, **options)

    monkeypatch.setattr(Checkpoints, "after_step", faulty)


def signalled(number: int) -> Callable[[object], None]:
    return lambda _: signal.raise_signal(number)


def killed(_: object) -> None:
    raise SystemError("as if killed")


def unfinished(data: str, out: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Leave a run folder that was stopped after four steps."""
    with monkeypatch.context() as patch:
        stop_at(patch, 4, signalled(signal.SIGTERM))
        assert main(command(data, out, "--no-dense", *words)) == 143
