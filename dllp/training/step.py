"""One step of Algorithm 1: Stein variational gradient descent on spike-and-slab particles (equations 14 and 15).

A run has three phases. `open`: every gate is 1 and the networks learn to see. `soft`: gates are relaxed and their
logits follow the objective and the budget's multiplier. `discrete`: the gates are decided, channel-gated networks
are sliced, and the same run goes on in the small shape.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dllp.config import Config
from dllp.devices import fuse, mesh, recompute, rounding, sync_batch_norm
from dllp.devices.mesh import Mirror, Place
from dllp.method import objective, priors, schedule, stein
from dllp.method.update import compiled_update, correct_rows, score_of, update_rows
from dllp.records import Phase
from dllp.structure.slicing import Fold
from dllp.structure.trace import explained
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.latents import Belief
from dllp.training.particles import Particles

T = TypeVar("T")


class Step:
    """The weights of a run, what they believe, and the step that changes both.

    Args:
        particles: The networks; `gating` None trains them as they are (the dense reference).
        config: A resolved configuration.
        num_data: N, the labels of the training set, or the numbers that a regression observes.
        total_steps: Fixes what progress in [0, 1] means.
        place: Which of all particles these are, and which part of a batch they see; by default everything.
    """

    def __init__(
        self, particles: Particles, gating: ChannelGating | WeightGating | None, config: Config, *,
        num_data: int, total_steps: int, place: Place | None = None,
    ) -> None:  # fmt: skip
        self.particles, self.gating, self.config, self.num_data = particles, gating, config, num_data
        self.total_steps, self.step_index, self.lr_scale = total_steps, 0, 1.0
        rows, device = particles.rows, particles.device
        self.place, self.share = place or Place(len(particles)), 1.0  # the batch's part that this process sees
        self.mirror: Mirror | None = None  # of other processes' particles, once the gates are discrete
        self.belief = Belief(gating, config, rows, num_data, self.place)
        self.lane = 8 if device.type == "cuda" else 1  # widths that tensor cores like
        self.fused = device.type == "cuda" and config.engine != "eager" and fuse.available()
        self.computing: list[nn.Module] = []  # what forward runs: the active networks, their norms fused where possible
        self.recompute = recompute.Recompute()
        self.stages = recompute.stages(particles.networks[0]) if config.recompute else []
        self.closed: list[tuple[Fold, Tensor]] = []  # folds and gates that close the padding of slices
        self.momentum = torch.zeros_like(rows)
        self.gaussian = config.likelihood == "gaussian"
        self.scores = torch.zeros_like(rows if self.gaussian else rows[:, :0])
        self.penalty: Callable[[Tensor], Tensor] | None = None  # (n, P) rows -> gradient of a regulariser
        self.knobs = rows.new_zeros(3)  # lr, temperature, ramp: read inside captured steps
        self.healthy = torch.ones((), dtype=torch.bool, device=device)
        self.statistics = torch.zeros(2, len(rows), device=device, dtype=torch.float64)  # sums of loss and of hits
        lengths = {"module": particles.layout.blocks, "all": None, "coordinate": "coordinate"}[config.blocks]
        lengths = lengths if gating is not None else None  # particles without gates do not interact
        self.blocks = stein.block_index(lengths, device) if isinstance(lengths, list) else lengths
        # masks of P or n P are kept in bytes: they are read in every step beside the weights themselves
        self.learnable = particles.layout.learnable(particles.networks[0]).to(device)
        self.moving = self.learnable.expand(len(rows), -1)  # (n, P): False where a weight stands still
        self.decayed, self.decay = self.belief.shrinkage(rows)
        # side by side particles are faster and need the memory of all: not where memory is what matters
        aside = device.type == "cuda" and len(rows) > 1 and config.accumulate == 1 and not config.recompute
        self.streams = [torch.cuda.Stream(device) for _ in rows] if aside else []
        # its inputs never change shape, so it is compiled once
        self.update = compiled_update() if device.type == "cuda" else update_rows

    # ---- where the run stands

    @property
    def progress(self) -> float:
        return self.step_index / self.total_steps

    @property
    def phase(self) -> Phase:
        return self.phase_at(self.step_index)

    def phase_at(self, step: int) -> Phase:
        """Of a step before the gates are decided; once they are, it is discrete."""
        if self.belief.keep is not None:
            return "discrete"
        return "open" if self.gating is None or step / self.total_steps < self.config.open_until else "soft"

    def prepare(self, x: Tensor) -> None:
        """What comes before a step: gates that are due are decided, knobs are set."""
        c = self.config
        if self.gating is not None and self.belief.keep is None and self.progress >= c.discrete_at:
            self.discretise(self.gating)
        if not self.computing:
            active = self.particles.active
            if c.sync_batch_norm and self.place.shards.size > 1:
                self.computing = sync_batch_norm.share(active, self.place.shards)
            else:
                self.computing = fuse.fuse(active, x[:16], self.stages) if self.fused else active
        self.set_knobs()

    def set_knobs(self) -> None:
        """Learning rate, temperature and budget of the step that comes."""
        c, p, target = self.config, self.progress, self.belief.target
        warmup, after = min(c.warmup / c.epochs, 0.5), (self.step_index + 1) / self.total_steps
        lr = schedule.learning_rate(after, peak=c.lr, end=c.lr_end, warmup=warmup) * self.lr_scale
        tau = schedule.temperature(p, start=c.tau_start, end=c.tau_end, until=c.discrete_at)
        ramp = schedule.budget_ramp(p, target=target or 1.0, begin=c.open_until, until=c.ramp_until)
        self.lr, self.tau, self.ramp = lr, tau, ramp
        self.knobs.copy_(torch.tensor([lr, tau, ramp], dtype=self.knobs.dtype), non_blocking=True)

    # ---- from soft gates to discrete ones

    def discretise(self, gating: ChannelGating | WeightGating) -> None:
        """Decide the gates. From here on only the slab moves, and what remains of the prior is a weight decay on it."""
        self.apply_decisions(gating, self.belief.decide())

    def apply_decisions(self, gating: ChannelGating | WeightGating, keep: Tensor) -> None:
        """Hold the gates at `keep` (n, U), and slice channel-gated networks."""
        particles = self.particles
        self.belief.rest(keep)
        pairs = zip(particles.networks, keep, strict=True)
        moving = [gating.slab_coordinates(network, particles.layout, row) for network, row in pairs]
        self.moving = torch.stack(moving).to(particles.device) & self.learnable
        self.momentum *= self.moving
        self.decayed, self.decay = self.belief.shrinkage(particles.rows)
        if isinstance(gating, ChannelGating):
            self._slice(gating, keep)

    def _slice(self, gating: ChannelGating, keep: Tensor) -> None:
        """Train the small networks from here on, their channels padded with closed ones to what the device likes."""
        padded = [gating.padded(row, logits, self.lane) for row, logits in zip(keep, self.belief.logits, strict=True)]
        networks = self.particles.networks
        wide = [gating.recipe(network, row) for network, row in zip(networks, padded, strict=True)]
        slab = [gating.recipe(network, row) for network, row in zip(networks, keep, strict=True)]
        self.particles.slice(wide, slab)
        self.computing = []
        if self.lane > 1:
            parts = zip(self.particles.sliced, padded, keep, strict=True)
            self.closed = [gating.closed(part.network, part.recipe, pad, row) for part, pad, row in parts]

    # ---- one step; nothing in it reads a value back to the host

    def step(self, x: Tensor, y: Tensor) -> None:
        """One update of all particles from one batch."""
        self.particles.begin_step()
        z = self._gates()
        through = self._backward(x, y, z)
        self.particles.collect_gradients()
        with torch.no_grad():
            if self.penalty is not None:
                self.particles.gradients.add_(self.penalty(self.particles.rows))
            total = self.particles.gradients.sum() + through.sum() + self.belief.d_noise.sum()
            self.healthy &= torch.isfinite(self.place.rows.add_(total))  # NaN and infinity survive every sum
            if self.gating is not None and self.belief.keep is None:
                self._step_with_prior(self.gating.scales.coordinates, z, through)
            else:
                self._advance()
            self.belief.update(self.healthy)

    def _gates(self) -> Tensor:
        """(n, U): relaxed gates while they are soft, decided gates for discrete weights, otherwise ones."""
        if self.phase == "soft":
            return self.belief.relaxed(self.knobs[1])
        if self.belief.keep is not None:
            return self.belief.keep.to(self.belief.logits.dtype)
        return torch.ones_like(self.belief.logits)

    def _each(self, work: Callable[[int], T]) -> list[T]:
        """work(i) for every particle; in a captured step each on a stream of its own, joined at the end.

        Not before: step by step the CPU cannot fill two streams, and memory freed on one does not serve the other.
        """
        if not self.streams or not torch.cuda.is_current_stream_capturing():
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
        network = self.computing[i]
        bf16 = self.config.precision == "bfloat16"
        # cast weights must not be cached: a captured graph would keep the first step's
        autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False)
        blocks = self.recompute(network, self.stages) if self.stages else nullcontext()
        with autocast, blocks, explained(x, cut=bool(self.particles.sliced)):
            weights: dict[str, Tensor] = {}
            if self.closed:
                fold, gate = self.closed[i]
                weights = fold(dict(network.named_parameters()), gate)
            elif self.gating is not None and self.phase != "open" and not self.particles.sliced:
                weights = self.gating.weights(dict(network.named_parameters()), z)
            if bf16:
                weights = rounding.early(network, weights)
            outputs = functional_call(network, weights, (x,), tie_weights=False) if weights else network(x)
        return outputs.float() if bf16 else outputs

    def _backward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Fill the gradient matrix, and `scores` with the likelihood's own; returns the gates' gradients (n, U)."""
        leaves = [row.detach().requires_grad_(self.phase == "soft") for row in z]
        # shards differ by one example at most: every process must find the same number of parts
        least = round(len(x) / self.share) // self.place.shards.size
        count = min(self.config.accumulate, max(1, least))
        parts = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
        found = [self._backward_part(a, b, leaves, len(a) / len(x), k > 0) for k, (a, b) in enumerate(parts)]
        losses, hits, noises, through = (reduce(torch.add, values) for values in zip(*found, strict=True))
        if self.place.shards.size > 1:
            losses, hits, noises, through = self._over_shards(losses, hits, noises, through)
        self.statistics[0] += losses
        self.statistics[1] += hits
        self.belief.d_noise.copy_(noises).neg_()  # whatever beta is: Adam takes no notice of a factor, 0 apart
        return through

    def _backward_part(self, x: Tensor, y: Tensor, leaves: list[Tensor], weight: float, add: bool) -> list[Tensor]:
        """Losses, hits and noise gradients (n,) and the gates' gradients (n, U) of a part of a batch, by its weight."""
        c = self.config
        together = c.task == "classification" and self.place.particles > 1 and c.mean_weight > 0
        ready = self._each(lambda i: self._forward(i, x, leaves[i])) if together else []
        mean = self._mean(ready) if together else None
        share = self.share * weight

        def work(i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            output, log_d = self._divided(ready[i] if together else self._forward(i, x, leaves[i]))
            loss = objective.task_loss(output, y, c.task)
            rest = objective.residuals(output, y, c.task)
            leaf = leaves[i : i + 1] if leaves[i].requires_grad else []
            extra = self._likelihood_scores(i, rest, leaf, share, add) if self.gaussian else None
            total = loss
            if mean is not None:
                total = (1 - c.mean_weight) * loss + c.mean_weight * objective.twin_loss(output, mean)
            if log_d is not None:
                total = total + c.beta * objective.head_loss(rest, log_d)
            found = self.particles.differentiate(i, scaled(total, share), *leaf, add=add)
            through = found[0] if found and found[0] is not None else torch.zeros_like(leaves[i])
            # a likelihood that is the task loss has beta times its gradient: one backward serves both (Section 3)
            through = through * (1 + c.beta) if extra is None else through - c.beta * extra
            with torch.no_grad():
                hits = (output.argmax(1) == y).double().mean() if c.task == "classification" else loss.new_zeros(())
                noise = objective.noise_gradient(rest, self.belief.log_d[i])
            return scaled(loss.detach(), weight), scaled(hits, weight), scaled(noise, weight), through

        return [torch.stack(values) for values in zip(*self._each(work), strict=True)]

    def _over_shards(self, losses: Tensor, hits: Tensor, noises: Tensor, through: Tensor) -> list[Tensor]:
        """Add up what all shards of the batch found: the gradients in place, and one message for all that is small."""
        shards, dtype = self.place.shards, self.particles.rows.dtype
        for gradient in (*self.particles.written(), *([self.scores] if self.gaussian else [])):
            shards.add_(gradient)
        small = [scaled(value, self.share).to(dtype) for value in (losses, hits, noises)]
        if self.phase == "soft":
            return mesh.merged([*small, through], shards)
        return [*mesh.merged(small, shards), through]

    def _divided(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs as predictions (B, C) and, where the noise depends on the input, log d(x) (B,)."""
        return objective.split_noise(outputs) if self.config.noise == "input" else (outputs, None)

    def _mean(self, outputs: list[Tensor]) -> Tensor:
        """(B, C): mean prediction of all particles, other processes' among them."""
        mean, rows = mean_prediction([self._divided(output)[0] for output in outputs]), self.place.rows
        return mean if rows.size == 1 else rows.add_(mean / rows.size)

    def _likelihood_scores(self, i: int, rest: Tensor, leaf: list[Tensor], share: float, add: bool) -> Tensor:
        """Gradients of equation 9 by a vector-Jacobian product of their own: parameters' into `scores`, gates' (U,).

        With the constant d even where a d(x) is learned: that one fits the residuals, and must not weigh them.
        """
        value = scaled(objective.gaussian_log_likelihood(rest, self.belief.log_d[i]), share)
        if self.config.task == "regression":
            value = value / rest.shape[1]  # every output is an observation, and N counts them
        found = self.particles.differentiate(i, value, *leaf, into=self.scores, retain_graph=True, add=add)
        return found[0] if found and found[0] is not None else torch.zeros_like(self.belief.logits[i])

    def _step_with_prior(self, at: Tensor, z: Tensor, through: Tensor) -> None:
        """Slab by its score, spike as a proximal step: stable however narrow it is (Section 1, stiffness)."""
        c, rows, lr, learnable = self.config, self.particles.rows, self.knobs[0], self.learnable[at]
        slab, spike = self.belief.prior_pulls(rows)
        pull = slab[..., None] * rows[:, at] * learnable  # minus the slab's score, which has no matrix of its own
        if self.phase == "soft":
            self.belief.gate_gradient(z, through, self.knobs[1], self.knobs[2])
        if self.gaussian:
            self.scores[:, at] -= pull
            self._advance()
        else:
            self.particles.gradients[:, at] += pull  # whose negative is then the score of the whole posterior
            self._advance()
            correct_rows(rows, self.momentum, at, pull, lr, self.healthy, c.momentum)
        share = c.beta / (self.place.particles * (1 - c.momentum))
        pull = lr * share * spike[..., None] * (learnable & self.healthy)
        rows[:, at] = priors.proximal_spike(rows[:, at], pull)

    def _advance(self) -> None:
        """Equations 14 and 15: kernel weights of every block, then one fused update."""
        c, rows, gradients = self.config, self.particles.rows, self.particles.gradients
        scores = self.scores if self.gaussian else None
        index = self.blocks.index if isinstance(self.blocks, stein.BlockIndex) else None
        weights: tuple[Tensor, Tensor] | tuple[()] = ()
        if self.gating is not None and self.place.rows.size > 1:
            scores = self._direction(score_of(gradients, scores, self.moving), index)
        elif self.gating is not None and len(rows) > 1:
            weights = self._pair_weights(rows)
        self.update(
            rows, gradients, self.momentum, scores, weights, index, self.decayed, self.moving, self.knobs[0],
            self.healthy, self.decay, 0.0 if self.gating is None else c.beta, c.momentum,
        )  # fmt: skip

    def _pair_weights(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        c, n = self.config, self.num_data
        rate = self.knobs[0] * (c.beta / (1 - c.momentum))  # what a gradient of one step adds up to
        reach = stein.step_reach(rate, len(rows), n)
        return stein.pair_weights(rows, num_data=n, bandwidth=c.bandwidth, blocks=self.blocks, reach=reach)

    def _direction(self, scores: Tensor, index: Tensor | None) -> Tensor:
        """Equation 14 for this process's rows, from everyone's rows and scores: one message."""
        rows, axis = self.particles.rows, self.place.rows
        if self.belief.keep is None:
            rows, scores = axis.join(torch.cat([rows, scores], dim=1)).chunk(2, dim=1)
        else:
            self.mirror = self.mirror or Mirror(axis, rows, self.moving)
            rows, scores = self.mirror(rows, scores)
        return stein.combine(rows, scores, *self._pair_weights(rows), index, self.place.own)


def scaled(mean: Tensor, share: float) -> Tensor:
    """The mean over a part of the batch as its share of the mean over all of it."""
    return mean if share == 1 else mean * share


def mean_prediction(outputs: list[Tensor]) -> Tensor:
    """n times (B, C) logits -> (B, C) mean probabilities, which take no gradient."""
    return torch.stack([output.detach().softmax(1) for output in outputs]).mean(0)
