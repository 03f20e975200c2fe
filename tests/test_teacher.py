"""Two cycles of the learning rate, and learning from the particles as they stood before gates closed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dllp
from dllp.config import Config
from dllp.train import Trainer


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def data(n: int = 96) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6)
    return x, (x @ torch.randn(6, 3)).argmax(1)


def config(**changes: Any) -> Config:
    base: dict[str, Any] = dict(
        epochs=10, batch_size=16, lr=0.05, warmup=0, lr_gates=0.2, device="cpu", keep_flops=0.5,
        open_until=0.4, ramp_until=0.5, discrete_at=0.6, restart=0.5, teacher_weight=0.5,
    )  # fmt: skip
    return Config(**(base | changes))


def test_the_learning_rate_has_two_cycles() -> None:
    rates: list[float] = []
    dllp.prune(network(), data(), config(), on_step=lambda trainer: rates.append(trainer.lr))
    cut = len(rates) * 4 // 10
    first, second = rates[:cut], rates[cut:]
    assert first == sorted(first, reverse=True) and second == sorted(second, reverse=True)
    assert first[-1] == pytest.approx(0.001) and second[-1] == pytest.approx(0.001)
    assert 0.02 < second[0] <= 0.025 < first[0] <= 0.05


def test_a_dense_run_has_one_cycle() -> None:
    rates: list[float] = []
    dllp.train_dense(network(), data(), config(particles=1), on_step=lambda trainer: rates.append(trainer.lr))
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("mean_weight", [0.0, 0.2])
def test_gradients_are_those_of_the_mixed_loss(mean_weight: float) -> None:
    """In every discrete step: the small networks' gradients against autograd of the loss written out."""
    x, y = data(16)  # one batch is the whole data set, so that every step sees the same examples up to their order
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    checked = 0

    def mean_of(networks: list[nn.Module]) -> Tensor:
        with torch.no_grad():
            return torch.stack([n(x).softmax(1) for n in networks]).mean(0)

    def watch(trainer: Trainer) -> None:
        nonlocal checked
        if not trainer.teachers:
            before[:] = [copy.deepcopy(n).eval() for n in trainer.particles.networks]
        if trainer.phase != "discrete":
            return
        for i, free in enumerate(after):
            output = free(x).log_softmax(1)
            loss = (0.5 - mean_weight) * F.nll_loss(output, y) - 0.5 * (mean_of(before) * output).sum(1).mean()
            loss = loss - mean_weight * (mean_of(after) * output).sum(1).mean()
            part = trainer.particles.sliced[i]
            found = [part.layout.segments[name].view(part.gradient) for name, _ in free.named_parameters()]
            for a, b in zip(found, torch.autograd.grad(loss, list(free.parameters())), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            checked += 1
        trainer.particles.begin_step()
        after[:] = [copy.deepcopy(part.network) for part in trainer.particles.sliced]

    dllp.prune(network(), (x, y), config(mean_weight=mean_weight, epochs=20), on_step=watch)
    assert checked >= 10


def test_without_a_teacher_nothing_is_kept() -> None:
    seen: list[int] = []
    settings = config(teacher_weight=0.0)
    dllp.prune(network(), data(), settings, on_step=lambda trainer: seen.append(len(trainer.teachers)))
    assert set(seen) == {0}


@pytest.mark.parametrize(
    "changes", [{"task": "regression"}, {"open_until": 0.0}, {"mean_weight": 0.6}, {"teacher_weight": -0.1}]
)
def test_settings_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(dllp.ConfigError, match="teacher_weight"):
        config(**changes)
