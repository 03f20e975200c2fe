"""Parts of a batch one after the other: without batch norm the same run as with whole batches, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dllp
from dllp.api import make_gating
from dllp.config import Config
from dllp.errors import ConfigError
from dllp.structure.groups import discover
from dllp.training.particles import Particles
from dllp.training.snapshot import Snapshot, snapshot
from dllp.training.state import RunState
from dllp.training.step import backward, gates, prepare
from dllp.training.trainer import train
from paper.jobs import Job
from tests.support import many


class Measured(many.Fixed):
    """Targets of a regression."""

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for x, _ in super().epoch(epoch, start_step):
            yield x, x.mean((2, 3)) @ torch.linspace(-1, 1, 6, dtype=x.dtype).view(2, 3)


def build(norms: bool = False, batch: int = many.BATCH, **changes: Any) -> tuple[RunState, many.Fixed]:
    """Twenty steps through all phases, before the first one."""
    config = Config(**(many.BASE | changes)).resolved()
    torch.manual_seed(1)
    model, data = many.network(norms), (Measured if config.task == "regression" else many.Fixed)(batch)
    if config.noise == "input":  # the last output is log d(x)
        data.y = data.y % 2
    structure = discover(copy.deepcopy(model).float(), data.x[0][:2].float())
    particles = Particles.start(model, config, torch.device("cpu"))
    torch.set_default_dtype(torch.float64)
    gating = make_gating(model, structure, particles, config, None)
    torch.set_default_dtype(torch.float32)
    return RunState(particles, gating, config, num_data=40, steps_per_epoch=data.steps), data


def ended(**options: Any) -> Snapshot:
    state, data = build(**options)
    train(state, data)
    assert [record.phase for record in state.history] == ["soft", "discrete"]
    return snapshot(state)


CASES: dict[str, dict[str, Any]] = {
    "gaussian": {"likelihood": "gaussian"},
    "weight": {"granularity": "weight", "keep_flops": None, "keep_params": 0.5, "likelihood": "gaussian"},
    "mean": {"teacher": "posterior"},
    "noise": {"noise": "input", "likelihood": "gaussian"},
    "regression": {"task": "regression", "particles": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_without_batch_norm_parts_are_the_whole_batch(case: str) -> None:
    """Parts of 3, 3, 2, 2 and 2 examples, gates open, soft and discrete."""
    (whole, values), (found, others) = (ended(**CASES[case], accumulate=k) for k in (1, 5))
    assert found.keys() == whole.keys()
    for name in whole:
        torch.testing.assert_close(
            found[name], whole[name], rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )
    for record, other in zip(values["history"], others["history"], strict=True):
        assert record["gates"] == other["gates"]
        assert record["loss"] == pytest.approx(other["loss"], abs=1e-10)
        assert record["accuracy"] == pytest.approx(other["accuracy"], abs=1e-10)


def test_one_gradient_is_the_mean_of_all_examples() -> None:
    """Against autograd on a copy, in parts of 3, 2, 2, 2 and 2 examples."""
    state, data = build(batch=11, accumulate=5)
    x, y = next(data.epoch(0))
    networks = copy.deepcopy(state.particles.networks)
    prepare(state, x, y)
    backward(state, x, y, gates(state))
    for row, network in zip(state.particles.gradients, networks, strict=True):
        wanted = torch.autograd.grad(F.cross_entropy(network(x), y), list(network.parameters()))
        for segment, gradient in zip(state.particles.layout.segments.values(), wanted, strict=True):
            torch.testing.assert_close(segment.view(row), gradient, rtol=0, atol=1e-12)


def test_batch_norm_sees_one_part_at_a_time() -> None:
    state, data = build(norms=True, accumulate=4)
    x, y = next(data.epoch(0))
    network = copy.deepcopy(state.particles.networks[0])
    prepare(state, x, y)
    backward(state, x, y, gates(state))
    loss = sum(F.cross_entropy(network(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)) / 4
    assert isinstance(loss, torch.Tensor)
    wanted = torch.autograd.grad(loss, list(network.parameters()))
    for segment, gradient in zip(state.particles.layout.segments.values(), wanted, strict=True):
        torch.testing.assert_close(segment.view(state.particles.gradients[0]), gradient, rtol=0, atol=1e-12)
    for (name, a), b in zip(state.particles.networks[0].named_buffers(), network.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)
    assert isinstance(network[1], nn.BatchNorm2d) and int(network[1].num_batches_tracked) == 4  # type: ignore[index]


def test_fewer_examples_than_parts() -> None:
    """The last batch of a loader may be small: each example is then a part of its own."""
    state, data = build(accumulate=8)
    x, y = next(data.epoch(0))
    network = copy.deepcopy(state.particles.networks[0])
    prepare(state, x, y)
    backward(state, x[:2], y[:2], gates(state))
    wanted = torch.autograd.grad(F.cross_entropy(network(x[:2]), y[:2]), list(network.parameters()))
    first = next(iter(state.particles.layout.segments.values()))
    torch.testing.assert_close(first.view(state.particles.gradients[0]), wanted[0], rtol=0, atol=1e-12)


def test_a_dense_run_accumulates_too() -> None:
    x, y = torch.randn(24, 4), torch.arange(24) % 3
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    options: dict[str, Any] = dict(device="cpu", epochs=2, batch_size=12, warmup=0, particles=1)
    whole, parts = (dllp.train_dense(model, (x, y), Config(accumulate=k, **options)) for k in (1, 3))
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_too_many_parts_are_refused_and_digests_stay() -> None:
    with pytest.raises(ConfigError, match=r"accumulate \(9\) must not exceed batch_size \(8\)"):
        Config(batch_size=8, accumulate=9)
    with pytest.raises(ConfigError, match="accumulate = 0: at least 1"):
        Config(accumulate=0)
    job = Job("resnet20", "dense")
    digests = [Job("resnet20", "dense", changes=c).digest for c in ({"recompute": True}, {"accumulate": 2})]
    assert digests[0] == job.digest != digests[1], "recomputing changes no number, batch norm of parts does"
