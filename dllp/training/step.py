"""One step of Algorithm 1 as a function of the run's state: backward, prior, Stein direction, update.

The same step as :func:`dllp.method.algorithm1.step`, on matrices of all particles. Nothing in :func:`step` reads a
value back to the host, so that it can be captured as a CUDA graph; :func:`prepare` does what must happen before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dllp.devices import mesh, trees
from dllp.devices.mesh import Mirror
from dllp.method import likelihood, schedule, stein
from dllp.method.update import correct_rows, score_of
from dllp.training.forward import estimating, running_norms
from dllp.training.gating import ChannelGating, Scales
from dllp.training.moments import gates_now, measure
from dllp.training.objective import Outcome
from dllp.training.state import RunState
from dllp.training.teacher import Taught, mean_prediction, taught_loss

# ---- before a step


def prepare(state: RunState, x: Any, y: Any) -> None:
    """Decide gates that are due, and set learning rate, temperature and budget of the step that comes."""
    if state.gating is not None and state.latents.keep is None and state.progress >= state.config.discrete_at:
        decide(state, [(x, y)])
    state.forward.prepare(x, state.place.shards)
    state.lr = scheduled_lr(state)
    set_knobs(state)


def scheduled_lr(state: RunState) -> float:
    """Learning rate of the step that comes, by the configuration's schedule."""
    c = state.config
    warmup, after = min(c.warmup / c.epochs, 0.5), (state.step_index + 1) / state.total_steps
    end = min(c.lr_end, c.lr) if c.optimizer == "adamw" else c.lr_end
    return schedule.learning_rate(after, peak=c.lr, end=end, warmup=warmup) * state.lr_scale


def set_knobs(state: RunState) -> None:
    """Temperature and budget of the step that comes, beside its learning rate, for the host and the device."""
    c, target = state.config, state.latents.target
    state.tau = schedule.temperature(
        state.progress, start=schedule.TAU_START, end=schedule.TAU_END, until=c.discrete_at
    )
    state.ramp = schedule.budget_ramp(state.progress, target=target or 1.0, begin=c.open_until, until=c.ramp_until)
    known = [state.lr, state.tau, state.ramp, *state.host_corrections, state.step_index + 1]
    knobs = torch.tensor(known, dtype=state.knobs.dtype)
    state.knobs.copy_(knobs, non_blocking=True)


def decide(state: RunState, batches: Sequence[tuple[Any, Any]] = ()) -> None:
    """Decide the gates. From here on only the slab moves, and what remains of the prior is a weight decay on it.

    The networks before and after are measured with the norms' statistics of the batches, where any are given.
    """
    state.latents.set_threshold(state.latents.target or 1.0)
    keep = state.latents.decide()
    estimate_norms(state, batches)
    measure(state, "before", keep)
    apply_decisions(state, keep)
    estimate_norms(state, batches)
    measure(state, "after")


def estimate_norms(state: RunState, batches: Sequence[tuple[Any, Any]]) -> None:
    """Statistics of all batch norms from passes over the batches, with the gates as they are."""
    if not batches or not running_norms(state.particles.networks[0]):
        return
    z, device, shards = gates_now(state), state.particles.device, state.place.shards
    with torch.no_grad():
        state.particles.begin_step()  # small networks have the last step's weights, too
    state.forward.prepare(batches[0][0], shards)
    together = state.config.sync_batch_norm and shards.size > 1
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for i, row in enumerate(z):
            network = state.forward(i, row) if together else state.forward.unfused(i, row)
            # a loss of the user's own may take gradients
            with estimating(network), torch.set_grad_enabled(state.objective.loss is not None):
                for x, y in (part for batch in batches for part in _parts(state, *batch)):
                    state.objective(network, x, y)


def apply_decisions(state: RunState, keep: Tensor) -> None:
    """Hold the gates at `keep` (n, U), and slice channel-gated networks."""
    particles, gating = state.particles, state.gating
    if gating is None:
        return
    state.latents.rest(keep)
    pairs = zip(particles.networks, keep, strict=True)
    moving = [gating.slab_coordinates(network, particles.layout, row) for network, row in pairs]
    state.hold(torch.stack(moving).to(particles.device))
    state.momentum *= state.moving
    state.set_decay()
    if isinstance(gating, ChannelGating):
        state.forward.slice(gating, keep, state.latents.logits)


