"""NaN and infinity in `dllp prune`: named at the step, and rolled back where that is wanted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from dllp.cli.main import main
from dllp.training import trainer
from dllp.training.state import RunState
from tests.support.commands import one_line
from tests.support.interrupted import command, examples


@pytest.fixture
def data(tmp_path: Path) -> str:
    return examples(tmp_path / "data")


def poison(monkeypatch: pytest.MonkeyPatch, act: Callable[[RunState], None], step: int, times: int = 1) -> None:
    """Break a number before a step, so many times."""
    prepare, left = trainer.prepare, [times]

    def faulty(state: RunState, x: torch.Tensor, y: torch.Tensor) -> None:
        if state.step_index == step and left[0] and state.gating is not None:
            left[0] -= 1
            with torch.no_grad():
                act(state)
        prepare(state, x, y)

    monkeypatch.setattr(trainer, "prepare", faulty)


def nan_weight(state: RunState) -> None:
    name = list(state.particles.layout.segments)[-2]
    state.particles.layout.segments[name].view(state.particles.rows[1])[0, 0] = torch.nan


def nan_gate(state: RunState) -> None:
    state.latents.logits[0, 5] = torch.nan


def nan_gradient(state: RunState) -> None:
    def broken(i: int, value: torch.Tensor, *others: torch.Tensor, **options: Any) -> Any:
        found = own(i, value, *others, **options)
        if i == 1:
            state.particles.gradients[1, 3] = torch.inf
        return found

    own, state.particles.differentiate = state.particles.differentiate, broken


@pytest.mark.parametrize(
    ("act", "reported"),
    [
        (nan_weight, ["the weights of particle 2", "(layer ", ".weight)"]),
        (nan_gate, ["the gate logits of particle 1", "(layer "]),
        (nan_gradient, ["the gradient of particle 2", "(layer "]),
    ],
)
def test_a_broken_number_is_named_and_rollback_is_offered(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    act: Callable[[RunState], None], reported: list[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        poison(patch, act, step=4)
        assert main(command(data, out, "--no-dense")) == 2
    error = capsys.readouterr().err
    for word in [*reported, "NaN or infinity", "at step 5 (epoch 2)", f"--resume --out {out} --on-nan rollback"]:
        assert word in error
    assert error.count("\n") == 1
    assert [path.name for path in (out / "checkpoints/pruned").iterdir()] == ["step-000000003.safetensors"]
    with monkeypatch.context() as patch:
        poison(patch, act, step=4)
        assert main(["prune", "--resume", "--quiet", "--on-nan", "rollback", "--out", str(out)]) == 0
    assert "back at step 3 with lr 0.05" in capsys.readouterr().err
    assert yaml.safe_load((out / "config.yaml").read_text())["on_nan"] == "rollback"
    history = json.loads((out / "run.json").read_text())["history"]
    assert [record["epoch"] for record in history] == [1, 2, 3]
    assert all(value.isfinite().all() for value in load_file(out / "particle-0.safetensors").values())


def test_a_learning_rate_that_diverges_stops_or_rolls_back(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    wild = ["--lr", "1e25", "--warmup", "0", "--no-dense", "--checkpoint-steps", "1"]
    assert main(command(data, out, *wild)) == 2
    one_line(capsys, "NaN or infinity in the", "of particle", "at step", "lower lr")
    for file in (out / "checkpoints").rglob("*.safetensors"):
        assert all(value.isfinite().all() for value in load_file(file).values() if value.is_floating_point()), file.name
    assert main(command(data, tmp_path / "again", *wild, "--on-nan", "rollback")) == 2, "four tries are enough"
    assert "back at step" in capsys.readouterr().err


def test_rollbacks_halve_the_rate_each_time(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, nan_weight, step=7, times=3)
    assert main(command(data, tmp_path / "out", "--no-dense", "--on-nan", "rollback", "--checkpoint-steps", "1")) == 0
    rates = [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert rates == ["0.05", "0.025", "0.0125"]
    poison(monkeypatch, nan_weight, step=7, times=9)
    assert main(command(data, tmp_path / "other", "--no-dense", "--on-nan", "rollback")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "kept in" in last and "on_nan" not in last, "rollback is no way out any more"
