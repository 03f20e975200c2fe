"""A number that breaks stops the run at that step, by the name of the tensor, the particle and the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dllp
from dllp import api, health
from dllp.config import Config
from dllp.errors import DataError, NumericsError
from dllp.train import Trainer


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))


def table() -> tuple[Tensor, Tensor]:
    return torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def config(**options: Any) -> Config:
    return Config(**({"keep_flops": 0.6, "epochs": 3, "batch_size": 10, "lr": 0.05, "device": "cpu"} | options))


def break_at(step: int, act: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """An `on_step` that acts once after a step."""

    def on_step(trainer: Trainer) -> None:
        if trainer.step_index == step:
            act(trainer)

    return on_step


def weight(trainer: Trainer) -> None:
    trainer.particles.layout.segments["2.weight"].view(trainer.particles.rows[1])[0, 0] = torch.nan


def gate(trainer: Trainer) -> None:
    trainer.belief.logits[0, -1] = torch.inf - torch.inf


def gradient(trainer: Trainer) -> None:
    own = trainer.particles.differentiate

    def broken(i: int, *arguments: Any, **options: Any) -> Any:
        found = own(i, *arguments, **options)
        trainer.particles.layout.segments["0.bias"].view(trainer.particles.gradients[0])[2] = torch.inf
        return found

    trainer.particles.differentiate = broken


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (weight, "NaN or infinity in the weights of particle 2 (layer 2.weight)"),
        (gate, "NaN or infinity in the gate logits of particle 1 (layer 2"),
        (gradient, "NaN or infinity in the gradient of particle 1 (layer 0.bias)"),
    ],
)
def test_tensor_particle_and_layer_are_named_at_that_step(act: Callable[[Trainer], None], told: str) -> None:
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


def test_a_loss_is_named() -> None:
    with pytest.raises(NumericsError, match=r"in the loss of particle 1 .* at step 4"):
        api.train_dense(Sour(), table(), config(keep_flops=None, particles=1))


def test_data_that_breaks_is_named() -> None:
    x, y = table()
    x[7, 2] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        dllp.prune(network(), (x, y), config())
    run: list[Trainer] = []
    dllp.prune(network(), table(), config(epochs=1), on_start=run.append)
    assert health.diagnose(run[0], x, y) == "NaN or infinity in the data (inputs)"
    assert "targets" in health.diagnose(run[0], table()[0], torch.full((40, 1), torch.inf))


def test_a_healthy_run_has_nothing_to_tell() -> None:
    run: list[Trainer] = []
    dllp.prune(network(), table(), config(epochs=1), on_start=run.append)
    before = run[0].statistics.clone()
    assert health.find(run[0]) == "" and health.diagnose(run[0], *table()) == ""
    assert torch.equal(run[0].statistics, before), "a look changes no statistics"


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_a_broken_step_changes_no_weight(granularity: str) -> None:
    kept: list[Tensor] = []

    def act(trainer: Trainer) -> None:
        gradient(trainer)
        kept.extend((trainer.particles.rows, trainer.particles.rows.clone()))

    with pytest.raises(NumericsError):
        dllp.prune(network(), table(), config(granularity=granularity, gate_linear=True), on_step=break_at(3, act))
    assert torch.equal(kept[0], kept[1])


def test_a_snapshot_of_broken_weights_is_refused() -> None:
    """Weights that break in the update itself are seen before they are written, not a step later."""

    def act(trainer: Trainer) -> None:
        trainer.momentum[1, 4] = torch.inf
        with pytest.raises(NumericsError, match=r"in the momentum of particle 2 \(layer .* at step 2 \(epoch 1\)"):
            api.healthy_snapshot(trainer)
        trainer.momentum[1, 4] = 0
        trainer.belief.log_d[0] = torch.nan
        with pytest.raises(NumericsError, match="in log_d at step 2"):
            api.healthy_snapshot(trainer)
        trainer.belief.log_d[0] = 0

    dllp.prune(network(), table(), config(epochs=1), on_step=break_at(2, act))


def test_a_broken_buffer_is_named() -> None:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    images, labels = torch.randn(40, 1, 6, 6), torch.arange(40) % 3

    def act(trainer: Trainer) -> None:
        buffers = dict(trainer.particles.active[1].named_buffers())
        buffers["1.running_mean"][0] = torch.nan
        with pytest.raises(NumericsError, match=r"NaN in the buffer 1\.running_mean of particle 2 at step 2"):
            api.healthy_snapshot(trainer)
        buffers["1.running_mean"][0] = 0

    dllp.prune(nn.Sequential(*layers), (images, labels), config(epochs=1), on_step=break_at(2, act))


def test_gates_that_break_before_the_decision() -> None:
    def act(trainer: Trainer) -> None:
        trainer.belief.logits[0, 0] = torch.nan
        with pytest.raises(NumericsError, match="gates are not finite"):
            trainer.belief.decide()
        trainer.belief.logits[0, 0] = 3

    dllp.prune(network(), table(), config(epochs=1), on_step=break_at(1, act))


def test_rollback_without_checkpoints_starts_over_with_half_the_rate() -> None:
    broken: list[int] = []
    rates: list[float] = []

    def once(trainer: Trainer) -> None:
        if trainer.step_index == 6 and not broken:
            broken.append(6)
            weight(trainer)

    result = dllp.prune(
        network(), table(), config(on_nan="rollback"), on_step=once, on_start=lambda t: rates.append(t.lr_scale)
    )
    assert rates == [1, 0.5] and [record["epoch"] for record in result.history] == [1, 2, 3]
