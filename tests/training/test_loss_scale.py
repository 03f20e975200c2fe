"""Losses of float16 passes: scaled gradients are the same numbers, steps that overflow move nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dllp
from dllp.errors import ConfigError, NumericsError
from dllp.training import loss_scale
from dllp.training.loss_scale import FIRST, LossScale
from dllp.training.snapshot import restore, snapshot
from dllp.training.state import RunState
from tests.support.short_runs import mlp, quick, table

CPU = torch.device("cpu")


def scaled(state: RunState) -> None:
    state.loss_scale = LossScale(CPU)


def test_the_factor_follows_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "SOUND_STEPS", 3)
    scale, sound = LossScale(CPU), torch.tensor(True)
    assert all(bool(scale.update(flag)) for flag in (sound, sound, ~sound, sound, sound))
    assert scale.values.tolist() == [FIRST / 2, 2, 1]
    assert bool(scale.update(sound)) and scale.values.tolist() == [FIRST, 0, 1]
    while float(scale.factor) > 1:
        assert bool(scale.update(~sound))
    assert not bool(scale.update(~sound)) and float(scale.factor) == 1


@pytest.mark.parametrize(
    "options", [{}, {"likelihood": "gaussian", "accumulate": 3}, {"teacher": "given", "granularity": "weight"}], ids=str
)
def test_a_scaled_loss_changes_no_bit(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, data = mlp(24), table()
    rows: list[list[Tensor]] = []
    for start in (scaled, lambda state: None):
        rows.append([])
        watch: Callable[[RunState], None] = lambda state: rows[-1].append(state.particles.rows.clone())  # noqa: E731
        dllp.prune(model, data, quick(gate_linear=True, **options), on_start=start, on_step=watch)
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


class Overflowing:
    """Cross-entropy that is infinite at some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.index = steps, -1  # before the first step the loss is tried

    def __call__(self, network: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(network(batch[0]), batch[1])
        return loss * torch.inf if self.index in self.steps else loss


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_overflows_moves_no_weight(optimizer: str) -> None:
    loss, rows, states = Overflowing(4, 11), [], []

    def on_start(state: RunState) -> None:
        scaled(state)
        loss.index = 0

    def on_step(state: RunState) -> None:
        rows.append(state.particles.rows.clone())
        loss.index = state.step_index
        states.append(state)

    options = {"optimizer": optimizer, "lr": 0.01, "particles": 1}
    dllp.prune(mlp(24), table(), quick(**options), loss=loss, on_start=on_start, on_step=on_step)
    still = [k for k in range(1, len(rows)) if torch.equal(rows[k], rows[k - 1])]
    assert still == [4, 11] and bool(rows[-1].isfinite().all())
    assert states[-1].loss_scale.values.tolist() == [FIRST / 4, len(rows) - 12, 2]
    steps = len(rows) - 2  # as Adam counts them
    corrections = torch.tensor([1 - 0.9**steps, (1 - 0.999**steps) ** 0.5])
    torch.testing.assert_close(torch.stack(states[-1].corrections), corrections, rtol=1e-3, atol=0)


def test_a_loss_that_stays_infinite_is_an_error() -> None:
    loss = Overflowing(*range(3, 99))

    def on_start(state: RunState) -> None:
        scaled(state)
        state.loss_scale.values[0], loss.index = 4.0, 3  # type: ignore[index, union-attr]

    with pytest.raises(NumericsError, match=r"NaN or infinity in the loss of particle 1.* at step 3 "):
        dllp.prune(mlp(24), table(), quick(epochs=4), loss=loss, on_start=on_start)


def test_the_factor_is_part_of_a_checkpoint() -> None:
    found: list[RunState] = []

    def on_start(state: RunState) -> None:
        scaled(state)
        found.append(state)

    model, data = mlp(24), table()
    for _ in range(2):
        dllp.prune(model, data, quick(epochs=1), on_start=on_start)
    first, second = found
    first.loss_scale.values.copy_(torch.tensor([8.0, 5.0, 13.0]))  # type: ignore[union-attr]
    restore(second, snapshot(first))
    assert second.loss_scale.values.tolist() == [8, 5, 13]  # type: ignore[union-attr]


def test_float16_needs_cuda() -> None:
    words = "precision = float16 needs CUDA, not cpu: use bfloat16 or float32"
    for verb in (dllp.prune, dllp.train_dense):
        with pytest.raises(ConfigError, match=words):
            verb(mlp(24), table(), precision="float16", device="cpu")
    with pytest.raises(ConfigError, match=words):
        dllp.Pruner(mlp(24), table()[0][:2], dllp.Config(precision="float16", device="cpu"), num_data=96, steps=4)
