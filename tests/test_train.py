"""Algorithm 1 against a slow, obvious reference, and the properties a whole run must have."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import naive_direction
from torch import Tensor, nn
from torch.distributions import Normal

import dllp
from dllp import priors, schedule
from dllp.config import Config
from dllp.particles import Particles
from dllp.prepare import make_gating
from dllp.structure import Structure, discover
from dllp.train import EpochRecord, Trainer
from dllp.update import update_rows

SIDE = 4
NUM_DATA = 7
"""So few examples that the prior is as strong as the data."""


# ---- a network with every kind of scale, and its forward as a pure function


class Tiny(nn.Module):
    """Two coupled convolutions with norms (units 0-3), one without (units 4-8), a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.norm_left = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.right, self.norm_right = nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.mid = nn.Conv2d(4, 5, 3, padding=1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_left(self.left(x)) + self.norm_right(self.right(x)))
        return self.head(torch.sigmoid(self.mid(x)).mean((2, 3)))


CONVOLUTIONS = ("left.weight", "right.weight", "mid.weight")
SCALES = {"channel": ("norm_left.weight", "norm_right.weight", "mid.weight"), "weight": CONVOLUTIONS}
"""Parameters that the prior acts on."""


def explicit(p: dict[str, Tensor], x: Tensor, z: Tensor, granularity: str) -> Tensor:
    """Tiny's forward with gated activations (channel) or gated weights (weight); it knows nothing of folding."""
    if granularity == "weight":
        parts = z.split([p[name].numel() for name in CONVOLUTIONS])
        p = p | {name: p[name] * part.view(p[name].shape) for name, part in zip(CONVOLUTIONS, parts, strict=True)}
        z = z.new_ones(9)

    def normed(h: Tensor, name: str) -> Tensor:
        return F.batch_norm(h, None, None, p[f"{name}.weight"], p[f"{name}.bias"], training=True)

    left = normed(F.conv2d(x, p["left.weight"], padding=1), "norm_left")
    h = F.relu(left + normed(F.conv2d(x, p["right.weight"]), "norm_right")) * z[:4].view(1, 4, 1, 1)
    h = torch.sigmoid(F.conv2d(h, p["mid.weight"], p["mid.bias"], padding=1)).mean((2, 3)) * z[4:]
    return F.linear(h, p["head.weight"], p["head.bias"])


def scales_of(p: dict[str, Tensor], granularity: str) -> Tensor:
    """(U,): what the prior sees; RMS of the coupled norms, RMS of a filter, or the weight itself."""
    if granularity == "weight":
        return torch.cat([p[name].flatten() for name in CONVOLUTIONS])
    norms = ((p["norm_left.weight"] ** 2 + p["norm_right.weight"] ** 2) / 2).sqrt()
    return torch.cat([norms, p["mid.weight"].square().mean((1, 2, 3)).sqrt()])


def expected_flops(theta: Tensor, granularity: str) -> Tensor:
    """(U,) -> (): share of the multiply-accumulates, counted by hand."""
    area = SIDE * SIDE
    if granularity == "weight":
        return (theta.sum() * area + 15) / (260 * area + 15)
    first, second = theta[:4].sum(), theta[4:].sum()
    dense = area * (20 * 4 + 9 * 4 * 5) + 15
    return (area * (20 * first + 9 * first * second) + 3 * second) / dense


def kept_coordinates(p: dict[str, Tensor], keep: Tensor, granularity: str) -> dict[str, Tensor]:
    """Which coordinates belong to the slab, written down layer by layer."""
    masks = {name: torch.ones_like(value) for name, value in p.items()}
    if granularity == "weight":
        for name, part in zip(CONVOLUTIONS, keep.split([p[name].numel() for name in CONVOLUTIONS]), strict=True):
            masks[name] = part.view(p[name].shape).to(p[name].dtype)
        return masks
    first, second = keep[:4].double(), keep[4:].double()
    for side in ("left", "right"):
        masks[f"{side}.weight"] *= first.view(4, 1, 1, 1)
        masks[f"norm_{side}.weight"] *= first
        masks[f"norm_{side}.bias"] *= first
    masks["mid.weight"] *= second.view(5, 1, 1, 1) * first.view(1, 4, 1, 1)
    masks["mid.bias"] *= second
    masks["head.weight"] *= second
    return masks


