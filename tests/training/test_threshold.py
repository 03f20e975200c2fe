"""The budget of single weights as a threshold on their gates, and the prior that open and shut gates choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dllp
from dllp import zoo
from dllp.config import Config
from dllp.devices.mesh import Place
from dllp.prepare import make_gating
from dllp.structure.groups import discover
from dllp.training.latents import Latents
from dllp.training.particles import Particles
from dllp.training.state import RunState


def latents(**changes: Any) -> Latents:
    model = zoo.build("small_cnn", num_classes=3, in_channels=1, image_size=6)
    options: dict[str, Any] = dict(granularity="weight", keep_flops=0.3, particles=2, device="cpu")
    config = Config(**{**options, **changes}).resolved()
    particles = Particles.start(model, config, torch.device("cpu"))
    structure = discover(model, torch.randn(2, 1, 6, 6), channels=False)
    gating = make_gating(model, structure, particles, config, None)
    return Latents(gating, config, particles.rows, 100, Place(2))


@pytest.mark.parametrize("budget", ["keep_flops", "keep_params"])
@pytest.mark.parametrize("ramp", [0.9, 0.5, 0.3])
def test_open_gates_cost_what_the_ramp_allows(budget: str, ramp: float) -> None:
    """And the next best gate would be one too many."""
    found = latents(**{"keep_flops": None, budget: 0.3})
    found.logits.copy_(torch.randn(found.logits.shape, generator=torch.Generator().manual_seed(1)))
    found.set_threshold(torch.tensor(ramp))
    cost = getattr(found.gating, found.budget)
    for row, threshold in zip(found.logits, found.threshold, strict=True):
        ranked = row.argsort(descending=True)
        spent = (cost.dense - cost.price.sum() + cost.price[ranked].cumsum(0)) / cost.dense
        fitting = int((spent <= ramp).sum())
        assert abs(int((row > threshold).sum()) - fitting) <= 1 + 1e-3 * fitting, "as far as 24 bisections go"
        assert torch.equal((row > threshold).nonzero().flatten().sort().values,
                           ranked[: int((row > threshold).sum())].sort().values)  # fmt: skip


def test_gates_begin_unequal_and_all_open() -> None:
    found = latents()
    found.set_threshold(torch.tensor(1.0))
    assert bool((found.logits > found.threshold).all())
    assert len(found.logits.unique()) > 1000 and float((found.logits - 3).std()) < 2e-3


def test_only_gates_that_are_not_drawn_have_one_under_a_budget() -> None:
    assert latents().ranked and not latents(draw_gates=True).ranked
    assert not latents(keep_flops=None).ranked


def test_channels_have_one_where_they_are_not_drawn() -> None:
    """The same budget and the same decision as single weights: the cut changes no answer."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 1, 6, 6, generator=generator), torch.arange(64) % 3
    model = zoo.build("small_cnn", num_classes=3, in_channels=1, image_size=6)
    config = Config(keep_flops=0.4, epochs=8, batch_size=16, warmup=0, draw_gates=False, device="cpu")
    result = dllp.prune(model, (x, y), config, validation=(x, y))
    before, after, _ = result.info["moments"]
    assert before["nll"] == pytest.approx(after["nll"], rel=0.1)
    assert all(size.macs <= 0.4 * result.dense.macs for size in result.sizes)


def test_open_weights_are_under_the_slab_and_shut_ones_under_the_spike() -> None:
    """An open weight at zero is not drawn in: its size does not matter."""
    found = latents()
    rows = torch.zeros(2, int(found.gating.scales.coordinates.max()) + 2)  # type: ignore[union-attr]
    z = (torch.arange(found.logits.numel()).reshape(found.logits.shape) % 2).float()
    slab, spike = found.prior_pulls(found.gating.scales.of(rows), z, torch.tensor(0.5), soft=True)
    torch.testing.assert_close(slab, z * 20.0**2 / 100)
    torch.testing.assert_close(spike, (1 - z) * 300.0**2 / 100)


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_no_spike_while_gates_are_open(granularity: str) -> None:
    found = latents(granularity="weight", draw_gates=granularity == "channel")
    rows = torch.zeros(2, int(found.gating.scales.coordinates.max()) + 2)  # type: ignore[union-attr]
    sizes = found.gating.scales.of(rows)
    _, spike = found.prior_pulls(sizes, torch.ones_like(found.logits), torch.tensor(1.0), soft=False)
    assert not bool(spike.any())


def test_the_networks_run_with_what_the_budget_counts() -> None:
    """At every soft step the open gates cost at most what the ramp allows, and little less."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 1, 6, 6, generator=generator), torch.arange(64) % 3
    model = zoo.build("small_cnn", num_classes=3, in_channels=1, image_size=6)
    config = Config(granularity="weight", keep_flops=0.2, epochs=10, batch_size=16, warmup=0, device="cpu")
    over: list[float] = []

    def watch(state: RunState) -> None:
        if state.phase == "soft" and state.gating is not None:
            z = state.latents.relaxed(state.knobs[1], state.knobs[2])
            excess = state.gating.flops.expected(z) / state.gating.flops.dense - state.ramp
            over.append(float(excess.abs().max()) if bool((excess <= 1e-9).all()) else 1.0)

    result = dllp.prune(model, (x, y), config, on_step=watch)
    assert over and max(over) <= 2e-3
    assert all(0.195 <= size.macs / result.dense.macs <= 0.2 for size in result.sizes)