# ---- the step


def step(state: RunState, x: Any, y: Any) -> None:
    """Update all particles, and what is learned beside them, from one batch."""
    state.particles.begin_step()
    z = gates(state)
    advance(state, z, backward(state, x, y, z))


def advance(state: RunState, z: Tensor, through: Tensor) -> None:
    """Update from the gradients that a backward pass left, given the gates z and their gradients, (n, U) each."""
    particles, latents = state.particles, state.latents
    particles.collect_gradients()
    with torch.no_grad():
        if state.penalty is not None:
            particles.gradients.add_(state.penalty(particles.rows))
        total = particles.gradients.sum() + through.sum() + latents.d_noise.sum() + latents.logits.sum()
        state.sound.copy_(torch.isfinite(state.place.rows.all_reduce_(total)))  # NaN and infinity survive every sum
        state.healthy &= state.sound if state.loss_scale is None else state.loss_scale.update(state.sound)
        state.sound &= state.healthy
        if state.gating is not None and latents.keep is None:
            _advance_under_prior(state, state.gating.scales, z, through)
        else:
            _advance(state)
        latents.update(state.sound)


def gates(state: RunState) -> Tensor:
    """(n, U): relaxed gates while they are soft, decided gates for discrete weights, otherwise ones."""
    latents = state.latents
    if state.phase == "soft":
        return latents.relaxed(state.knobs[1], state.knobs[2])
    if latents.keep is not None:
        return latents.keep.to(latents.logits.dtype)
    return torch.ones_like(latents.logits)


def backward(state: RunState, x: Any, y: Any, z: Tensor) -> Tensor:
    """Fill the gradient matrix, and `scores` with the likelihood's own; returns the gates' gradients (n, U)."""
    leaves = [row.detach().requires_grad_(state.phase == "soft") for row in z]
    size, parts = trees.count(x), enumerate(_parts(state, x, y))
    found = [_backward_part(state, a, b, leaves, trees.count(a) / size, k > 0) for k, (a, b) in parts]
    losses, hits, noises, through = (reduce(torch.add, values) for values in zip(*found, strict=True))
    if state.place.shards.size > 1:
        losses, hits, noises, through = _over_shards(state, losses, hits, noises, through)
    if state.loss_scale is not None:
        state.loss_scale.unscale_(through, *state.particles.written(), *([state.scores] if state.gaussian else []))
    state.statistics[0] += losses
    state.statistics[1] += hits
    state.latents.d_noise.copy_(noises).neg_()  # whatever beta is: Adam takes no notice of a factor, 0 apart
    return through


def _parts(state: RunState, x: Any, y: Any) -> list[tuple[Any, Any]]:
    """A batch in the parts that go through the networks one after another, `accumulate` of them at most."""
    # shards differ by one example at most: every process must find the same number
    least = round(trees.count(x) / state.share) // state.place.shards.size
    count = min(state.config.accumulate, max(1, least))
    return list(zip(trees.split(x, count), [None] * count if y is None else y.tensor_split(count), strict=True))


