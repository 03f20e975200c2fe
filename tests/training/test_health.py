"""A number that breaks stops the run at that step, by the name of the tensor, the particle and the layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dllp
from dllp import api
from dllp.cli.main import main
from dllp.config import Config
from dllp.errors import DataError, NumericsError
from dllp.method.likelihood import task_loss
from dllp.training import health
from dllp.training.state import RunState


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))


def table() -> tuple[Tensor, Tensor]:
    return torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def config(**options: Any) -> Config:
    return Config(
        **({"keep_flops": 0.6, "particles": 2, "epochs": 3, "batch_size": 10, "lr": 0.05, "device": "cpu"} | options)
    )


def break_at(step: int, act: Callable[[RunState], None]) -> Callable[[RunState], None]:
    """An `on_step` that acts once after a step."""

    def on_step(state: RunState) -> None:
        if state.step_index == step:
            act(state)

    return on_step


def weight(state: RunState) -> None:
    state.particles.layout.segments["2.weight"].view(state.particles.rows[1])[0, 0] = torch.nan


def weight_of_the_first(state: RunState) -> None:
    state.particles.rows[0, 0] = torch.nan


def gate(state: RunState) -> None:
    state.latents.logits[0, -1] = torch.inf - torch.inf


def gradient(state: RunState) -> None:
    own = state.particles.differentiate

    def broken(i: int, *arguments: Any, **options: Any) -> Any:
        found = own(i, *arguments, **options)
        state.particles.layout.segments["0.bias"].view(state.particles.gradients[0])[2] = torch.inf
        return found

    state.particles.differentiate = broken


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (weight, "NaN or infinity in the weights of particle 2 (layer 2.weight)"),
        (gate, "NaN or infinity in the gate logits of particle 1 (layer 2"),
        (gradient, "NaN or infinity in the gradient of particle 1 (layer 0.bias)"),
    ],
)
def test_tensor_particle_and_layer_are_named_at_that_step(act: Callable[[RunState], None], told: str) -> None:
    with pytest.raises(NumericsError) as error:
        dllp.prune(network(), table(), config(), on_step=break_at(5, act))
    assert told in str(error.value) and "at step 6 (epoch 2): lower lr (now 0.05)" in str(error.value)


class Sour(nn.Module):
    """Divides by zero once it has seen enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.steps = network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return self.layers(x) / (0.0 if self.steps > 3 else 1.0)


def test_the_way_out_names_a_prior_that_acts() -> None:
    for verb, options, named in (
        (dllp.prune, {"prior": "laplace"}, True),
        (dllp.prune, {}, False),
        (dllp.train_dense, {"prior": "laplace"}, False),
    ):
        with pytest.raises(NumericsError) as error:
            verb(network(), table(), config(**options), on_step=break_at(2, weight_of_the_first))
        assert ("raise prior_scale (now 0.05)" in str(error.value)) == named


def test_a_loss_is_named() -> None:
    with pytest.raises(NumericsError, match=r"in the loss of particle 1 .* at step 4"):
        api.train_dense(Sour(), table(), config(keep_flops=None, particles=1))


def test_data_that_breaks_is_named() -> None:
    x, y = table()
    x[7, 2] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        dllp.prune(network(), (x, y), config())
    run: list[RunState] = []
    dllp.prune(network(), table(), config(epochs=1), on_start=run.append)
    assert health.in_data(run[0], x, y) == "NaN or infinity in the data (inputs)"
    assert "targets" in health.in_data(run[0], table()[0], torch.full((40, 1), torch.inf))
    assert health.in_data(run[0], *table()) == ""


def test_a_lower_rate_is_not_tried_where_the_data_broke() -> None:
    starts: list[RunState] = []

    def spoil(state: RunState) -> None:
        starts.append(state)
        own = state.place.shard
        state.place.shard = lambda x, y: own(x * torch.nan if state.step_index == 2 else x, y)

    with pytest.raises(NumericsError, match=r"in the data \(inputs\) at step 3") as caught:
        dllp.prune(network(), table(), config(on_nan="rollback"), on_start=spoil)
    assert caught.value.in_data and len(starts) == 1


def test_a_healthy_run_has_nothing_to_tell() -> None:
    run: list[RunState] = []
    dllp.prune(network(), table(), config(epochs=1), on_start=run.append)
    before = run[0].statistics.clone()
    assert health.find(run[0]) == "" and health.diagnose(run[0], *table()) == ""
    assert torch.equal(run[0].statistics, before), "a look changes no statistics"


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_a_broken_step_changes_no_weight(granularity: str) -> None:
    kept: list[Tensor] = []

    def act(state: RunState) -> None:
        gradient(state)
        kept.extend((state.particles.rows, state.particles.rows.clone()))

    with pytest.raises(NumericsError):
        dllp.prune(network(), table(), config(granularity=granularity, gate_linear=True), on_step=break_at(3, act))
    assert torch.equal(kept[0], kept[1])


