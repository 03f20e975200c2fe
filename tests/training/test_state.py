"""A run that was put back where it stood ends as if it had never stopped, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dllp
from dllp import api
from dllp.config import Config
from dllp.devices.device import WORKSPACE, WORKSPACES
from dllp.errors import ArtifactError
from dllp.runs.checkpoints import Checkpoints
from dllp.training.snapshot import restore, snapshot
from dllp.training.state import RunState


class Stop(Exception):
    """Ends a run from inside."""


def network() -> nn.Module:
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(12, 3)
    return nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), *end)


def table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(50) % 3
    return torch.randn(50, 1, 6, 6, generator=generator) + y.view(-1, 1, 1, 1), y


def config(**options: Any) -> Config:
    small = {"keep_flops": 0.5, "epochs": 4, "batch_size": 16, "particles": 2, "lr": 0.05, "device": "cpu"}
    return Config(**(small | options))


def outcome(result: dllp.Result) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    tensors = dict(result.gates)
    for i, particle in enumerate(result.particles):
        for kind, part in (("small", particle.network), ("full", particle.reference)):
            tensors |= {f"{kind}/{i}/{name}": value for name, value in part.state_dict().items()}
    # how an epoch was computed is no part of what was computed: after a stop, steps warm up once more before a capture
    apart = ("seconds", "engine")
    return tensors, [{k: v for k, v in record.items() if k not in apart} for record in result.history]


def assert_equal(one: dllp.Result, other: dllp.Result) -> None:
    (a, history), (b, again) = outcome(one), outcome(other)
    assert history == again and a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def stopped(folder: Path, step: int, verb: Any, model: nn.Module, data: Any, config: Config) -> dllp.Result:
    """Stopped without a word after a step, then run to the end by new objects."""
    held = Checkpoints(folder, every_steps=1)

    def stop(trainer: RunState) -> None:
        held.flush()
        if trainer.step_index == step:
            raise Stop

    with pytest.raises(Stop):
        verb(model, data, config, on_step=stop, checkpoints=held)
    torch.rand(5)  # whatever happened to the process's own random numbers in between
    resumed: list[int] = []
    rest = Checkpoints(folder)
    result = verb(
        model, data, config, on_start=lambda trainer: resumed.append(trainer.step_index), checkpoints=rest
    )  # fmt: skip
    assert resumed == [step - 1]
    return result


@pytest.mark.parametrize("step", [2, 4, 7, 12])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"granularity": "weight", "keep_flops": None, "keep_params": 0.6, "teacher": "given"},
        {"likelihood": "gaussian", "keep_flops": None, "sparsity": 0.1, "particles": 1},
        {"init": "fresh", "teacher": "posterior", "patience": 1},
    ],
    ids=["channel", "weight", "gaussian", "fresh"],
)
def test_a_stopped_run_ends_as_one_that_never_was(tmp_path: Path, options: dict[str, Any], step: int) -> None:
    """In each phase, also between two epochs' ends: dropout, batch norm, statistics, optimisers, gate noise."""
    model, data = network(), table()
    whole = dllp.prune(model, data, config(**options))
    assert_equal(stopped(tmp_path, step, dllp.prune, model, data, config(**options)), whole)


def test_the_dense_reference_goes_on_too(tmp_path: Path) -> None:
    model, data, settings = network(), table(), config(keep_flops=None, particles=1)
    whole = api.train_dense(model, data, settings)
    assert_equal(stopped(tmp_path, 5, api.train_dense, model, data, settings), whole)


def test_a_data_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*table()), batch_size=16, shuffle=True)
    model, settings = network(), config()
    whole = dllp.prune(model, loader, settings)
    assert_equal(stopped(tmp_path, 6, dllp.prune, model, loader, settings), whole)


def test_a_finished_training_is_read_and_not_run_again(tmp_path: Path) -> None:
    model, data = network(), table()
    whole = dllp.prune(model, data, config(), checkpoints=Checkpoints(tmp_path))
    steps: list[RunState] = []
    again = dllp.prune(model, data, config(), on_step=steps.append, checkpoints=Checkpoints(tmp_path))
    assert not steps
    assert_equal(again, whole)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize("step", [2, 9, 20])
