"""The loop: callbacks, patience, broken numbers, and what is decided at its end."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import dllp
from dllp.method.algorithm1 import median_bandwidth
from dllp.records import EpochRecord
from dllp.training import trainer as train
from dllp.training.state import RunState
from tests.support.oracles import naive_stein_kernel
from tests.support.short_runs import mlp, quick, table


def test_callbacks_are_called_once_for_each_epoch_and_step() -> None:
    epochs: list[EpochRecord] = []
    steps: list[int] = []
    result = dllp.prune(
        mlp(8), table(40), quick(epochs=5), on_epoch=epochs.append, on_step=lambda t: steps.append(t.step_index)
    )
    assert [record.epoch for record in epochs] == [1, 2, 3, 4, 5]
    assert steps == list(range(1, 11))  # two full batches of 16 in 40 examples
    assert [record.as_dict() for record in epochs] == result.history
    assert [record.phase for record in epochs][-1] == "discrete" and epochs[0].phase in ("open", "soft")
    assert all(len(v) == 2 for r in epochs for v in (r.loss, r.cost, r.multiplier, r.noise, r.undecided))
    assert all(0 <= a <= 1 for r in epochs for a in r.accuracy or [])
    assert all(r.seconds > 0 and r.engine == "eager" for r in epochs)


def test_each_epoch_has_the_discrepancy_of_its_particles() -> None:
    """Nothing moves, one batch has all data: scores are gradients of the extracted networks, 0 where a weight went."""
    data = table(20)
    frozen = dict(epochs=4, batch_size=20, lr=1e-30, lr_end=0.0, init="fresh", particles=3, granularity="weight")
    result = dllp.prune(mlp(4), data, quick(**frozen, gate_linear=True, blocks="all"))
    assert result.history[-1]["phase"] == "discrete"
    rows, scores = [], []
    for particle in result.particles:
        weights = dict(particle.network.named_parameters())
        loss = torch.nn.functional.cross_entropy(particle.network(data[0]), data[1])
        gradients = torch.autograd.grad(loss, list(weights.values()))
        holes = [name in particle.gated and weight == 0 for name, weight in weights.items()]
        scores.append(torch.cat([-(g * ~torch.as_tensor(h)).flatten() for g, h in zip(gradients, holes, strict=True)]))
        rows.append(torch.cat([weight.detach().flatten() for weight in particle.reference.parameters()]))
    x, s = torch.stack(rows).double(), 20 * torch.stack(scores).double()
    h = median_bandwidth(x, least=0.0)
    mean = sum(naive_stein_kernel(x[i], x[j], s[i], s[j], h) for i in range(3) for j in range(3)) / 9
    assert result.history[-1]["discrepancy"] == pytest.approx(float(mean) ** 0.5 / 20, rel=1e-4)


def test_particles_that_do_not_interact_have_no_discrepancy() -> None:
    alone = dllp.prune(mlp(8), table(), quick(epochs=3, particles=1))
    dense = dllp.train_dense(mlp(8), table(), quick(epochs=2, keep_flops=None))
    assert {record["discrepancy"] for record in alone.history + dense.history} == {None}


def test_long_runs_count_gates_in_some_epochs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "COUNTED", 3)
    history = dllp.prune(mlp(8), table(), quick(epochs=12)).history
    assert [bool(record["gates"]) for record in history] == [False, False, False, True] * 3


def test_patience_stops_a_run_that_no_longer_improves() -> None:
    config = quick(epochs=40, lr=1e-9, lr_end=0.0, discrete_at=0.1, ramp_until=0.1, patience=2)
    stopped = dllp.prune(mlp(8), table(), config)
    assert 4 < len(stopped.history) < 40
    assert stopped.history[-1]["phase"] == "discrete"
    assert len(dllp.prune(mlp(8), table(), replace(config, epochs=8, patience=0)).history) == 8


def test_patience_counts_epochs_that_are_discrete_from_their_first_step_on() -> None:
    """The third of four is half soft: its low loss is no measure for what comes after the cut."""
    found: list[RunState] = []
    best: list[float] = []
    config = quick(epochs=4, lr=1e-9, lr_end=0.0, ramp_until=0.5, discrete_at=0.6, patience=1)
    result = dllp.prune(
        mlp(8), table(40), config, on_start=found.append, on_epoch=lambda record: best.append(found[0].best)
    )
    assert [record["phase"] for record in result.history][-2:] == ["discrete", "discrete"]
    assert best == [math.inf] * 3 + [sum(result.history[-1]["loss"])] and found[0].waited == 0


@pytest.mark.parametrize(("warmup", "highest"), [(1.0, 2), (2.0, 4), (4.0, 4), (50.0, 4)])
def test_warm_up_takes_half_of_a_run_at_most(warmup: float, highest: int) -> None:
    """Of four epochs of two steps: longer than two epochs it would leave no time at the learning rate asked for."""
    rates: list[float] = []
    config = quick(epochs=4, warmup=warmup, lr=0.1)
    dllp.train_dense(mlp(8), table(40), config, on_step=lambda state: rates.append(state.lr))
    assert len(rates) == 8 and rates[highest - 1] == max(rates) == pytest.approx(0.1)
    assert rates[:highest] == pytest.approx([0.1 * (k + 1) / highest for k in range(highest)])


def test_an_epoch_has_the_phase_of_its_last_step() -> None:
    config = quick(epochs=6, open_until=0.5, ramp_until=0.6, discrete_at=0.7)
    phases = [record["phase"] for record in dllp.prune(mlp(8), table(40), config).history]
    assert phases == ["open", "open", "open", "soft", "discrete", "discrete"]


def test_patience_waits_for_the_loss_after_the_cut() -> None:
    """The loss jumps when most of the network is cut; while it falls again from there the run goes on."""
    network, data = mlp(32), table()
    dense = dllp.train_dense(network, data, quick(epochs=30, lr=0.1, particles=1))
    config = quick(
        epochs=20, lr=0.002, particles=1, keep_flops=0.05, open_until=0.0, ramp_until=0.1, discrete_at=0.1, patience=2,
        lr_gates=1e-3,
    )  # fmt: skip
    losses = [record["loss"][0] for record in dllp.prune(dense.model, data, config).history]
    falls = [b < a for a, b in pairwise(losses[2:])]
    assert losses[2] > losses[0] and (len(losses) == 20 or not all(falls))


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(dllp.DllpError, match=r"NaN or infinity in the .* of particle \d.* at step \d+ \(epoch 1\)"):
        dllp.prune(mlp(8), table(), quick(lr=1e30, epochs=2))


def test_padded_widths_are_gone_from_the_result() -> None:
    """As on a GPU, where sliced networks are trained in multiples of 8 channels: the same networks come out."""
    network, data, config = mlp(64), table(), quick(epochs=6)

    def pad(state: RunState) -> None:
        state.forward.lane = 8

    plain, padded = dllp.prune(network, data, config), dllp.prune(network, data, config, on_step=pad)
    assert plain.widths == padded.widths and plain.sizes == padded.sizes
    for a, b in zip(plain.particles, padded.particles, strict=True):
        assert a.recipe == b.recipe
        for name, value in a.network.state_dict().items():
            torch.testing.assert_close(b.network.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_gates_left_soft_are_decided_at_the_end() -> None:
    result = dllp.prune(mlp(64), table(), quick(epochs=6, discrete_at=1.0))
    assert result.history[-1]["phase"] == "soft"
    assert all(size.macs <= 0.5 * result.dense.macs for size in result.sizes)
