"""The properties a whole run must have: repeatable, on budget, fitted scales, particles that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dllp
from dllp.method import gates
from dllp.training import latents
from dllp.training.state import RunState
from tests.support.short_runs import convolutional, mlp, pictures, quick, table


def state(result: dllp.Result) -> list[Tensor]:
    networks = [net for particle in result.particles for net in (particle.network, particle.reference)]
    return [t for net in networks for t in net.state_dict().values()] + list(result.gates.values())


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_a_seed_fixes_the_run_bit_for_bit(granularity: str) -> None:
    network, data = convolutional(), pictures()
    config = quick(granularity=granularity, epochs=4, init="fresh")
    first, second = dllp.prune(network, data, config), dllp.prune(network, data, config)
    assert all(torch.equal(a, b) for a, b in zip(state(first), state(second), strict=True))
    timeless = [[{k: v for k, v in r.items() if k != "seconds"} for r in run.history] for run in (first, second)]
    assert timeless[0] == timeless[1]
    other = dllp.prune(network, data, replace(config, seed=1))
    assert not torch.equal(first.gates["logits"], other.gates["logits"])
    assert not torch.equal(first.reference.state_dict()["0.weight"], other.reference.state_dict()["0.weight"])


@pytest.mark.parametrize("blocks", ["module", "coordinate"])
def test_particles_that_begin_alike_are_not_thrown_apart(blocks: str) -> None:
    """A scalar has no spread to jitter: all particles begin at the same one, where the repulsion has no bound."""
    moved: list[float] = []

    def look(trainer: RunState) -> None:
        moved.extend(abs(net.get_parameter("1.weight").item() - 0.25) for net in trainer.particles.networks)

    network = nn.Sequential(nn.Linear(6, 12), nn.PReLU(), nn.Linear(12, 3))
    config = quick(epochs=4, lr=1e-3, momentum=0.9, keep_flops=0.9, blocks=blocks)
    losses = dllp.prune(network, table(), config, on_step=look).history[-1]["loss"]
    # one step of the flow goes sqrt(lr beta log 2 / (N (1 - momentum))) = 0.0027 far
    assert max(moved) < 0.03 and max(losses) < 3


@pytest.mark.parametrize("budget", ["keep_flops", "keep_params"])
@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_the_budget_is_met_and_the_ramp_followed(granularity: str, budget: str) -> None:
    target = 0.4
    goal: dict[str, Any] = {"keep_flops": None, budget: target}
    config = quick(
        granularity=granularity, gate_linear=True, epochs=30, discrete_at=0.8, ramp_until=0.6, batch_size=32,
        lr_gates=0.3, **goal,
    )  # fmt: skip
    gaps: list[float] = []

    def watch(trainer: RunState) -> None:
        if trainer.phase == "soft":
            gaps.append(float((trainer.latents.cost() - trainer.ramp).abs().max()))

    result = dllp.prune(mlp(200), table(), config, on_step=watch)
    for particle, size in zip(result.particles, result.sizes, strict=True):
        share = size.macs / result.dense.macs if budget == "keep_flops" else size.params / result.dense.params
        assert target - 0.005 <= share <= target
        linear = [m for m in particle.network.modules() if isinstance(m, nn.Linear)]
        assert size.macs == pytest.approx(sum(int((m.weight != 0).sum()) for m in linear), abs=0.5)
        assert size.params == sum(int((p != 0).sum()) for p in particle.network.parameters())
    assert max(gaps) < 0.25 and sum(gaps) / len(gaps) < 0.08 and max(gaps[-5:]) < 0.04


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_without_a_budget_sparsity_prunes(granularity: str) -> None:
    config = quick(granularity=granularity, keep_flops=None, sparsity=20.0, particles=1, epochs=12, lr_gates=0.5)
    result = dllp.prune(convolutional(), pictures(), config)
    assert 0 < result.sizes[0].macs < 0.5 * result.dense.macs
    assert all(kept >= (1 if granularity == "channel" else 0) for kept, _ in result.widths.values())
    assert any(kept < total for kept, total in result.widths.values())


def test_without_budget_and_sparsity_channels_stay_but_weights_go() -> None:
    """The prior alone decides: it leaves channels whole and prunes single weights (Section 5)."""
    config = quick(keep_flops=None, sparsity=0.0, particles=1, epochs=12, lr_gates=0.5)
    channels = dllp.prune(convolutional(), pictures(), config)
    assert channels.sizes[0] == channels.dense
    weights = dllp.prune(convolutional(), pictures(), replace(config, granularity="weight"))
    assert 0.1 * weights.dense.macs < weights.sizes[0].macs < 0.9 * weights.dense.macs


def test_slab_precisions_stay_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in front of a batch norm may shrink for nothing and pull lambda up without end: only bounds hold it."""
    network = convolutional()
    with torch.no_grad():
        for convolution in (m for m in network.modules() if isinstance(m, nn.Conv2d)):
            convolution.weight.mul_(1e-3)
    monkeypatch.setattr(latents, "LR_SCALES", 0.3)
    config = quick(
        granularity="weight", keep_flops=0.9, lr=1e-6, lr_end=0.0, epsilon=2e3, epochs=8, particles=1,
        discrete_at=1.0, ramp_until=0.9,
    )  # fmt: skip
    low, high = config.resolved().slab_bounds or (0, 0)
    bounded = dllp.prune(network, pictures(), config).gates["slab"]
    assert (bounded >= low * 0.999).all() and (bounded <= high * 1.001).all()
    unbounded = dllp.prune(network, pictures(), replace(config, slab_bounds=(1e-3, 1e3))).gates["slab"]
    assert unbounded.max() > 2 * high


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_slabs_fit_the_scales_in_an_ordinary_run(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "LR_SCALES", 0.1)
    config = quick(granularity=granularity, epochs=10)
    low, high = config.resolved().slab_bounds or (0, 0)
    slab = dllp.prune(convolutional(), pictures(), config).gates["slab"]
    assert (slab > 0.999 * low).all() and (slab < 0.9 * high).all()