# ---- the reference: loops and autograd


class Reference:
    """Algorithm 1 without matrices: a dict of tensors for each particle, autograd wherever there is a gradient."""

    def __init__(self, networks: list[nn.Module], config: Config) -> None:
        self.config, self.n = config, len(networks)
        self.p = [{k: v.detach().clone() for k, v in network.named_parameters()} for network in networks]
        self.velocity = [{k: torch.zeros_like(v) for k, v in p.items()} for p in self.p]
        self.lengths = [4, 5] if config.granularity == "channel" else [self.p[0][k].numel() for k in CONVOLUTIONS]
        shape = (self.n, sum(self.lengths))
        self.logits = torch.full(shape, config.gate_logit, dtype=torch.float64, requires_grad=True)
        log_slab = torch.full((self.n, len(self.lengths)), math.log(config.slab), dtype=torch.float64)
        self.log_slab = log_slab.requires_grad_()
        self.log_d = torch.zeros(self.n, dtype=torch.float64, requires_grad=True)
        self.multiplier = torch.zeros(self.n, dtype=torch.float64)
        gated = shape[1] if config.prior_strength == "tempered" else 1
        self.strength = 1 / max(NUM_DATA, gated)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.adam = torch.optim.Adam(
            [
                {"params": [self.logits], "lr": config.lr_gates},
                {"params": [self.log_slab, self.log_d], "lr": config.lr_scales},
            ]
        )
        self.masks: list[dict[str, Tensor]] | None = None
        self.keep: Tensor | None = None

    def discretise(self, keep: Tensor) -> None:
        """The given gates are final: the spike's weights and their velocity stop."""
        self.keep = keep
        self.masks = [kept_coordinates(p, row, self.config.granularity) for p, row in zip(self.p, keep, strict=True)]
        self.velocity = [
            {k: v[k] * mask[k] for k in v} for v, mask in zip(self.velocity, self.masks, strict=True)
        ]  # fmt: skip

    def gates(self, phase: str, tau: float) -> list[Tensor]:
        if phase == "soft":
            u = torch.rand(self.logits.shape, generator=self.generator, dtype=torch.float64)
            return list(torch.sigmoid((self.logits + torch.log(u / (1 - u))) / tau))
        return list(torch.ones_like(self.logits) if self.keep is None else self.keep.double())

    def step(self, x: Tensor, y: Tensor, *, progress: float, lr: float) -> None:
        c = self.config
        leverage = max(1.0, c.beta * self.strength * self.logits.shape[1])
        soft = progress >= c.open_until and self.keep is None
        phase = "soft" if soft else "open" if self.keep is None else "discrete"
        tau = schedule.temperature(progress, start=c.tau_start, end=c.tau_end, until=c.discrete_at)
        ramp = schedule.budget_ramp(progress, target=c.keep_flops or 1, begin=c.open_until, until=c.ramp_until)
        tasks, scores, spikes, gaps = [], [], [], []
        total = torch.zeros((), dtype=torch.float64)
        noise = torch.zeros((), dtype=torch.float64)
        free = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in self.p]
        gates = self.gates(phase, tau)
        outputs = [explicit(p, x, z, c.granularity) for p, z in zip(free, gates, strict=True)]
        mean = torch.stack([output.softmax(1) for output in outputs]).mean(0).detach()
        share = c.mean_weight if self.n > 1 else 0
        for i, (p, output) in enumerate(zip(free, outputs, strict=True)):
            twin = -(mean * output.log_softmax(1)).sum(1).mean()
            loss = (1 - share) * F.cross_entropy(output, y) + share * twin
            rest = F.one_hot(y, 3) - output.softmax(1)
            zero = torch.zeros((), dtype=torch.float64)
            gaussian = Normal(zero, torch.exp(-self.log_d[i])).log_prob(rest).sum(1).mean()
            likelihood = gaussian if c.likelihood == "gaussian" else -loss
            task = torch.autograd.grad(loss, list(p.values()), retain_graph=True)
            score = torch.autograd.grad(likelihood, list(p.values()), retain_graph=True)
            noise = noise - c.beta * gaussian
            total = total + loss - c.beta * likelihood
            if phase != "discrete":
                scale = scales_of(p, c.granularity)
                lam = self.log_slab[i].exp().repeat_interleave(torch.tensor(self.lengths))
                density = priors.spike_and_slab_log_prob(scale, self.logits[i], lam, c.epsilon)  # type: ignore[arg-type]
                slab, spike = self.parts(scale, i, lam)
                slab_score, spike_score, both = (
                    torch.autograd.grad(v.sum(), list(p.values()), retain_graph=True, allow_unused=True)
                    for v in (slab, spike, density)
                )
                for a, b, whole in zip(slab_score, spike_score, both, strict=True):
                    if whole is not None and a is not None and b is not None:
                        torch.testing.assert_close(a + b, whole, rtol=1e-9, atol=1e-12)
                score = [s if a is None else s + self.strength * a for s, a in zip(score, slab_score, strict=True)]
                # what is left is linear in the coordinate: -pull * coordinate
                pulls = zip(spike_score, p.values(), strict=True)
                spikes.append([None if g is None else -g / value.detach() for g, value in pulls])
                total = total - c.beta * self.strength * density.sum()
            if soft:
                fraction = expected_flops(self.logits[i].sigmoid(), c.granularity)
                if c.keep_flops is None:
                    total = total + (c.sparsity or 0) * fraction
                else:
                    gap = fraction - ramp
                    total = total + self.multiplier[i] * fraction + leverage * c.gap_penalty * gap**2
                    gaps.append(gap.detach())
            tasks.append([t.detach() for t in task])
            scores.append([s.detach() for s in score])
        self.learn_scales(total, noise, phase)
        if gaps:
            self.multiplier = self.multiplier + leverage * c.dual_step * torch.stack(gaps)
        self.move(tasks, scores, lr, phase)
        if spikes:
            self.shrink(spikes, lr)

    def parts(self, scale: Tensor, i: int, lam: Tensor) -> tuple[Tensor, Tensor]:
        """log N of slab and spike, each weighed by its responsibility, which takes no gradient."""
        theta, zero = self.logits[i].sigmoid(), torch.zeros_like(lam)
        slab = Normal(zero, 1 / lam).log_prob(scale)
        spike = Normal(zero, torch.full_like(lam, 1 / self.config.epsilon)).log_prob(scale)  # type: ignore[operator]
        r = torch.stack([theta.log() + slab, (1 - theta).log() + spike]).softmax(0).detach()
        return r[0] * slab, r[1] * spike

    def learn_scales(self, total: Tensor, noise: Tensor, phase: str) -> None:
        """Plain gradients of the objective for gate logits, slab precisions and noise; none once gates are decided."""
        self.adam.zero_grad()
        (self.log_d.grad,) = torch.autograd.grad(noise, self.log_d, retain_graph=True)
        if phase != "discrete":
            (self.log_slab.grad,) = torch.autograd.grad(total, self.log_slab, retain_graph=True)
        if phase == "soft":
            (self.logits.grad,) = torch.autograd.grad(total, self.logits)
        self.adam.step()
        bounds = self.config.slab_bounds
        assert bounds is not None
        self.log_slab.data.clamp_(math.log(bounds[0]), math.log(bounds[1]))

    def move(self, tasks: list[list[Tensor]], scores: list[list[Tensor]], lr: float, phase: str) -> None:
        """Equation 15 with Nesterov's momentum; weight decay where no prior acts."""
        c = self.config
        phi = self.direction(scores)
        for i, p in enumerate(self.p):
            for k, name in enumerate(p):
                decay = 0.0 if phase != "discrete" and name in SCALES[c.granularity] else c.weight_decay
                step = tasks[i][k] - c.beta * phi[i][k] + decay * p[name]  # type: ignore[operator]
                if self.masks is not None:
                    step = step * self.masks[i][name]
                self.velocity[i][name] = c.momentum * self.velocity[i][name] + step
                p[name] = p[name] - lr * (step + c.momentum * self.velocity[i][name])

    def direction(self, scores: list[list[Tensor]]) -> list[list[Tensor]]:
        """Equation 14 in each block."""
        names = list(self.p[0])
        shapes = [self.p[0][name].shape for name in names]
        x = torch.stack([torch.cat([p[name].flatten() for name in names]) for p in self.p])
        s = torch.stack([torch.cat([part.flatten() for part in row]) for row in scores])
        sizes = {"all": [x.shape[1]], "coordinate": [1] * x.shape[1], "module": [0] * 6}[self.config.blocks]
        if self.config.blocks == "module":
            modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
            for name in names:
                sizes[modules.index(name.rpartition(".")[0])] += self.p[0][name].numel()
        rule = {"num_data": NUM_DATA, "rule": self.config.bandwidth}
        parts = [naive_direction(a, b, **rule) for a, b in zip(x.split(sizes, 1), s.split(sizes, 1), strict=True)]
        rows = torch.cat(parts, 1)
        return [
            [v.view(shape) for v, shape in zip(row.split([s.numel() for s in shapes]), shapes, strict=True)]
            for row in rows
        ]

    def shrink(self, pulls: list[list[Tensor | None]], lr: float) -> None:
        """The spike's pull as an implicit step, with momentum's amplification (Section 1, stiffness)."""
        c = self.config
        for p, found in zip(self.p, pulls, strict=True):
            for name, pull in zip(p, found, strict=True):
                if pull is not None:
                    p[name] = p[name] / (1 + lr * c.beta * self.strength / (self.n * (1 - c.momentum)) * pull)


