"""`dllp prune` with network, data and loss of the user's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

import dllp
from dllp.cli.main import main

CODE = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def data():
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    return [{"x": x[k : k + 16], "y": x[k : k + 16, :3].argmax(1)} for k in range(0, 48, 16)]


def loss(network, batch):
    return nn.functional.cross_entropy(network(batch["x"]), batch["y"])


def no_scalar(network, batch):
    return network(batch["x"])


def no_entry(network, batch):
    return network(batch["z"]).sum()
"""
NAMED = ["--model", "owncode:net", "--data", "owncode:data", "--loss", "owncode:loss"]
SHORT = ["--keep-flops", "0.5", "--epochs", "2", "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "owncode.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_run_of_own_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It can be loaded, goes on where it is finished, and its settings import nothing that nobody names."""
    import owncode  # type: ignore[import-not-found]

    assert main(["prune", *NAMED, *SHORT[:-1], "--out", "run"]) == 0
    assert "particle 1: " in capsys.readouterr().out
    result = dllp.load("run", owncode.net())
    assert result.sizes[0].macs <= 0.5 * result.dense.macs and len(result.history) == 2
    assert main(["prune", "--resume", *NAMED, "--out", "run"]) == 0
    assert main(["analyze", "run", *NAMED[:2], "--quiet"]) == 0, "data and loss are not imported"
    assert main(["prune", "--config", "run/config.yaml", "--out", "again"]) == 2
    assert "is code, owncode:net: name it with --model, or add --trust-imports" in capsys.readouterr().err
    assert main(["prune", "--config", "run/config.yaml", "--trust-imports", "--quiet", "--out", "again"]) == 0
    assert main(["prune", *NAMED, *SHORT, "--epochs", "0", "--out", "cut"]) == 0
    assert dllp.load("cut", owncode.net()).history == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--loss", "owncode:loss"], "need data and network of your own code"),
        (["--model", "owncode:net", "--data", "owncode:nothing"], "data 'owncode:nothing' cannot be made"),
        ([*NAMED[:4], "--loss", "owncode:none"], "loss 'owncode:none' cannot be made"),
        ([*NAMED, "--method", "fpgm"], "and method dllp"),
        ([*NAMED[:4], "--loss", "owncode:no_scalar"], "a scalar is needed, the mean over the batch"),
        ([*NAMED[:4], "--loss", "owncode:no_entry"], "the loss fails on a batch, KeyError: 'z'"),
    ],
)
def test_code_that_does_not_fit(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", *words, *SHORT, "--out", "run"]) == 2
    assert told in capsys.readouterr().err and not Path("run").exists()