def test_with_deterministic_kernels_a_stopped_run_goes_on_exactly_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, granularity: str
) -> None:
    """In each phase, warm-up steps in place of captured ones included."""
    monkeypatch.setenv(WORKSPACE, WORKSPACES[0])
    model, data = network(), table()
    settings = config(device="cuda", deterministic=True, epochs=8, granularity=granularity)
    whole = dllp.prune(model, data, settings)
    assert_equal(stopped(tmp_path, step, dllp.prune, model, data, settings), whole)


# ---- what does not fit


def trainer(**options: Any) -> RunState:
    """A run as it stands before its first step."""
    found: list[RunState] = []

    def stop(trainer: RunState) -> None:
        found.append(trainer)
        raise Stop

    with pytest.raises(Stop):
        dllp.prune(network(), table(), config(**options), on_start=stop)
    return found[0]


@pytest.mark.parametrize("options", [{"lr": 0.01}, {"epochs": 5}, {"particles": 1}, {"batch_size": 10}, {"seed": 1}])
def test_another_runs_checkpoint_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    dllp.prune(network(), table(), config(epochs=1), checkpoints=Checkpoints(tmp_path))
    with pytest.raises(ArtifactError, match="belongs to another run"):
        dllp.prune(network(), table(), config(**({"epochs": 1} | options)), checkpoints=Checkpoints(tmp_path))


def test_other_data_and_another_network_are_refused() -> None:
    state, (x, y) = snapshot(trainer()), table()
    for model, data in ((network(), (x[:40], y[:40])), (nn.Sequential(nn.Conv2d(1, 11, 3), *network()[1:]), (x, y))):
        if model[0].out_channels == 11:
            model[1], model[-1] = nn.BatchNorm2d(11), nn.Linear(11, 3)
        with pytest.raises(ArtifactError, match="belongs to another run"):
            dllp.prune(model, data, config(), on_start=lambda trainer: restore(trainer, state))


def test_where_a_run_goes_on_may_change() -> None:
    state, other = snapshot(trainer()), trainer(on_nan="rollback", engine="eager")
    restore(other, state)
    assert other.step_index == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", None),
        ("rows", torch.zeros(2, 3)),
        ("momentum", torch.zeros(1).double()),
        ("random/gates", torch.zeros(3, dtype=torch.uint8)),
        ("full/0/float32", torch.zeros(5)),
        ("full/0/float32", torch.zeros(24).double()),
    ],
)
def test_tensors_that_do_not_fit_are_an_error(name: str, value: Tensor | None) -> None:
    tensors, values = snapshot(trainer())
    assert name in tensors
    changed = {k: v for k, v in tensors.items() if k != name} | ({} if value is None else {name: value})
    with pytest.raises(ArtifactError, match="does not fit the run"):
        restore(trainer(), (changed, values))


@pytest.mark.parametrize("change", [{"step": -1}, {"step": 10**9}, {"lr_scale": 0}, {"history": [{}]}, {"patience": 1}])
def test_values_that_do_not_fit_are_an_error(change: dict[str, Any]) -> None:
    tensors, values = snapshot(trainer())
    with pytest.raises(ArtifactError, match="does not fit the run"):
        restore(trainer(), (tensors, values | change))


def test_a_snapshot_is_a_copy() -> None:
    run = trainer()
    tensors, values = snapshot(run)
    before = {name: value.clone() for name, value in tensors.items()}
    run.particles.rows.add_(1)
    run.latents.logits.add_(1)
    run.statistics.add_(1)
    assert all(torch.equal(tensors[name], value) for name, value in before.items())
    assert values["step"] == 0 and replace(run.config, seed=9) != run.config


def test_a_place_that_takes_no_checkpoints_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    steps: list[RunState] = []
    with pytest.raises(ArtifactError, match=r"checkpoints cannot be written to .*file"):
        dllp.prune(network(), table(), config(), on_step=steps.append, checkpoints=Checkpoints(tmp_path / "file"))
    assert not steps