# ---- trainers in float64


class Fixed:
    """The same batches in every epoch."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches, self.steps = batches, len(batches)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.batches[start_step:]


@cache
def tiny_structure() -> Structure:
    return discover(Tiny(), torch.zeros(1, 2, SIDE, SIDE))


def tiny_networks(n: int) -> list[nn.Module]:
    """Networks without one special weight: norms differ from 1, weights are of the order of the spike's width."""
    networks = [Tiny().double().train() for _ in range(n)]
    with torch.no_grad():
        for network in networks:
            for parameter in network.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return networks


def tiny_batches(count: int) -> Fixed:
    return Fixed([(torch.randn(6, 2, SIDE, SIDE, dtype=torch.float64), torch.arange(6) % 3) for _ in range(count)])


def tiny_config(**changes: Any) -> Config:
    base: dict[str, Any] = dict(
        epochs=1, beta=0.3, epsilon=10.0, slab=5.0, slab_bounds=(4.9, 5.2), lr=0.1, lr_end=0.02, warmup=0,
        weight_decay=0.05, gate_logit=0.5, keep_flops=0.6, lr_gates=0.1, lr_scales=0.03, dual_step=0.5, device="cpu",
    )  # fmt: skip
    return Config(**(base | changes)).resolved()


PHASES = {
    "open": dict(open_until=1.0, ramp_until=1.0, discrete_at=1.0),
    "soft": dict(open_until=0.0, ramp_until=0.8, discrete_at=1.0),
    "all": dict(open_until=0.0, ramp_until=0.4, discrete_at=0.5),
}


