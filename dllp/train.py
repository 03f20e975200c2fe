"""Algorithm 1: Stein variational gradient descent on spike-and-slab particles (equations 14 and 15).

One run has three phases. `open`: every gate is 1 and the networks learn to see. `soft`: gates are relaxed samples, their
logits follow the objective and the budget's multiplier. `discrete`: the gates are decided, channel-gated networks are
sliced, and the same run goes on in the small shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call

from dllp import gates, objective, priors, schedule, stein
from dllp.config import Config
from dllp.engine import Capture
from dllp.errors import DllpError
from dllp.gating import Budget, ChannelGating, WeightGating
from dllp.particles import Particles
from dllp.slicing import Fold

Phase = Literal["open", "soft", "discrete"]
T = TypeVar("T")


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
        self.lane = 8 if device.type == "cuda" else 1  # widths that tensor cores like
        self.keep: Tensor | None = None  # (n, U) bool, once the gates are discrete
        self.closed: list[tuple[Fold, Tensor]] = []  # padding channels of sliced networks, and the gates that close them
        self.momentum = torch.zeros_like(particles.rows)
        self.prior_scores = torch.zeros_like(particles.rows) if gating else None
        self.scores = torch.zeros_like(particles.rows) if config.likelihood == "gaussian" else None
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
        # one fused kernel on CUDA; its inputs never change shape, so it is compiled once
        self.update = torch.compile(update_rows, dynamic=False) if device.type == "cuda" else update_rows
        self.capture = Capture(
            self.step, self.generator, enabled=config.engine != "eager" and device.type == "cuda",
            deterministic=config.deterministic,
        )  # fmt: skip

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
        lr = schedule.learning_rate((self.step_index + 1) / self.total_steps, peak=c.lr, end=c.lr_end, warmup=warmup)
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
            history.append(self._record(epoch, began))
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
        self._freeze_spike()
        if isinstance(gating, ChannelGating):
            self._slice(gating)
        self.capture.reset()

    def _slice(self, gating: ChannelGating) -> None:
        """Train the small networks from here on, their channels padded with closed ones to what the device likes."""
        assert self.keep is not None
        padded = [gating.padded(keep, row, self.lane) for keep, row in zip(self.keep, self.logits, strict=True)]
        pairs = zip(self.particles.networks, padded, strict=True)
        self.particles.slice([gating.recipe(network, keep) for network, keep in pairs])
        if self.lane > 1:
            parts = zip(self.particles.sliced, padded, self.keep, strict=True)
            self.closed = [gating.closed(part.network, part.recipe, pad, keep) for part, pad, keep in parts]

    def _freeze_spike(self) -> None:
        """From here on only the slab moves; what remains of the prior is its Gaussian, a weight decay on the slab."""
        particles, gating = self.particles, self.gating
        assert self.keep is not None and gating is not None
        moving = [gating.slab_coordinates(network, particles.layout, keep)
                  for network, keep in zip(particles.networks, self.keep, strict=True)]  # fmt: skip
        self.moving = torch.stack(moving).to(self.moving) * self.learnable
        self.momentum *= self.moving
        self.decay = self.config.weight_decay * self._ungated()

    # ---- one step; nothing in it reads a value back to the host

    def step(self, x: Tensor, y: Tensor) -> None:
        """One update of all particles from one batch."""
        self.particles.begin_step()
        z = self._sample_gates()
        gate_gradient = self._backward(x, y, z)
        self.particles.collect_gradients()
        with torch.no_grad():
            if self.gating is not None and self.keep is None:
                pull = self._prior(z, gate_gradient)
                self._advance()
                self._shrink_spike(pull)
            else:
                self._advance()
            self.adam.step()
            if self.config.slab_bounds is not None:
                self.log_slab.copy_(priors.clamp_slab(self.log_slab, self.config.slab_bounds))

    def _sample_gates(self) -> Tensor:
        """(n, U): relaxed samples while the gates are soft, decided gates for discrete weights, otherwise ones."""
        if self.phase == "soft":
            shape, device, dtype = self.logits.shape, self.logits.device, self.logits.dtype
            noise = torch.rand(shape, generator=self.generator, device=device, dtype=dtype)
            return gates.sample(self.logits, self.knobs[1], noise)
        if self.keep is not None:
            return self.keep.to(self.logits.dtype)
        return torch.ones_like(self.logits)

    def _each(self, work: Callable[[int], T]) -> list[T]:
        """work(i) for every particle; on CUDA each on a stream of its own, joined at the end."""
        if not self.streams:
            return [work(i) for i in range(len(self.particles))]
        main, results = torch.cuda.current_stream(), []
        for i, stream in enumerate(self.streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(work(i))
        for stream in self.streams:
            main.wait_stream(stream)
        return results

    def _forward(self, i: int, x: Tensor, z: Tensor) -> Tensor:
        """(B, ...) inputs and particle i's gates (U,) -> (B, C) outputs."""
        network = self.particles.active[i]
        bf16 = self.config.precision == "bfloat16"
        # cast weights must not be cached: a captured graph would keep the first step's
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            weights: dict[str, Tensor] = {}
            if self.closed:
                fold, gate = self.closed[i]
                weights = fold(dict(network.named_parameters()), gate)
            elif self.gating is not None and self.phase != "open" and not self.particles.sliced:
                weights = self.gating.weights(dict(network.named_parameters()), z)
            outputs = functional_call(network, weights, (x,), tie_weights=False) if weights else network(x)
        return outputs.float() if bf16 else outputs

    def _backward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Fill the gradient matrix, and `scores` with the likelihood's own; returns the gates' gradients (n, U)."""
        c = self.config
        leaves = [row.detach().requires_grad_(self.phase == "soft") for row in z]
        share = c.mean_weight if c.task == "classification" and len(leaves) > 1 else 0.0
        ready = self._each(lambda i: self._forward(i, x, leaves[i])) if share else []
        mean = torch.stack([output.detach().softmax(1) for output in ready]).mean(0) if share else None

        def work(i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            output = ready[i] if share else self._forward(i, x, leaves[i])
            loss = objective.task_loss(output, y, c.task)
            through = leaves[i : i + 1] if leaves[i].requires_grad else []
            extra = self._likelihood_scores(i, output, y, through) if self.gaussian else None
            total = loss if mean is None else (1 - share) * loss + share * objective.twin_loss(output, mean)
            gate = self.particles.differentiate(i, total, *through)
            gate_gradient = gate[0] if gate and gate[0] is not None else torch.zeros_like(leaves[i])
            # a likelihood that is the task loss has beta times its gradient: one backward serves both (Section 3)
            gate_gradient = gate_gradient * (1 + c.beta) if extra is None else gate_gradient - c.beta * extra
            with torch.no_grad():
                right = (output.argmax(1) == y).double().mean() if c.task == "classification" else loss.new_zeros(())
                noise = objective.noise_gradient(objective.residuals(output, y, c.task), self.log_d[i])
            return loss.detach(), right, noise, gate_gradient

        losses, rights, noises, gate_gradients = (torch.stack(v) for v in zip(*self._each(work), strict=True))
        self.statistics[0] += losses
        self.statistics[1] += rights
        self.log_d.grad.copy_(noises).mul_(-c.beta)  # type: ignore[union-attr]
        return gate_gradients

    def _likelihood_scores(self, i: int, output: Tensor, y: Tensor, through: list[Tensor]) -> Tensor:
        """Gradients of equation 9 by a vector-Jacobian product of their own: of parameters into `scores`, of gates (U,)."""
        rest = objective.residuals(output, y, self.config.task)
        value = objective.gaussian_log_likelihood(rest, self.log_d[i])
        part = self.particles.sliced[i] if self.particles.sliced else None
        target = torch.zeros_like(part.row) if part else self.scores[i].zero_()  # type: ignore[index]
        layout = part.layout if part else self.particles.layout
        parameters, views = layout.targets(self.particles.active[i], target)
        found = torch.autograd.grad(value, [*parameters, *through], retain_graph=True, allow_unused=True)
        for view, gradient in zip(views, found, strict=False):
            if gradient is not None:
                view.copy_(gradient)
        if part:
            self.scores[i].zero_().index_copy_(0, part.coordinates, target)  # type: ignore[index]
        gate = found[-1] if through else None
        return torch.zeros_like(self.logits[i]) if gate is None else gate

    def _prior(self, z: Tensor, gate_gradient: Tensor) -> Tensor:
        """Slab's pull on the weights, gradients of logits and slab precisions; returns the spike's pull (n, U)."""
        c, scales, rows = self.config, self.gating.scales, self.particles.rows  # type: ignore[union-attr]
        value, slab = scales.of(rows), scales.spread(self.log_slab).exp()
        prior = (value, self.logits, slab, c.epsilon)
        slab_pull, spike_pull = priors.precision_parts(*prior)  # type: ignore[arg-type]
        at = scales.coordinates
        self.prior_scores[:, at] = (slab_pull * (-self.strength) / scales.count)[..., None] * rows[:, at]
        slab_gradient = scales.module_sums(priors.log_slab_score(*prior))  # type: ignore[arg-type]
        self.log_slab.grad.copy_(slab_gradient).mul_(-c.beta * self.strength)  # type: ignore[union-attr]
        if self.phase == "soft":
            through_gates = gate_gradient * z * (1 - z) / self.knobs[1]
            prior_gradient = -c.beta * self.strength * priors.gate_score(*prior)  # type: ignore[arg-type]
            self.logits.grad.copy_(through_gates + prior_gradient + self._budget())  # type: ignore[union-attr]
            if self.target is not None:
                self.multiplier.add_(self.gap, alpha=c.dual_step)
        return spike_pull

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

    def _advance(self) -> None:
        """Equation 15 on the matrix."""
        c, rows = self.config, self.particles.rows
        weights: tuple[Tensor, ...] = ()
        if len(rows) > 1 and self.gating is not None:
            weights = stein.pair_weights(rows, num_data=self.num_data, bandwidth=c.bandwidth, blocks=self.blocks)
        index = self.blocks.index if isinstance(self.blocks, stein.BlockIndex) else None
        self.update(
            rows, self.particles.gradients, self.momentum, self.scores if self.gaussian else None,
            self.prior_scores if self.gating is not None and self.keep is None else None,
            weights, index, self.decay, self.moving, self.knobs[0],
            0.0 if self.gating is None else c.beta, c.momentum,
        )  # fmt: skip

    def _shrink_spike(self, pull: Tensor) -> None:
        """The spike's pull as a proximal step: stable however narrow the spike is (Section 1, stiffness)."""
        c, scales, rows = self.config, self.gating.scales, self.particles.rows  # type: ignore[union-attr]
        rate = c.beta * self.strength / (len(rows) * (1 - c.momentum))
        step = self.knobs[0] * rate * pull / scales.count
        rows[:, scales.coordinates] = priors.proximal_spike(rows[:, scales.coordinates], step[..., None])

    # ---- looking at it

    def cost(self) -> Tensor:
        """(n,) expected (soft) or true (discrete) cost over the dense cost."""
        if self.gating is None:
            return torch.ones(len(self.particles))
        cost = getattr(self.gating, self.budget)
        theta = self.logits.sigmoid() if self.keep is None else self.keep.to(self.logits.dtype)
        return cost.expected(theta) / cost.dense

    def _record(self, epoch: int, began: float) -> EpochRecord:
        loss, correct = (self.statistics / self.steps_per_epoch).tolist()  # waits for the device: now the time is true
        seconds = time.perf_counter() - began
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


def update_rows(
    rows: Tensor, gradients: Tensor, momentum: Tensor, scores: Tensor | None, prior_scores: Tensor | None,
    weights: tuple[Tensor, ...], index: Tensor | None, decay: Tensor, moving: Tensor, lr: Tensor,
    beta: float, inertia: float,
) -> None:  # fmt: skip
    """(n, P) matrices -> rows and momentum after theta_i - lr (grad CE_i - beta phi_i), with Nesterov momentum.

    Elementwise throughout, so that one kernel can do it all. `scores` None means that the likelihood is the task loss;
    `weights` are those of :func:`stein.pair_weights`, empty where a particle is alone.
    """
    score = -gradients if scores is None else scores * moving
    if prior_scores is not None:
        score = score + prior_scores
    phi = stein.combine(rows, score, *weights, index) if weights else score / len(rows) if beta else score
    step = (gradients - beta * phi + decay * rows) * moving
    velocity = inertia * momentum + step
    momentum.copy_(velocity)
    rows.sub_(lr * (step + inertia * velocity))
