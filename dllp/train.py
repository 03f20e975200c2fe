"""Algorithm 1: Stein variational gradient descent on spike-and-slab particles (equations 14 and 15).

One run has three phases. `open`: every gate is 1 and the networks learn to see. `soft`: gates are relaxed samples, their
logits follow the objective and the budget's multiplier. `discrete`: the gates are decided, channel-gated networks are
sliced, and the same run goes on in the small shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from dllp import gates, objective, priors, schedule, stein
from dllp.config import Config
from dllp.engine import Capture
from dllp.errors import DllpError
from dllp.gating import Budget, ChannelGating, WeightGating
from dllp.particles import Particles

Phase = Literal["open", "soft", "discrete"]


class Batches(Protocol):
    """Data as training sees it: a fixed number of steps, and the batches of one epoch from a given step on."""

    steps: int

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True)
class EpochRecord:
    """What happened in one epoch; lists have one entry for each particle."""

    epoch: int
    phase: Phase
    loss: list[float]
    accuracy: list[float] | None
    lr: float
    temperature: float
    budget: float
    cost: list[float]
    multiplier: list[float]
    undecided: list[float]
    noise: list[float]
    seconds: float
    engine: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Trainer:
    """Everything that changes during a run, and the step that changes it.

    Args:
        particles: The networks; `gating` None trains them as they are (the dense reference).
        config: A resolved configuration.
        num_data: N, the size of the training set.
        steps_per_epoch: Fixes what progress in [0, 1] means.
    """

    def __init__(
        self, particles: Particles, gating: ChannelGating | WeightGating | None, config: Config, *,
        num_data: int, steps_per_epoch: int,
    ) -> None:  # fmt: skip
        self.particles, self.gating, self.config, self.num_data = particles, gating, config, num_data
        self.steps_per_epoch, self.total_steps = steps_per_epoch, steps_per_epoch * config.epochs
        n, device, dtype = len(particles), particles.device, particles.rows.dtype
        units, modules = (gating.units, len(gating.scales.modules)) if gating else (0, 0)
        self.step_index = 0
        self.keep: Tensor | None = None  # (n, U) bool, once the gates are discrete
        self.momentum = torch.zeros_like(particles.rows)
        self.logits = torch.full((n, units), config.gate_logit, device=device, dtype=dtype)
        self.log_slab = torch.full((n, modules), config.slab, device=device, dtype=dtype).log()
        self.log_d = torch.zeros(n, device=device, dtype=dtype)
        self.multiplier = torch.zeros(n, device=device, dtype=dtype)
        self.gap = torch.zeros(n, device=device, dtype=dtype)
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.knobs = torch.zeros(3, device=device, dtype=dtype)  # lr, temperature, ramp: read inside captured steps
        self.statistics = torch.zeros(2, n, device=device, dtype=torch.float64)  # sums of loss and of correct answers
        self.adam = torch.optim.Adam(
            [
                {"params": [self.logits], "lr": config.lr_gates},
                {"params": [self.log_slab, self.log_d], "lr": config.lr_scales},
            ],
            capturable=device.type == "cuda",
        )
        for tensor in (self.logits, self.log_slab, self.log_d):
            tensor.grad = torch.zeros_like(tensor)
        self.budget: Budget = "params" if config.keep_params is not None else "flops"
        self.target = config.keep_params if config.keep_params is not None else config.keep_flops
        self.gaussian = config.likelihood == "gaussian"
        gated = gating.units if gating else 1
        self.strength = 1 / max(num_data, gated if config.prior_strength == "tempered" else 1)
        lengths = {"module": particles.layout.blocks, "all": None, "coordinate": "coordinate"}[config.blocks]
        self.blocks = stein.block_index(lengths, device) if isinstance(lengths, list) else lengths
        self.learnable = particles.layout.learnable(particles.networks[0]).to(device)
        self.moving = self.learnable.to(dtype).expand(n, -1)  # (n, P): 0 where a weight stands still
        self.decay = config.weight_decay * self._ungated()
        self.streams = [torch.cuda.Stream(device) for _ in range(n)] if device.type == "cuda" and n > 1 else []
        self.capture = Capture(self.step, self.generator, enabled=config.engine != "eager" and device.type == "cuda")

    # ---- where the run stands

    @property
    def progress(self) -> float:
        return self.step_index / self.total_steps

    @property
    def phase(self) -> Phase:
        if self.keep is not None:
            return "discrete"
        return "open" if self.gating is None or self.progress < self.config.open_until else "soft"

    def _set_knobs(self) -> None:
        c, p = self.config, self.progress
        warmup = min(c.warmup / c.epochs, 0.5)
        lr = schedule.learning_rate(p, peak=c.lr, end=c.lr_end, warmup=warmup)
        tau = schedule.temperature(p, start=c.tau_start, end=c.tau_end, until=c.discrete_at)
        ramp = schedule.budget_ramp(p, target=self.target or 1.0, begin=c.open_until, until=c.ramp_until)
        self.lr, self.tau, self.ramp = lr, tau, ramp
        self.knobs.copy_(torch.tensor([lr, tau, ramp], dtype=self.knobs.dtype), non_blocking=True)

    def _ungated(self) -> Tensor:
        """(P,): 1 where no prior acts, so that each weight has exactly one shrinkage in each phase (Section 2)."""
        mask = torch.ones_like(self.particles.rows[0])
        if self.gating is not None and self.keep is None:
            mask[self.gating.scales.coordinates.flatten()] = 0
        return mask

    # ---- the run

    def run(
        self, batches: Batches, *, on_epoch: Callable[[EpochRecord], None] | None = None,
        on_step: Callable[[Trainer], None] | None = None,
    ) -> list[EpochRecord]:  # fmt: skip
        """Train from where the run stands to its end; returns the records of the epochs it ran."""
        history: list[EpochRecord] = []
        best, waited = float("inf"), 0
        for epoch in range(self.step_index // self.steps_per_epoch, self.config.epochs):
            began = time.perf_counter()
            for x, y in batches.epoch(epoch, self.step_index % self.steps_per_epoch):
                if self.keep is None and self.gating is not None and self.progress >= self.config.discrete_at:
                    self.discretise()
                self._set_knobs()
                self.capture(x, y, key=self.phase)
                self.step_index += 1
                if on_step is not None:
                    on_step(self)
            history.append(self._record(epoch, time.perf_counter() - began))
            if on_epoch is not None:
                on_epoch(history[-1])
            loss = sum(history[-1].loss)
            best, waited = (loss, 0) if loss < best else (best, waited + (self.phase == "discrete"))
            if self.config.patience and waited >= self.config.patience:
                break
        if self.keep is None and self.gating is not None:
            self.discretise()
        self.particles.finish()
        return history

    def discretise(self) -> None:
        """Decide every gate so that the true cost meets the budget, and slice channel-gated networks."""
        gating, particles = self.gating, self.particles
        assert gating is not None
        self.keep = torch.stack([gating.select(row, self.budget, self.target) for row in self.logits])
        if isinstance(gating, ChannelGating):
            pairs = zip(particles.networks, self.keep, strict=True)
            particles.slice([gating.recipe(network, keep) for network, keep in pairs])
        self._freeze_spike()
        self.capture.reset()

    def _freeze_spike(self) -> None:
        """From here on only the slab moves; what remains of the prior is its Gaussian, a weight decay on the slab."""
        particles, gating = self.particles, self.gating
        assert self.keep is not None and gating is not None
        if particles.sliced:
            moving = torch.zeros_like(particles.rows)
            for row, part in zip(moving, particles.sliced, strict=True):
                row[part.coordinates] = 1
        else:
            moving = torch.ones_like(particles.rows)
            moving[:, gating.scales.coordinates[:, 0]] = self.keep.to(moving.dtype)
        self.moving = moving * self.learnable
        self.momentum *= self.moving
        self.decay = self.config.weight_decay * self._ungated()

    # ---- one step; nothing in it reads a value back to the host

    def step(self, x: Tensor, y: Tensor) -> None:
        """One update of all particles from one batch."""
        self.particles.begin_step()
        z = self._sample_gates()
        scores, gate_gradient = self._backward(x, y, z)
        self.particles.collect_gradients()
        with torch.no_grad():
            if self.gaussian:
                scores = scores * self.moving
            else:  # the likelihood is the task loss, so one backward serves both (Section 3)
                scores = -self.particles.gradients
                gate_gradient = gate_gradient * (1 + self.config.beta)
            self._update(scores, z, gate_gradient)

    def _sample_gates(self) -> Tensor:
        """(n, U): relaxed samples while the gates are soft, decided gates for discrete weights, otherwise ones."""
        if self.phase == "soft":
            noise = torch.rand(self.logits.shape, generator=self.generator, device=self.logits.device,
                               dtype=self.logits.dtype)  # fmt: skip
            return gates.sample(self.logits.detach(), self.knobs[1], noise).requires_grad_()
        if self.keep is not None:
            return self.keep.to(self.logits.dtype)
        return torch.ones_like(self.logits)

    def _forward(self, i: int, x: Tensor, z: Tensor) -> Tensor:
        network = self.particles.active[i]
        bf16 = self.config.precision == "bfloat16"
        # cast weights must not be cached: a captured graph would keep the first step's
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            if self.gating is None or self.phase == "open" or self.particles.sliced:
                outputs = network(x)
            else:
                weights = self.gating.weights(dict(network.named_parameters()), z)
                outputs = functional_call(network, weights, (x,), tie_weights=False)
        return outputs.float() if bf16 else outputs

    def _forward_all(self, x: Tensor, z: Tensor) -> list[Tensor]:
        """Outputs of every particle; on CUDA each runs on a stream of its own, and its backward follows it there."""
        if not self.streams:
            return [self._forward(i, x, z[i]) for i in range(len(self.particles))]
        main, outputs = torch.cuda.current_stream(), []
        for i, stream in enumerate(self.streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outputs.append(self._forward(i, x, z[i]))
        for stream in self.streams:
            main.wait_stream(stream)
        return outputs

    def _backward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the gradient matrix with the task loss's; returns likelihood scores (n, P) and gate gradients (n, U)."""
        task, share = self.config.task, self.config.mean_weight
        outputs = self._forward_all(x, z)
        losses = [objective.task_loss(o, y, task) for o in outputs]
        total = torch.stack(losses)
        if share and len(outputs) > 1 and task == "classification":
            mean = torch.stack([o.detach().softmax(1) for o in outputs]).mean(0)
            total = (1 - share) * total + share * torch.stack([objective.twin_loss(o, mean) for o in outputs])
        scores, extra = torch.zeros_like(self.particles.gradients), torch.zeros_like(z)
        if self.gaussian:
            scores, extra = self._likelihood_scores(outputs, y, z)
        total.sum().backward()
        with torch.no_grad():
            self.statistics[0] += torch.stack(losses)
            rests = [objective.residuals(o, y, task) for o in outputs]
            if task == "classification":
                self.statistics[1] += torch.stack([(o.argmax(1) == y).double().mean() for o in outputs])
            noise = [objective.noise_gradient(r, d) for r, d in zip(rests, self.log_d, strict=True)]
            self.log_d.grad.copy_(torch.stack(noise)).mul_(-self.config.beta)  # type: ignore[union-attr]
            gradient = z.grad if z.grad is not None else torch.zeros_like(z)
            return scores, gradient - self.config.beta * extra

    def _likelihood_scores(self, outputs: list[Tensor], y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of equation 9 in the parameters (n, P) and the gates (n, U), by a second vector-Jacobian product."""
        task, particles = self.config.task, self.particles
        scores, gate_scores = torch.zeros_like(particles.rows), torch.zeros_like(z)
        for i, (output, log_d) in enumerate(zip(outputs, self.log_d, strict=True)):
            value = objective.gaussian_log_likelihood(objective.residuals(output, y, task), log_d.detach())
            named = [(k, p) for k, p in particles.active[i].named_parameters() if p.requires_grad]
            inputs = [p for _, p in named] + ([z] if z.requires_grad else [])
            found = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
            layout = particles.sliced[i].layout if particles.sliced else particles.layout
            target = torch.zeros_like(particles.sliced[i].row) if particles.sliced else scores[i]
            for (name, _), gradient in zip(named, found, strict=False):
                if gradient is not None:
                    layout.segments[name].view(target).copy_(gradient)
            if particles.sliced:
                scores[i].index_copy_(0, particles.sliced[i].coordinates, target)
            if z.requires_grad and found[-1] is not None:
                gate_scores += found[-1]
        return scores, gate_scores

    def _update(self, scores: Tensor, z: Tensor, gate_gradient: Tensor) -> None:
        """Equation 15 on the matrix, then gates, slab precisions, d and the budget's multiplier."""
        c, rows, gradient = self.config, self.particles.rows, self.particles.gradients
        lr, n = self.knobs[0], len(self.particles)
        pull = None
        if self.gating is not None and self.keep is None:
            pull = self._prior(scores, z, gate_gradient)
        phi = stein.direction(rows, scores, num_data=self.num_data, bandwidth=c.bandwidth, blocks=self.blocks)
        gradient.sub_(phi, alpha=c.beta).add_(self.decay * rows).mul_(self.moving)
        self.momentum.mul_(c.momentum).add_(gradient)
        rows.sub_(lr * gradient.add_(self.momentum, alpha=c.momentum))  # Nesterov
        if pull is not None and self.gating is not None:
            at = self.gating.scales.coordinates
            step = lr * c.beta * self.strength / (n * (1 - c.momentum)) * pull / self.gating.scales.count
            rows[:, at] = priors.proximal_spike(rows[:, at], step[..., None])
        self.adam.step()
        if self.gating is not None and c.slab_bounds is not None:
            low, high = c.slab_bounds
            self.log_slab.clamp_(torch.tensor(low).log().item(), torch.tensor(high).log().item())

    def _prior(self, scores: Tensor, z: Tensor, gate_gradient: Tensor) -> Tensor:
        """Add the slab's pull to the scores and set gradients of logits and slabs; returns the spike's pull (n, U)."""
        c, scales, rows = self.config, self.gating.scales, self.particles.rows  # type: ignore[union-attr]
        value, slab = scales.of(rows), scales.spread(self.log_slab).exp()
        r = priors.responsibility(value, self.logits, slab, c.epsilon)
        at = scales.coordinates
        scores[:, at] -= (self.strength * r * slab.square() / scales.count)[..., None] * rows[:, at]
        slab_gradient = scales.module_sums(r * (1 - (slab * value).square()))
        self.log_slab.grad.copy_(slab_gradient).mul_(-c.beta * self.strength)  # type: ignore[union-attr]
        if self.phase == "soft":
            theta = self.logits.sigmoid()
            total = gate_gradient * z * (1 - z) / self.knobs[1] - c.beta * self.strength * (r - theta)
            self.logits.grad.copy_(total + self._budget())  # type: ignore[union-attr]
            if self.target is not None:
                self.multiplier.add_(self.gap, alpha=c.dual_step)
        return (1 - r) * c.epsilon**2  # type: ignore[operator]

    def _budget(self) -> Tensor:
        """(n, U): gradient of the budget's energy in the logits; leaves the gap behind for the dual ascent."""
        cost = getattr(self.gating, self.budget)
        with torch.enable_grad():
            logits = self.logits.detach().requires_grad_()
            fraction = cost.expected(logits.sigmoid()) / cost.dense
            if self.target is None:
                energy = self.config.sparsity * fraction
            else:
                energy, gap = objective.budget_energy(fraction, self.knobs[2], self.multiplier, self.config.gap_penalty)
                self.gap.copy_(gap.detach())
            (gradient,) = torch.autograd.grad(energy.sum(), logits)
        return gradient

    # ---- looking at it

    def cost(self) -> Tensor:
        """(n,) expected (soft) or true (discrete) cost over the dense cost."""
        if self.gating is None:
            return torch.ones(len(self.particles))
        cost = getattr(self.gating, self.budget)
        theta = self.logits.sigmoid() if self.keep is None else self.keep.to(self.logits.dtype)
        return cost.expected(theta) / cost.dense

    def _record(self, epoch: int, seconds: float) -> EpochRecord:
        loss, correct = (self.statistics / self.steps_per_epoch).tolist()
        self.statistics.zero_()
        if not all(abs(v) < float("inf") for v in loss):
            raise DllpError(f"the loss is not finite in epoch {epoch + 1} ({loss}): lower lr (now {self.config.lr})")
        decided = self.keep is not None or self.gating is None
        return EpochRecord(
            epoch=epoch + 1,
            phase=self.phase,
            loss=loss,
            accuracy=correct if self.config.task == "classification" else None,
            lr=self.lr,
            temperature=self.tau,
            budget=self.ramp,
            cost=self.cost().tolist(),
            multiplier=self.multiplier.tolist(),
            undecided=[0.0] * len(loss) if decided else objective.undecided(self.logits.sigmoid()).tolist(),
            noise=(-2 * self.log_d).exp().tolist(),
            seconds=seconds,
            engine=self.capture.state,
        )