def test_a_snapshot_of_broken_weights_is_refused() -> None:
    """Weights that break in the update itself are seen before they are written, not a step later."""

    def act(state: RunState) -> None:
        state.momentum[1, 4] = torch.inf
        with pytest.raises(NumericsError, match=r"in the momentum of particle 2 \(layer .* at step 2 \(epoch 1\)"):
            api.healthy_snapshot(state)
        state.momentum[1, 4] = 0
        state.latents.log_d[0] = torch.nan
        with pytest.raises(NumericsError, match="in log_d at step 2"):
            api.healthy_snapshot(state)
        state.latents.log_d[0] = 0

    dllp.prune(network(), table(), config(epochs=1), on_step=break_at(2, act))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_no_constant_answer_has_less_than_their_loss(labels: list[int]) -> None:
    """The closed forms against the losses themselves, at the shares of the classes and at the mean of the targets."""
    y = torch.tensor(labels)
    shares = y.bincount(minlength=6).double() / len(y)
    best = task_loss(shares.log().clamp_min(-1e9).expand(len(y), 6), y, "classification")
    assert health.constant_loss(y) == pytest.approx(float(best), abs=1e-9)
    targets = torch.stack([y, y * y], 1).double()
    best = task_loss(targets.mean(0).expand(len(y), 2), targets, "regression")
    assert health.constant_loss(targets) == pytest.approx(float(best), abs=1e-9)


def test_a_run_that_learned_nothing_is_told() -> None:
    y = torch.arange(10)
    assert health.learned_nothing([0.1, 2.30], y, 0.5) == ""
    told = health.learned_nothing([0.1, 2.31], y, 0.5)
    assert "larger budget" in told and "budget" not in health.learned_nothing([2.31], y, None)
    assert health.learned_nothing([0.001], torch.ones(5, 2), 0.5) == "", "all targets are equal: one answer is right"
    assert told.startswith("the training loss ended at 2.31, no better than one answer to all inputs (2.303)")


def test_the_command_tells_of_a_run_that_learned_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a rate where the loss grows but stays finite; with a gentle one there is nothing to tell."""
    numbers = np.random.default_rng(0)
    for name in ("train", "test"):
        x = numbers.normal(size=(64, 5)).astype(np.float32)
        np.save(tmp_path / f"{name}_x.npy", x)
        np.save(tmp_path / f"{name}_y.npy", x[:, :1])
    words = [
        "prune",
        "--data",
        str(tmp_path),
        "--model",
        "mlp",
        "--no-dense",
        "--epochs",
        "3",
        "--quiet",
        "--keep-flops",
    ]
    for lr, told in (("0.05", False), ("3", True)):
        assert main([*words, "0.9", "--lr", lr, "--out", str(tmp_path / lr)]) == 0
        assert ("no better than one answer to all inputs" in capsys.readouterr().err) == told


def test_a_broken_buffer_is_named() -> None:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    images, labels = torch.randn(40, 1, 6, 6), torch.arange(40) % 3

    def act(state: RunState) -> None:
        buffers = dict(state.particles.active[1].named_buffers())
        buffers["1.running_mean"][0] = torch.nan
        with pytest.raises(NumericsError, match=r"NaN in the buffer 1\.running_mean of particle 2 at step 2"):
            api.healthy_snapshot(state)
        buffers["1.running_mean"][0] = 0

    dllp.prune(nn.Sequential(*layers), (images, labels), config(epochs=1), on_step=break_at(2, act))


def test_gates_that_break_before_the_decision() -> None:
    def act(state: RunState) -> None:
        state.latents.logits[0, 0] = torch.nan
        with pytest.raises(NumericsError, match="gates are not finite"):
            state.latents.decide()
        state.latents.logits[0, 0] = 3

    dllp.prune(network(), table(), config(epochs=1), on_step=break_at(1, act))


def test_rollback_without_checkpoints_starts_over_with_half_the_rate() -> None:
    broken: list[int] = []
    rates: list[float] = []

    def once(state: RunState) -> None:
        if state.step_index == 6 and not broken:
            broken.append(6)
            weight(state)

    result = dllp.prune(
        network(), table(), config(on_nan="rollback"), on_step=once, on_start=lambda t: rates.append(t.lr_scale)
    )
    assert rates == [1, 0.5] and [record["epoch"] for record in result.history] == [1, 2, 3]
