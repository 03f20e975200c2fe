"""Algorithm 1 slow and obvious: loops and autograd."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from dllp.config import Config
from dllp.method import priors, schedule
from tests.support.oracles import naive_direction
from tests.support.tiny import CONVOLUTIONS, NUM_DATA, SCALES, expected_flops, explicit, kept_coordinates, scales_of


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
        if phase == "soft" and not self.config.draw_gates:
            return list(torch.sigmoid(self.logits / tau))
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
            noise = noise - gaussian
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
        phi = self.direction(scores, lr)
        for i, p in enumerate(self.p):
            for k, name in enumerate(p):
                ruled = name in SCALES[c.granularity]
                shrinkage = 0.0 if phase != "discrete" and ruled else c.weight_decay * p[name]  # type: ignore[operator]
                if phase == "discrete" and ruled and c.slab_decay:
                    shrinkage = self.slab_pull(i)[name]
                step = tasks[i][k] - c.beta * phi[i][k] + shrinkage
                if self.masks is not None:
                    step = step * self.masks[i][name]
                self.velocity[i][name] = c.momentum * self.velocity[i][name] + step
                p[name] = p[name] - lr * (step + c.momentum * self.velocity[i][name])

    def slab_pull(self, i: int) -> dict[str, Tensor]:
        """Gradient of the slab's -log N(scale; 0, 1 / lambda^2), as one of n particles has it, times beta / N."""
        c, p = self.config, {k: v.clone().requires_grad_() for k, v in self.p[i].items()}
        lam = self.log_slab[i].detach().exp().repeat_interleave(torch.tensor(self.lengths))
        energy = -Normal(torch.zeros_like(lam), 1 / lam).log_prob(scales_of(p, c.granularity)).sum()
        ruled = SCALES[c.granularity]
        pulls = torch.autograd.grad(energy, [p[name] for name in ruled])
        return {name: c.beta * self.strength / self.n * pull for name, pull in zip(ruled, pulls, strict=True)}

    def direction(self, scores: list[list[Tensor]], lr: float) -> list[list[Tensor]]:
        """Equation 14 in each block; no bandwidth is of a distance that one step, summed up by momentum, covers."""
        names = list(self.p[0])
        shapes = [self.p[0][name].shape for name in names]
        x = torch.stack([torch.cat([p[name].flatten() for name in names]) for p in self.p])
        s = torch.stack([torch.cat([part.flatten() for part in row]) for row in scores])
        sizes = {"all": [x.shape[1]], "coordinate": [1] * x.shape[1], "module": [0] * 6}[self.config.blocks]
        if self.config.blocks == "module":
            modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
            for name in names:
                sizes[modules.index(name.rpartition(".")[0])] += self.p[0][name].numel()
        c = self.config
        reach = lr * c.beta / (1 - c.momentum) * math.log(self.n) / NUM_DATA
        rule = {"num_data": NUM_DATA, "rule": c.bandwidth, "reach": reach}
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