@pytest.mark.parametrize("drawn", [True, False])
def test_the_budget_holds_the_network_up(monkeypatch: pytest.MonkeyPatch, drawn: bool) -> None:
    """A prior that would prune everything: the multiplier of drawn gates goes negative, others have a threshold."""
    monkeypatch.setattr(gates, "INITIAL_LOGIT", 1.0)
    monkeypatch.setitem(gates.DUAL_STEP, "weight", 0.1)
    monkeypatch.setitem(gates.GAP_PENALTY, "weight", 10.0)
    config = quick(
        granularity="weight", beta=4.0, epsilon=300.0, epochs=30, keep_flops=0.6, lr=0.005,
        lr_gates=0.1, discrete_at=0.8, ramp_until=0.4, draw_gates=drawn,
    )  # fmt: skip
    costs: list[float] = []

    def watch(trainer: RunState) -> None:
        if trainer.phase == "soft":
            costs.append(float(trainer.latents.cost().min()))

    held = dllp.prune(convolutional(), pictures(), config, on_step=watch)
    assert min(costs) > 0.4 and abs(costs[-1] - 0.6) < 0.15
    assert all(mu < 0 if drawn else mu >= 0 for mu in held.history[-1]["multiplier"])
    assert all(0.595 <= size.macs / held.dense.macs <= 0.6 for size in held.sizes)
    costs.clear()
    fallen = dllp.prune(convolutional(), pictures(), replace(config, keep_flops=None, sparsity=0.0), on_step=watch)
    assert costs[-1] < 0.2
    assert all(size.macs < 0.1 * fallen.dense.macs for size in fallen.sizes)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_regression_learns_a_linear_function(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "LR_SCALES", 0.05)
    x = torch.randn(256, 6)
    y = x @ torch.randn(6, 2) + 0.3 * torch.randn(256, 2)
    config = quick(task="regression", particles=n, init="fresh", epochs=40, keep_flops=0.6, lr=0.02, batch_size=64)
    result = dllp.prune(mlp(24, 2), (x, y), config)
    members = result.posterior.members(x)
    assert members.shape == (n, 256, 2)
    error = (members - y).square().mean((1, 2))
    assert (error < 0.2 * y.var()).all()
    # the noise of the likelihood is what is left of the data, within Adam's wandering
    assert (result.gates["noise"] / error - 1).abs().max() < 0.5
    spread = members.var(0, correction=0).mean()
    assert spread > 1e-4 if n > 1 else spread == 0


@pytest.mark.parametrize("init", ["given", "fresh"])
def test_particles_differ_in_the_end(init: str) -> None:
    data = table()
    result = dllp.prune(mlp(24), data, quick(particles=3, init=init))
    members = result.posterior.members(data[0])
    weights = torch.stack([particle.reference.get_parameter("0.weight") for particle in result.particles]).detach()
    for i in range(3):
        for j in range(i):
            assert (members[i] - members[j]).abs().max() > 1e-3
            assert (weights[i] - weights[j]).norm() > 0.02 * weights[i].norm()