def _backward_part(
    state: RunState, x: Any, y: Any, leaves: list[Tensor], weight: float, add: bool
) -> list[Tensor]:  # fmt: skip
    """Losses, hits and noise gradients (n,) and the gates' gradients (n, U) of a part of a batch, by its weight."""
    c, forward = state.config, state.forward
    gated = state.phase != "open"
    together = state.taught and state.teacher is None
    share = state.share * weight

    def outcome_of(i: int) -> Outcome:
        return state.objective(forward(i, leaves[i] if gated else None), x, y)

    ready = forward.each(outcome_of) if together else []
    taught = _teaching(state, x, y, ready)

    def work(i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = ready[i] if together else outcome_of(i)
        loss, residual = found.loss, found.residual
        leaf = leaves[i : i + 1] if leaves[i].requires_grad else []
        extra = None
        if state.gaussian and residual is not None:
            extra = _likelihood_scores(state, i, residual, leaf, share, add)
        total = loss
        if taught is not None:
            if state.teacher is not None:
                state.teacher.wait()
            total = taught_loss(found, taught, c)
        if found.log_d is not None and residual is not None:
            total = total + c.beta * likelihood.head_loss(residual, found.log_d)
        gradients = state.particles.differentiate(i, _magnified(state, _scaled(total, share)), *leaf, add=add)
        through = gradients[0] if gradients and gradients[0] is not None else torch.zeros_like(leaves[i])
        # a likelihood that is the task loss has beta times its gradient: one backward serves both (Section 3)
        through = through * (1 + c.beta) if extra is None else through - c.beta * extra
        with torch.no_grad():
            hits, noise = loss.new_zeros((), dtype=torch.float64), torch.zeros_like(state.latents.log_d[i])
            if found.scored and found.output is not None and found.labels is not None:
                hits = likelihood.hits(found.output, found.labels, c.task)
            if residual is not None:
                noise = likelihood.noise_gradient(residual, state.latents.log_d[i])
        return _scaled(loss.detach(), weight), _scaled(hits, weight), _scaled(noise, weight), through

    return [torch.stack(values) for values in zip(*forward.each(work), strict=True)]


def _over_shards(state: RunState, losses: Tensor, hits: Tensor, noises: Tensor, through: Tensor) -> list[Tensor]:
    """Sum what all shards of the batch found: the gradients in place, and one message for all that is small."""
    shards, dtype = state.place.shards, state.particles.rows.dtype
    for gradient in (*state.particles.written(), *([state.scores] if state.gaussian else [])):
        shards.all_reduce_(gradient)
    small = [_scaled(value, state.share).to(dtype) for value in (losses, hits, noises)]
    if state.phase == "soft":
        return mesh.merged([*small, through], shards)
    return [*mesh.merged(small, shards), through]


def _teaching(state: RunState, x: Any, y: Any, outcomes: Sequence[Outcome]) -> Taught | None:
    """The teacher's predictions for a batch, of all particles together where those teach; None without a teacher."""
    if not state.taught:
        return None
    if state.teacher is None:
        return mean_prediction(outcomes, state.config, state.place.rows)
    return state.teacher(state.objective, x, y)


def _likelihood_scores(
    state: RunState, i: int, residual: Tensor, leaf: list[Tensor], share: float, add: bool
) -> Tensor:
    """Gradients of equation 9 by a vector-Jacobian product of their own: parameters' into `scores`, gates' (U,).

    With the constant d even where a d(x) is learned: that one fits the residuals, and must not weigh them.
    """
    value = _scaled(likelihood.gaussian_log_likelihood(residual, state.latents.log_d[i]), share)
    if state.config.task == "regression":
        value = value / residual.shape[1]  # every output is an observation, and N counts them
    value = _magnified(state, value)
    found = state.particles.differentiate(i, value, *leaf, into=state.scores, retain_graph=True, add=add)
    return found[0] if found and found[0] is not None else torch.zeros_like(state.latents.logits[i])


def _advance_under_prior(state: RunState, scales: Scales, z: Tensor, through: Tensor) -> None:
    """Slab by its score, spike as a proximal step: stable however narrow it is (Section 1, stiffness)."""
    c, rows, n = state.config, state.particles.rows, state.place.particles
    values = scales.take(rows)
    sizes, soft = scales.of_values(values), state.phase == "soft"
    slab, spike = state.latents.prior_pulls(sizes, z, state.knobs[1], soft=soft)
    # minus the slab's score, which has no matrix of its own
    pull = _learning(state, scales.times(values, slab))
    if soft:
        state.latents.gate_gradient(sizes, z, through, state.knobs[1], state.knobs[2])
    if state.gaussian:
        scales.add(state.scores, pull, -1.0)
        _advance(state)
    else:
        _advance(state, scales, pull)
    lr = state.rate if state.rates is None else state.rate[scales.at]  # type: ignore[index]
    adam = c.optimizer == "adamw" and state.own_update is None
    # Adam's steps are means of gradients, over their root mean square
    reach = lr * (c.beta / (n if adam or state.own_update is not None else n * (1 - c.momentum)))
    pull = _learning(state, scales.at_coordinates(spike * state.sound))
    for at, part in scales.pieces:
        second = state.second[:, at] if adam else None
        near = rows[:, at]  # a view of a slice, a copy of indexed coordinates
        far = reach if state.rates is None else reach[part]  # type: ignore[index]
        state.shrink(near, pull[:, part], second, far, state.corrections[1])
        if not isinstance(at, slice):
            rows[:, at] = near


def _learning(state: RunState, values: Tensor) -> Tensor:
    """(n, K) -> (n, K): 0 where a gated weight stands still."""
    return values if state.frozen_units is None else values.masked_fill_(state.frozen_units, 0)


def _advance(state: RunState, scales: Scales | None = None, pull: Tensor | None = None) -> None:
    """Equations 14 and 15: kernel weights of every block, then one fused update.

    `pull` (n, K) at the coordinates of `scales` is minus the prior's score, of which the loss knows nothing.
    """
    c, rows, gradients = state.config, state.particles.rows, state.particles.gradients
    scores = state.scores if state.gaussian else None
    index = state.blocks.index if isinstance(state.blocks, stein.BlockIndex) else None
    weights: tuple[Tensor, Tensor] | tuple[()] = ()
    beta, decay = 0.0 if state.gating is None else c.beta, c.weight_decay or 0.0
    driven = c.optimizer == "adamw" or state.own_update is not None
    alone = scores is None and len(rows) == 1 and state.place.rows.size == 1
    if scales is not None and pull is not None and not (driven and alone):
        scales.add(gradients, pull)  # whose negative is then the score of the whole posterior
    if state.gating is not None and state.place.rows.size > 1:
        scores = _direction(state, score_of(gradients, scores, state.moving))
    elif state.gating is not None and len(rows) > 1:
        weights = stein.pair_weights(rows, **_kernel(state, len(rows)))
    if driven:
        if alone:  # whose direction is its own score; nobody needs its gradients any more
            drive = gradients.mul_(1 + beta)
        else:
            drive = torch.empty_like(gradients)
            state.drive(drive, rows, gradients, scores, weights, index, state.moving, beta)
        if scales is not None and pull is not None:
            scales.add(drive, pull, beta if alone else -1.0)
        if state.own_update is not None:
            return state.own_update(drive)
        state.adamw(
            rows, drive, state.momentum, state.second, state.decayed, state.moving, state.rate, state.corrections,
            state.sound, decay, c.momentum,
        )  # fmt: skip
        return None
    state.update(
        rows, gradients, state.momentum, scores, weights, index, state.decayed, state.moving, state.rate,
        state.sound, decay, beta, c.momentum,
    )  # fmt: skip
    if scales is not None and pull is not None:
        rate = state.rate if state.rates is None else state.rate[scales.at]  # type: ignore[index]
        correct_rows(rows, state.momentum, scales.at, pull, rate, state.sound, c.momentum)
    return None


def _kernel(state: RunState, particles: int) -> dict[str, Any]:
    """The options of :func:`dllp.method.stein.direction` for this step."""
    c, n = state.config, state.num_data
    # what a gradient of one step adds up to; a step of Adam is bounded by its rate, whatever the gradient
    rate = 0.0 if c.optimizer == "adamw" else state.knobs[0] * (c.beta / (1 - c.momentum))
    reach = stein.step_reach(rate, particles, n)
    return {"num_data": n, "bandwidth": c.bandwidth, "blocks": state.blocks, "reach": reach}


def _direction(state: RunState, scores: Tensor) -> Tensor:
    """Equation 14 for this process's rows, from everyone's rows and scores: one message."""
    rows, axis = state.particles.rows, state.place.rows
    if state.latents.keep is None:
        rows, scores = axis.all_gather(torch.cat([rows, scores], dim=1)).chunk(2, dim=1)
    else:
        state.mirror = state.mirror or Mirror(axis, rows, state.moving)
        rows, scores = state.mirror(rows, scores)
    return stein.direction(rows, scores, own=state.place.own, **_kernel(state, len(rows)))


def _magnified(state: RunState, value: Tensor) -> Tensor:
    """A value as large as a float16 backward pass can bear."""
    return value if state.loss_scale is None else value * state.loss_scale.factor


def _scaled(mean: Tensor, share: float) -> Tensor:
    """The mean over a part of the batch as its share of the mean over all of it."""
    return mean if share == 1 else mean * share
