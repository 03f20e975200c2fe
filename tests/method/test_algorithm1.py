"""Algorithm 1 against a slow, obvious reference: every step, whichever options meet."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.config import Config
from dllp.devices.device import cast_like_autocast
from dllp.method import algorithm1, schedule, spike_and_slab, stein, update
from dllp.method.update import adamw_rows, compiled, correct_rows, drive_rows, in_strips, update_rows
from dllp.prepare import make_gating
from dllp.training import latents
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.teacher import Teacher
from dllp.training.trainer import train
from tests.support.naive_training import Reference
from tests.support.particles import intact
from tests.support.tiny import (
    NUM_DATA,
    PHASES,
    SIDE,
    kept_coordinates,
    scales_of,
    tiny_batches,
    tiny_config,
    tiny_networks,
    tiny_structure,
)


@pytest.fixture(autouse=True)
def exact_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bisections as float64 has use for."""
    monkeypatch.setattr(latents, "THRESHOLD_STEPS", 70)


def compare(config: Config, n: int, steps: int, lane: int = 1, teacher: nn.Module | None = None) -> RunState:
    """Run state and reference side by side; after every step all that they know must agree."""
    networks, batches = tiny_networks(n), tiny_batches(steps)
    reference = Reference(copy.deepcopy(networks), config, teacher)
    particles = Particles(networks)
    gating = make_gating(networks[0], tiny_structure(), particles, config, None)
    master = Teacher(teacher, config, particles.device) if teacher is not None else None
    state = RunState(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=steps, teacher=master)
    state.forward.lane = lane
    reference.state.logits.data.copy_(state.latents.logits)  # those with a threshold begin with a little noise
    close = {"rtol": 1e-9, "atol": 1e-11}

    def check(state: RunState) -> None:
        done = state.step_index
        spec = reference.state
        if state.latents.keep is not None and spec.keep is None:
            reference.decide(state.latents.keep)
        lr = schedule.learning_rate(done / steps, peak=config.lr, end=config.lr_end, warmup=0)
        reference.step(*batches.batches[done - 1], progress=(done - 1) / steps, lr=lr)
        for network, theta in zip(particles.networks, spec.weights, strict=True):
            for name, parameter in network.named_parameters():
                torch.testing.assert_close(parameter.detach(), theta[name], **close, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(state.latents.log_d, spec.log_d.detach(), **close)
        torch.testing.assert_close(state.latents.multiplier, spec.multiplier, **close)
        if state.latents.keep is None:
            if state.phase == "soft" and spec.logits.grad is not None:
                torch.testing.assert_close(state.latents.logits.grad, spec.logits.grad, **close)
            torch.testing.assert_close(state.latents.logits, spec.logits.detach(), **close)
            torch.testing.assert_close(state.latents.log_slab, spec.log_slab.detach(), **close)

    train(state, batches, on_step=check)
    assert state.step_index == steps
    return state


def test_slab_and_spike_by_responsibility_add_up_to_equation_10() -> None:
    """The explicit and the implicit part of the specification are together the prior's gradient."""
    scale, logit = (torch.randn(40, dtype=torch.float64) for _ in range(2))
    scale, slab = (0.2 * scale).requires_grad_(), torch.rand(40, dtype=torch.float64) + 4
    parts = algorithm1._responsible(scale, logit.sigmoid(), slab, 11.0)
    (whole,) = torch.autograd.grad(algorithm1.log_prior(scale, logit.sigmoid(), slab, 11.0).sum(), scale)
    found = [torch.autograd.grad(part.sum(), scale)[0] for part in parts]
    torch.testing.assert_close(sum(found), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole, spike_and_slab.score(scale.detach(), logit, slab, 11.0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_the_log_prior_of_a_run_is_the_sum_of_equation_10_over_its_units(granularity: str) -> None:
    config = tiny_config(particles=2, granularity=granularity)
    particles = Particles(tiny_networks(2))
    gating = make_gating(particles.networks[0], tiny_structure(), particles, config, None)
    state = RunState(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=1)
    state.latents.logits.normal_()
    state.latents.log_slab.uniform_(1.6, 1.65)
    found = state.latents.log_prior(particles.rows)
    for i, network in enumerate(particles.networks):
        scale = scales_of(dict(network.named_parameters()), granularity)
        slab = state.latents.log_slab[i].exp().repeat_interleave(torch.tensor(gating.scales.lengths))
        expected = algorithm1.log_prior(scale, state.latents.logits[i].sigmoid(), slab, 10.0).sum()
        torch.testing.assert_close(found[i], expected.detach(), rtol=1e-9, atol=1e-9)


# every pair of options meets in some row
CASES = [
    (1, "categorical", "channel", "open", "median", "module"),
    (1, "gaussian", "channel", "soft", "median", "all"),
    (1, "categorical", "weight", "soft", "paper", "module"),
    (1, "gaussian", "weight", "open", "median", "coordinate"),
    (2, "categorical", "channel", "soft", "median", "module"),
    (2, "categorical", "channel", "soft", "paper", "all"),
    (2, "categorical", "channel", "open", "paper", "coordinate"),
    (2, "gaussian", "channel", "soft", "median", "module"),
    (2, "gaussian", "channel", "open", "median", "all"),
    (2, "categorical", "weight", "soft", "median", "all"),
    (2, "categorical", "weight", "open", "median", "module"),
    (2, "gaussian", "weight", "soft", "paper", "module"),
    (2, "gaussian", "weight", "soft", "median", "coordinate"),
    (3, "categorical", "channel", "soft", "median", "coordinate"),
    (3, "gaussian", "channel", "soft", "median", "module"),
    (3, "gaussian", "channel", "open", "paper", "module"),
    (3, "categorical", "weight", "soft", "median", "module"),
    (3, "gaussian", "weight", "open", "median", "all"),
]


@pytest.mark.parametrize(("n", "likelihood", "granularity", "phase", "bandwidth", "blocks"), CASES)
def test_steps_equal_the_naive_reference(
    n: int, likelihood: str, granularity: str, phase: str, bandwidth: str, blocks: str
) -> None:
    config = tiny_config(
        particles=n, likelihood=likelihood, granularity=granularity, bandwidth=bandwidth, blocks=blocks,
        **PHASES[phase],
    )  # fmt: skip
    compare(config, n, steps=3)


@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize("drawn", [True, False])
def test_relaxed_gates_are_drawn_or_their_medians(granularity: str, drawn: bool) -> None:
    compare(tiny_config(granularity=granularity, draw_gates=drawn, particles=2, **PHASES["soft"]), 2, steps=3)


def test_sparsity_replaces_the_budget_where_there_is_none() -> None:
    compare(tiny_config(keep_flops=None, sparsity=2.0, particles=2, **PHASES["soft"]), 2, steps=3)


@pytest.mark.parametrize(
    ("n", "likelihood", "granularity", "blocks"),
    [
        (1, "categorical", "channel", "module"),
        (2, "categorical", "channel", "module"),
        (2, "gaussian", "channel", "all"),
        (2, "gaussian", "weight", "module"),
        (3, "categorical", "weight", "coordinate"),
    ],
)
def test_steps_of_adamw_equal_the_naive_reference(n: int, likelihood: str, granularity: str, blocks: str) -> None:
    """In every phase: preconditioned gradient, decoupled decay, and the spike's step by the same preconditioner."""
    config = tiny_config(
        particles=n, likelihood=likelihood, granularity=granularity, blocks=blocks, optimizer="adamw", lr=0.02,
        lr_end=0.004, **PHASES["all"],
    )  # fmt: skip
    compare(config, n, steps=10)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_particles_that_learn_from_their_mean(likelihood: str) -> None:
    taught: dict[str, Any] = {"teacher": "posterior", "teacher_weight": 0.4, "teacher_temperature": 1.5}
    compare(tiny_config(likelihood=likelihood, particles=2, **taught, **PHASES["soft"]), 2, steps=3)


@pytest.mark.parametrize("begin", [0.0, 0.5])
@pytest.mark.parametrize(("likelihood", "granularity"), [("categorical", "channel"), ("gaussian", "weight")])
def test_particles_that_learn_from_a_given_network(likelihood: str, granularity: str, begin: float) -> None:
    """In every phase, from the first step or from a later one on."""
    taught: dict[str, Any] = {"teacher": "given", "teacher_weight": 0.7, "teacher_from": begin}
    config = tiny_config(likelihood=likelihood, granularity=granularity, particles=2, **taught, **PHASES["all"])
    compare(config, 2, steps=10, teacher=tiny_networks(3)[2])


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_sliced_training_equals_masked_training(likelihood: str, granularity: str) -> None:
    """Five steps before the gates are decided, five after: the small networks follow the gated full ones."""
    config = tiny_config(particles=2, likelihood=likelihood, granularity=granularity, **PHASES["all"])
    state = compare(config, 2, steps=10)
    assert bool(state.particles.sliced) == (granularity == "channel")
    assert state.latents.keep is not None and not state.latents.keep.all() and state.latents.keep.any(1).all()
    for part, network in zip(state.particles.sliced, state.particles.networks, strict=False):
        x = torch.randn(3, 2, SIDE, SIDE, dtype=torch.float64)
        z = state.latents.keep[state.particles.networks.index(network)].double()
        gated = state.gating.fold(dict(network.named_parameters()), z)  # type: ignore[union-attr]
        expected = torch.func.functional_call(copy.deepcopy(network).eval(), gated, (x,))
        torch.testing.assert_close(copy.deepcopy(part.network).eval()(x), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("lane", [2, 3, 8])
def test_widths_padded_for_the_device_change_nothing(likelihood: str, lane: int) -> None:
    """What only pads a sliced network stays closed and stands still."""
    state = compare(tiny_config(particles=2, likelihood=likelihood, **PHASES["all"]), 2, steps=10, lane=lane)
    assert state.latents.keep is not None
    for part, keep in zip(state.particles.sliced, state.latents.keep, strict=True):
        width = part.network.get_submodule("left").out_channels
        assert width in (4, -(-int(keep[:4].sum()) // lane) * lane)


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_what_is_removed_stands_still_and_padding_stays_zero(granularity: str) -> None:
    networks, batches = tiny_networks(2), tiny_batches(10)
    config = tiny_config(particles=2, granularity=granularity, **PHASES["all"])
    particles = Particles(networks)
    gating = make_gating(networks[0], tiny_structure(), particles, config, None)
    state = RunState(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=10)
    padding = torch.ones(particles.layout.size, dtype=torch.bool)
    for segment in particles.layout.segments.values():
        segment.view(padding).fill_(False)
    rows: list[Tensor] = []

    def check(state: RunState) -> None:
        assert particles.rows[:, padding].eq(0).all() and state.momentum[:, padding].eq(0).all()
        assert intact(particles)
        if state.latents.keep is not None:
            rows.append(particles.rows.clone())

    train(state, batches, on_step=check)
    assert state.latents.keep is not None
    for i, network in enumerate(networks):
        p = {k: v.detach() for k, v in network.named_parameters()}
        for name, mask in kept_coordinates(p, state.latents.keep[i], granularity).items():
            first, last = (particles.layout.segments[name].view(row[i]) for row in (rows[0], rows[-1]))
            assert torch.equal(first[mask == 0], last[mask == 0])
            assert (first[mask == 1] != last[mask == 1]).all()


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_gates_and_slabs_rest_once_they_are_decided(granularity: str) -> None:
    networks = tiny_networks(2)
    config = tiny_config(particles=2, granularity=granularity, **PHASES["all"])
    particles = Particles(networks)
    gating = make_gating(networks[0], tiny_structure(), particles, config, None)
    state = RunState(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=10)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(state: RunState) -> None:
        seen.append((state.latents.logits.clone(), state.latents.log_slab.clone(), state.latents.log_d.clone()))

    train(state, tiny_batches(10), on_step=note)
    logits, slab, noise = zip(*seen, strict=True)
    assert torch.equal(logits[4], logits[9]) and torch.equal(slab[4], slab[9])
    assert not torch.equal(noise[4], noise[9])


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_frozen_parameters_stay(granularity: str) -> None:
    network = tiny_networks(1)[0]
    frozen = "norm_left" if granularity == "channel" else "left"
    network.get_submodule(frozen).weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    before = network.get_submodule(frozen).weight.clone()  # type: ignore[operator, union-attr]
    config = tiny_config(particles=1, granularity=granularity, **PHASES["all"])
    particles = Particles([network])
    gating = make_gating(network, tiny_structure(), particles, config, None)
    train(RunState(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=6), tiny_batches(6))
    assert torch.equal(network.get_submodule(frozen).weight, before)  # type: ignore[arg-type]


def test_update_without_stein_is_nesterov_sgd() -> None:
    """beta = 0: one call on the matrix is torch's own optimiser on each row."""
    rows, decayed, lr = torch.randn(2, 40, dtype=torch.float64), torch.arange(40) % 3 > 0, 0.3
    momentum, moving = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    free = rows.clone().requires_grad_()
    optimiser = torch.optim.SGD([free], lr=lr, momentum=0.8, nesterov=True)
    for _ in range(4):
        gradient = torch.randn_like(rows)
        free.grad = gradient + 0.7 * (decayed * free.detach())
        optimiser.step()
        rate, healthy = torch.tensor(lr, dtype=torch.float64), torch.tensor(True)
        update_rows(
            rows, gradient, momentum, None, (), None, decayed, moving, rate, healthy, 0.7, 0.0, inertia=0.8
        )  # fmt: skip
    torch.testing.assert_close(rows, free.detach(), rtol=1e-12, atol=1e-12)


def test_the_update_is_compiled_for_every_network_of_a_long_process(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for size in range(20, 32):  # more shapes than PyTorch compiles one function for
        found, expected = torch.ones(2, 1, size), torch.ones(2, 1, size)
        every, rest = torch.ones(1, size, dtype=torch.bool), (torch.tensor(0.3), torch.tensor(True), 0.1, 0.0, 0.8)
        for moved, (rows, momentum) in ((compiled(update_rows), found), (update_rows, expected)):
            moved(rows, torch.ones(1, size), momentum, None, (), None, every[0], every, *rest)
        assert torch.equal(found, expected)
    assert len(graphs) == 12


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("blocks", [(48, 96, 48), (192,), "coordinate"])
def test_strips_of_columns_are_the_whole(blocks: Any, healthy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with matrices, vectors and weights of blocks; and nothing moves where a number broke."""
    monkeypatch.setattr(update, "STRIP", 100)
    rows, gradients, first, second = torch.randn(4, 2, 192, generator=torch.Generator().manual_seed(0))
    known = stein.block_index(blocks) if blocks != "coordinate" else blocks
    weights = stein.pair_weights(rows, num_data=10, blocks=known)
    index = known.index if isinstance(known, stein.BlockIndex) else None
    decayed, moving, sound = torch.arange(192) % 3 > 0, torch.rand(2, 192) > 0.1, torch.tensor(healthy)
    found = []
    for made in (in_strips, lambda function: function):
        drive, values, a, b = torch.empty_like(rows), rows.clone(), first.clone(), second.abs()
        made(drive_rows)(drive, values, gradients, None, weights, index, moving, 0.3)
        made(adamw_rows)(values, drive, a, b, decayed, moving, 0.01, (0.1, 0.03), sound, 0.1, 0.9)
        made(update_rows)(values, gradients, a, None, weights, index, decayed, moving, 0.1, sound, 0.1, 0.3, 0.9)
        found.append(torch.stack([drive, values, a, b]))
    assert torch.equal(*found) and torch.equal(found[0][1], rows) is not healthy


@pytest.mark.parametrize("healthy", [True, False])
def test_a_corrected_step_is_one_without_the_excess(healthy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, gradient, momentum = torch.randn(3, 2, 12, dtype=torch.float64, generator=generator)
    at, excess = torch.tensor([[3, 7], [0, 9]]), torch.randn(2, 2, 2, dtype=torch.float64, generator=generator)
    every, sound = torch.ones_like(rows, dtype=torch.bool), torch.tensor(healthy)
    rate, rest = torch.tensor(0.3, dtype=torch.float64), ((), None, every[0], every)

    def moved(gradient: Tensor) -> tuple[Tensor, Tensor]:
        found = rows.clone(), momentum.clone()
        update_rows(found[0], gradient, found[1], None, *rest, rate, sound, 0.1, 0.0, inertia=0.8)
        return found

    more = gradient.clone()
    more[:, at] += excess
    corrected = moved(more)
    correct_rows(corrected[0], corrected[1], at, excess, rate, sound, inertia=0.8)
    for value, expected in zip(corrected, moved(gradient), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_weights_are_rounded_as_autocast_would() -> None:
    class Doubled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, 2 * self.weight)

    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), Doubled(3, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    weights = {name: 1.1 * p.detach() for name, p in network.named_parameters() if name.endswith("weight")}
    early = cast_like_autocast(network, weights, torch.bfloat16)
    assert {n: v.dtype for n, v in early.items()} == {
        "0.weight": torch.bfloat16, "2.weight": torch.float32, "4.weight": torch.bfloat16,
    }  # fmt: skip
    x = torch.randn(6, 2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        outputs = [torch.func.functional_call(network, values, (x,)) for values in (weights, early)]
    assert torch.equal(*outputs)


def test_the_dense_reference_is_plain_training() -> None:
    """Without gates: no prior, no Stein term; two particles are two networks trained by SGD."""
    networks, batches = tiny_networks(2), tiny_batches(4)
    config = tiny_config(particles=2, weight_decay=0.1)
    free = copy.deepcopy(networks)
    optimisers = [torch.optim.SGD(f.parameters(), 1.0, 0.9, nesterov=True, weight_decay=0.1) for f in free]
    for k, (x, y) in enumerate(batches.batches):
        for network, optimiser in zip(free, optimisers, strict=True):
            rate = schedule.learning_rate((k + 1) / 4, peak=config.lr, end=config.lr_end, warmup=0)
            optimiser.param_groups[0]["lr"] = rate
            optimiser.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimiser.step()
    train(RunState(Particles(networks), None, config, num_data=NUM_DATA, steps_per_epoch=4), batches)
    for network, other in zip(networks, free, strict=True):
        for name, value in network.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-10, atol=1e-12)