def compare(config: Config, n: int, steps: int, lane: int = 1) -> Trainer:
    """Run trainer and reference side by side; after every step all that they know must agree."""
    networks, batches = tiny_networks(n), tiny_batches(steps)
    reference = Reference(copy.deepcopy(networks), config)
    particles = Particles(networks)
    gating = make_gating(networks[0], tiny_structure(), particles, config, None)
    trainer = Trainer(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=steps)
    trainer.lane = lane
    close = {"rtol": 1e-9, "atol": 1e-11}

    def check(trainer: Trainer) -> None:
        done = trainer.step_index
        if trainer.belief.keep is not None and reference.keep is None:
            reference.discretise(trainer.belief.keep)
        lr = schedule.learning_rate(done / steps, peak=config.lr, end=config.lr_end, warmup=0)
        reference.step(*batches.batches[done - 1], progress=(done - 1) / steps, lr=lr)
        for network, p in zip(particles.networks, reference.p, strict=True):
            for name, parameter in network.named_parameters():
                torch.testing.assert_close(parameter.detach(), p[name], **close, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(trainer.belief.log_d, reference.log_d.detach(), **close)
        torch.testing.assert_close(trainer.belief.multiplier, reference.multiplier, **close)
        if trainer.phase == "soft" and trainer.belief.keep is None and reference.logits.grad is not None:
            torch.testing.assert_close(trainer.belief.logits.grad, reference.logits.grad, **close)
        if trainer.belief.keep is None:
            torch.testing.assert_close(trainer.belief.logits, reference.logits.detach(), **close)
            torch.testing.assert_close(trainer.belief.log_slab, reference.log_slab.detach(), **close)

    trainer.run(batches, on_step=check)
    assert trainer.step_index == steps
    return trainer


# every pair of options meets in some row
CASES = [
    (1, "categorical", "channel", "open", "median", "module", "bayes"),
    (1, "gaussian", "channel", "soft", "median", "all", "tempered"),
    (1, "categorical", "weight", "soft", "paper", "module", "bayes"),
    (1, "gaussian", "weight", "open", "median", "coordinate", "tempered"),
    (2, "categorical", "channel", "soft", "median", "module", "bayes"),
    (2, "categorical", "channel", "soft", "paper", "all", "tempered"),
    (2, "categorical", "channel", "open", "paper", "coordinate", "bayes"),
    (2, "gaussian", "channel", "soft", "median", "module", "tempered"),
    (2, "gaussian", "channel", "open", "median", "all", "bayes"),
    (2, "categorical", "weight", "soft", "median", "all", "bayes"),
    (2, "categorical", "weight", "open", "median", "module", "tempered"),
    (2, "gaussian", "weight", "soft", "paper", "module", "bayes"),
    (2, "gaussian", "weight", "soft", "median", "coordinate", "bayes"),
    (3, "categorical", "channel", "soft", "median", "coordinate", "bayes"),
    (3, "gaussian", "channel", "soft", "median", "module", "bayes"),
    (3, "gaussian", "channel", "open", "paper", "module", "tempered"),
    (3, "categorical", "weight", "soft", "median", "module", "tempered"),
    (3, "gaussian", "weight", "open", "median", "all", "bayes"),
]


@pytest.mark.parametrize(("n", "likelihood", "granularity", "phase", "bandwidth", "blocks", "strength"), CASES)
def test_steps_equal_the_naive_reference(
    n: int, likelihood: str, granularity: str, phase: str, bandwidth: str, blocks: str, strength: str
) -> None:
    config = tiny_config(
        particles=n, likelihood=likelihood, granularity=granularity, bandwidth=bandwidth, blocks=blocks,
        prior_strength=strength, **PHASES[phase],
    )  # fmt: skip
    compare(config, n, steps=3)


def test_sparsity_replaces_the_budget_where_there_is_none() -> None:
    compare(tiny_config(keep_flops=None, sparsity=2.0, particles=2, **PHASES["soft"]), 2, steps=3)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_particles_that_learn_from_their_mean(likelihood: str) -> None:
    compare(tiny_config(mean_weight=0.4, likelihood=likelihood, particles=2, **PHASES["soft"]), 2, steps=3)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_sliced_training_equals_masked_training(likelihood: str, granularity: str) -> None:
    """Five steps before the gates are decided, five after: the small networks follow the gated full ones."""
    config = tiny_config(particles=2, likelihood=likelihood, granularity=granularity, **PHASES["all"])
    trainer = compare(config, 2, steps=10)
    assert bool(trainer.particles.sliced) == (granularity == "channel")
    assert trainer.belief.keep is not None and not trainer.belief.keep.all() and trainer.belief.keep.any(1).all()
    for part, network in zip(trainer.particles.sliced, trainer.particles.networks, strict=False):
        x = torch.randn(3, 2, SIDE, SIDE, dtype=torch.float64)
        z = trainer.belief.keep[trainer.particles.networks.index(network)].double()
        gated = trainer.gating.weights(dict(network.named_parameters()), z)  # type: ignore[union-attr]
        expected = torch.func.functional_call(copy.deepcopy(network).eval(), gated, (x,))
        torch.testing.assert_close(copy.deepcopy(part.network).eval()(x), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("lane", [2, 3, 8])
def test_widths_padded_for_the_device_change_nothing(likelihood: str, lane: int) -> None:
    """What only pads a sliced network stays closed and stands still."""
    trainer = compare(tiny_config(particles=2, likelihood=likelihood, **PHASES["all"]), 2, steps=10, lane=lane)
    assert trainer.belief.keep is not None
    for part, keep in zip(trainer.particles.sliced, trainer.belief.keep, strict=True):
        width = part.network.get_submodule("left").out_channels
        assert width in (4, -(-int(keep[:4].sum()) // lane) * lane)


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_what_is_removed_stands_still_and_padding_stays_zero(granularity: str) -> None:
    networks, batches = tiny_networks(2), tiny_batches(10)
    config = tiny_config(particles=2, granularity=granularity, **PHASES["all"])
    particles = Particles(networks)
    gating = make_gating(networks[0], tiny_structure(), particles, config, None)
    trainer = Trainer(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=10)
    padding = torch.ones(particles.layout.size, dtype=torch.bool)
    for segment in particles.layout.segments.values():
        segment.view(padding).fill_(False)
    rows: list[Tensor] = []

    def check(trainer: Trainer) -> None:
        assert particles.rows[:, padding].eq(0).all() and trainer.momentum[:, padding].eq(0).all()
        assert particles.intact()
        if trainer.belief.keep is not None:
            rows.append(particles.rows.clone())

    trainer.run(batches, on_step=check)
    assert trainer.belief.keep is not None
    for i, network in enumerate(networks):
        p = {k: v.detach() for k, v in network.named_parameters()}
        for name, mask in kept_coordinates(p, trainer.belief.keep[i], granularity).items():
            first, last = (particles.layout.segments[name].view(row[i]) for row in (rows[0], rows[-1]))
            assert torch.equal(first[mask == 0], last[mask == 0])
            assert (first[mask == 1] != last[mask == 1]).all()


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_gates_and_slabs_rest_once_they_are_decided(granularity: str) -> None:
    networks = tiny_networks(2)
    config = tiny_config(particles=2, granularity=granularity, **PHASES["all"])
    particles = Particles(networks)
    gating = make_gating(networks[0], tiny_structure(), particles, config, None)
    trainer = Trainer(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=10)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(trainer: Trainer) -> None:
        seen.append((trainer.belief.logits.clone(), trainer.belief.log_slab.clone(), trainer.belief.log_d.clone()))

    trainer.run(tiny_batches(10), on_step=note)
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
    Trainer(particles, gating, config, num_data=NUM_DATA, steps_per_epoch=6).run(tiny_batches(6))
    assert torch.equal(network.get_submodule(frozen).weight, before)  # type: ignore[arg-type]


def test_update_without_stein_is_nesterov_sgd() -> None:
    """beta = 0: one call on the matrix is torch's own optimiser on each row."""
    rows, decay, lr = torch.randn(2, 40, dtype=torch.float64), torch.rand(40, dtype=torch.float64), 0.3
    momentum, ones = torch.zeros_like(rows), torch.ones_like(rows)
    free = rows.clone().requires_grad_()
    optimiser = torch.optim.SGD([free], lr=lr, momentum=0.8, nesterov=True)
    for _ in range(4):
        gradient = torch.randn_like(rows)
        free.grad = gradient + decay * free.detach()
        optimiser.step()
        rate = torch.tensor(lr, dtype=torch.float64)
        update_rows(rows, gradient, momentum, None, None, (), None, decay, ones, rate, torch.tensor(True), 0.0, 0.8)
    torch.testing.assert_close(rows, free.detach(), rtol=1e-12, atol=1e-12)


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
    Trainer(Particles(networks), None, config, num_data=NUM_DATA, steps_per_epoch=4).run(batches)
    for network, other in zip(networks, free, strict=True):
        for name, value in network.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-10, atol=1e-12)


# ---- whole runs


def mlp(width: int, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def table(n: int = 96) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6)
    return x, (x @ torch.randn(6, 3)).argmax(1)


def pictures(n: int = 48) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 3
    return torch.randn(n, 1, 7, 7) + 0.7 * y.view(-1, 1, 1, 1), y


def quick(**changes: Any) -> Config:
    base: dict[str, Any] = dict(epochs=8, batch_size=16, lr=0.05, warmup=0, lr_gates=0.2, device="cpu", keep_flops=0.5)
    return Config(**(base | changes))


def state(result: dllp.Result) -> list[Tensor]:
    networks = [net for slab in result.slabs for net in (slab.network, slab.reference)]
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


@pytest.mark.parametrize("budget", ["keep_flops", "keep_params"])
@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_the_budget_is_met_and_the_ramp_followed(granularity: str, budget: str) -> None:
    target = 0.4
    goal: dict[str, Any] = {"keep_flops": None, budget: target}
    config = quick(
        granularity=granularity, gate_linear=True, epochs=30, discrete_at=0.8, ramp_until=0.6, batch_size=32,
        prior_strength="tempered", lr_gates=0.3, **goal,
    )  # fmt: skip
    gaps: list[float] = []

    def watch(trainer: Trainer) -> None:
        if trainer.phase == "soft":
            gaps.append(float((trainer.belief.cost() - trainer.ramp).abs().max()))

    result = dllp.prune(mlp(200), table(), config, on_step=watch)
    for slab, size in zip(result.slabs, result.sizes, strict=True):
        share = size.macs / result.dense.macs if budget == "keep_flops" else size.params / result.dense.params
        assert target - 0.005 <= share <= target
        linear = [m for m in slab.network.modules() if isinstance(m, nn.Linear)]
        assert size.macs == pytest.approx(sum(int((m.weight != 0).sum()) for m in linear), abs=0.5)
        assert size.params == sum(int((p != 0).sum()) for p in slab.network.parameters())
    assert max(gaps) < 0.25 and sum(gaps) / len(gaps) < 0.06 and max(gaps[-5:]) < 0.04


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


def test_slab_precisions_stay_within_their_bounds() -> None:
    """Weights in front of a batch norm may shrink for nothing and pull lambda up without end: only bounds hold it."""
    network = convolutional()
    with torch.no_grad():
        for convolution in (m for m in network.modules() if isinstance(m, nn.Conv2d)):
            convolution.weight.mul_(1e-3)
    config = quick(
        granularity="weight", keep_flops=0.9, lr=1e-6, lr_end=0.0, lr_scales=0.3, epsilon=2e3, epochs=8, particles=1,
        discrete_at=1.0, ramp_until=0.9,
    )  # fmt: skip
    low, high = config.resolved().slab_bounds or (0, 0)
    bounded = dllp.prune(network, pictures(), config).gates["slab"]
    assert (bounded >= low * 0.999).all() and (bounded <= high * 1.001).all()
    unbounded = dllp.prune(network, pictures(), replace(config, slab_bounds=(1e-3, 1e3))).gates["slab"]
    assert unbounded.max() > 2 * high


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_slabs_fit_the_scales_in_an_ordinary_run(granularity: str) -> None:
    config = quick(granularity=granularity, lr_scales=0.1, epochs=10)
    low, high = config.resolved().slab_bounds or (0, 0)
    slab = dllp.prune(convolutional(), pictures(), config).gates["slab"]
    assert (slab > 0.999 * low).all() and (slab < 0.9 * high).all()


def test_the_multiplier_holds_the_network_up() -> None:
    """A prior that would prune everything: the two-sided multiplier goes negative and the target is kept."""
    config = quick(
        granularity="weight", beta=4.0, epsilon=300.0, gate_logit=1.0, epochs=30, keep_flops=0.6, lr=0.005,
        lr_gates=0.1, discrete_at=0.8, ramp_until=0.4, dual_step=0.1,
    )  # fmt: skip
    costs: list[float] = []

    def watch(trainer: Trainer) -> None:
        if trainer.phase == "soft":
            costs.append(float(trainer.belief.cost().min()))

    held = dllp.prune(convolutional(), pictures(), config, on_step=watch)
    assert min(costs) > 0.4 and abs(costs[-1] - 0.6) < 0.15
    assert all(mu < 0 for mu in held.history[-1]["multiplier"])
    assert all(0.595 <= size.macs / held.dense.macs <= 0.6 for size in held.sizes)
    costs.clear()
    fallen = dllp.prune(convolutional(), pictures(), replace(config, keep_flops=None, sparsity=0.0), on_step=watch)
    assert costs[-1] < 0.2
    assert all(size.macs < 0.1 * fallen.dense.macs for size in fallen.sizes)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_regression_learns_a_linear_function(n: int) -> None:
    x = torch.randn(256, 6)
    y = x @ torch.randn(6, 2) + 0.3 * torch.randn(256, 2)
    config = quick(
        task="regression", particles=n, init="fresh", epochs=40, keep_flops=0.6, lr=0.02, lr_scales=0.05, batch_size=64
    )
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
    weights = torch.stack([slab.reference.get_parameter("0.weight") for slab in result.slabs]).detach()
    for i in range(3):
        for j in range(i):
            assert (members[i] - members[j]).abs().max() > 1e-3
            assert (weights[i] - weights[j]).norm() > 0.02 * weights[i].norm()


# ---- the loop


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


def test_patience_stops_a_run_that_no_longer_improves() -> None:
    config = quick(epochs=40, lr=1e-9, lr_end=0.0, discrete_at=0.1, ramp_until=0.1, patience=2)
    stopped = dllp.prune(mlp(8), table(), config)
    assert 4 < len(stopped.history) < 40
    assert stopped.history[-1]["phase"] == "discrete"
    assert len(dllp.prune(mlp(8), table(), replace(config, epochs=8, patience=0)).history) == 8


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

    def pad(trainer: Trainer) -> None:
        trainer.lane = 8

    plain, padded = dllp.prune(network, data, config), dllp.prune(network, data, config, on_step=pad)
    assert plain.widths == padded.widths and plain.sizes == padded.sizes
    for a, b in zip(plain.slabs, padded.slabs, strict=True):
        assert a.recipe == b.recipe
        for name, value in a.network.state_dict().items():
            torch.testing.assert_close(b.network.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_gates_left_soft_are_decided_at_the_end() -> None:
    result = dllp.prune(mlp(64), table(), quick(epochs=6, discrete_at=1.0))
    assert result.history[-1]["phase"] == "soft"
    assert all(size.macs <= 0.5 * result.dense.macs for size in result.sizes)
