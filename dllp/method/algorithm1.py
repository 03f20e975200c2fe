"""Algorithm 1 as one slow, obvious step: equations 9 to 15 by loops and autograd, to be read with the paper beside it.

This is the specification. A run takes the same step fused over the matrix of all particles (`dllp.training.step`, with
:mod:`dllp.method.update`), and is tested equal to this one after every step. Where the print is ambiguous or slips,
docs/method.md says how it is read; the budget on the gates, the momentum and the spike's proximal step are additions to
the print, and docs/method.md says why.

Every particle has weights Theta (a dict of tensors), gate logits (theta = sigmoid), one slab precision lambda for each
module, and one noise level d. The target is the mean log-posterior times N.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A network as pure functions of its weights and gates.

    Attributes:
        forward: (Theta, x, z (U,)) -> (B, C) logits, every unit multiplied by its gate.
        scales: Theta -> (U,): the values that the prior acts on.
        cost: theta (U,) -> (): expected cost over the dense cost.
        units: Units of each module; a module has one slab precision.
        ruled: Names of the weights that `scales` reads.
        slab_part: keep (U,) -> 1 where a coordinate belongs to the slab, 0 where it is removed, for each weight.
        blocks: Numbers of consecutive coordinates that share a kernel.
    """

    forward: Callable[[Weights, Tensor, Tensor], Tensor]
    scales: Callable[[Weights], Tensor]
    cost: Callable[[Tensor], Tensor]
    units: tuple[int, ...]
    ruled: tuple[str, ...]
    slab_part: Callable[[Weights, Tensor], Weights]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """Constants of a run. `strength` is 1/N, the prior's weight beside the mean likelihood; `leverage` the budget's."""

    num_data: int
    beta: float
    epsilon: float
    slab_bounds: tuple[float, float]
    likelihood: Literal["categorical", "gaussian"]
    bandwidth: Literal["median", "paper"] | float
    strength: float
    momentum: float
    weight_decay: float
    budget: bool
    sparsity: float
    gap_penalty: float
    dual_step: float
    leverage: float
    teacher_weight: float
    teacher_temperature: float
    optimizer: Literal["sgd", "adamw"] = "sgd"
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8


@dataclass
class State:
    """n particles, and what is learned beside their weights by Adam; `keep` (n, U) once the gates are decided.

    Of AdamW `velocity` is the mean gradient, and `square` that of its square after `steps` steps.
    """

    weights: list[Weights]
    velocity: list[Weights]
    logits: Tensor
    log_slab: Tensor
    log_d: Tensor
    multiplier: Tensor
    adam: torch.optim.Adam
    keep: Tensor | None = None
    square: list[Weights] = field(default_factory=list)
    steps: int = 0


@dataclass(frozen=True)
class Gates:
    """Gates of one step: n of (U,) each, with gradients in the logits.

    Attributes:
        z: What the networks run with. Open, relaxed (drawn, or medians), or decided; of single weights under a budget
            open or shut, with the gradient of the median.
        theta: In equation 10; of medians annealed as they are, sigma(logit / temperature).
        counted: In the budget: theta, or what the networks run with.
        sure: Every z is 0 or 1, and says itself whether a weight is of the slab or of the spike.
    """

    z: list[Tensor]
    theta: list[Tensor]
    counted: list[Tensor]
    sure: bool


def log_likelihood(logits: Tensor, y: Tensor, log_d: Tensor) -> Tensor:
    """(B, C), (B,), () -> (): equation 9, the mean over examples of log N(onehot(y); softmax f(x), d^-2 I)."""
    residual = F.one_hot(y, logits.shape[1]) - logits.softmax(1)
    return Normal(torch.zeros_like(log_d), torch.exp(-log_d)).log_prob(residual).sum(1).mean()


def log_prior(scale: Tensor, theta: Tensor, slab: Tensor, epsilon: float) -> Tensor:
    """(U,) -> (U,): equation 10, log of theta N(w; 0, lambda^-2) + (1 - theta) N(w; 0, epsilon^-2)."""
    zero = torch.zeros_like(slab)
    in_slab = theta.log() + Normal(zero, 1 / slab).log_prob(scale)
    in_spike = (1 - theta).log() + Normal(zero, torch.full_like(slab, 1 / epsilon)).log_prob(scale)
    return torch.logaddexp(in_slab, in_spike)


def log_posterior(likelihood: Tensor, prior: Tensor, strength: float) -> Tensor:
    """(), (U,) -> (): equation 11 up to a constant, over N: mean log-likelihood plus log-prior / N."""
    return likelihood + strength * prior.sum()


def objective(loss: Tensor, posterior: Tensor, energy: Tensor, beta: float) -> Tensor:
    """() -> (): equation 13, the loss plus beta KL(q || p), and the budget's energy -log p(gates).

    Of the KL only -E_q log p depends on gates, lambda and d, which follow this plain gradient (equation 12's min max as
    empirical Bayes). Its gradient in the weights, entropy included, is the Stein direction of equation 14.
    """
    return loss - beta * posterior + energy


def median_bandwidth(x: Tensor, least: float) -> float:
    """(n, D) -> h = med^2 / log n, med the median distance of pairs, none of them counted as below `least`."""
    distances = sorted(max(float((x[i] - x[j]).norm()), least) for i in range(len(x)) for j in range(i))
    half = len(distances) // 2
    median = distances[half] if len(distances) % 2 else (distances[half - 1] + distances[half]) / 2
    return median**2 / math.log(len(x))


def stein_direction(
    x: Tensor, scores: Tensor, num_data: float, bandwidth: Literal["median", "paper"] | float, least: float = 0.0
) -> Tensor:
    """(n, D), (n, D) -> (n, D): equation 14, phi_i = (1/n) sum_j [k(x_j, x_i) s_j + (1/N) grad_{x_j} k(x_j, x_i)]."""
    n = len(x)
    if n == 1:
        return scores
    h = {"median": lambda: median_bandwidth(x, least), "paper": lambda: math.log(2)}.get(
        str(bandwidth), lambda: float(bandwidth)
    )()
    rows = []
    for i in range(n):
        total = torch.zeros_like(x[i])
        for j in range(n):
            other = x[j].clone().requires_grad_()
            k = torch.exp(-((other - x[i]) ** 2).sum() / h)
            (repulsion,) = torch.autograd.grad(k, other)
            total = total + k.detach() * scores[j] + repulsion / num_data
        rows.append(total / n)
    return torch.stack(rows)


def step(
    state: State, network: Network, c: Settings, x: Tensor, y: Tensor, gates: Gates, *, lr: float, ramp: float,
    soft: bool, teacher: Tensor | None = None,
) -> None:  # fmt: skip
    """One update of every particle from a batch (x, y), given its gates, which learn while they are `soft`.

    `teacher` (B, C) holds the logits of a network that teaches; n > 1 particles without one are taught by their mean.
    """
    n, discrete = len(state.weights), state.keep is not None
    free = [{name: w.clone().requires_grad_() for name, w in theta.items()} for theta in state.weights]
    outputs = [network.forward(theta, x, gate) for theta, gate in zip(free, gates.z, strict=True)]
    temperature = c.teacher_temperature
    teachers = outputs if teacher is None else [teacher]
    taught = torch.stack([(output / temperature).softmax(1) for output in teachers]).mean(0).detach()
    weight = c.teacher_weight if n > 1 or teacher is not None else 0.0
    losses, scores, spikes = [], [], []
    total, noise = torch.zeros((), dtype=x.dtype), torch.zeros((), dtype=x.dtype)
    gaps = torch.zeros(n, dtype=x.dtype)
    for i, (theta, output) in enumerate(zip(free, outputs, strict=True)):
        names = list(theta.values())
        imitation = -(temperature**2) * (taught * (output / temperature).log_softmax(1)).sum(1).mean()
        loss = (1 - weight) * F.cross_entropy(output, y) + weight * imitation
        gaussian = log_likelihood(output, y, state.log_d[i])
        likelihood = gaussian if c.likelihood == "gaussian" else -loss
        losses.append(_gradients(loss, names))
        score = _gradients(likelihood, names)
        prior, energy = torch.zeros(1, dtype=x.dtype), torch.zeros((), dtype=x.dtype)
        if not discrete:
            scale, slab = network.scales(theta), _at_units(state.log_slab[i], network).exp()
            known = gates.z[i].detach() if gates.sure else gates.theta[i]
            prior = log_prior(scale, known, slab, c.epsilon)
            if gates.sure and soft:  # lambda follows the gates as they are, and the gates their theta
                prior = prior + log_prior(scale.detach(), gates.theta[i], slab.detach(), c.epsilon)
            slab_part, spike_part = _responsible(scale, known, slab, c.epsilon)
            score = [s + c.strength * g for s, g in zip(score, _gradients(slab_part.sum(), names), strict=True)]
            # the spike's score is linear in a coordinate, -pull times it: its stiff pull is taken implicitly below
            spike_scores = _gradients(spike_part.sum(), names)
            spikes.append([-g / w.detach() for g, w in zip(spike_scores, names, strict=True)])
        if soft:
            cost = network.cost(gates.counted[i])
            gap = cost - ramp
            constrained = state.multiplier[i] * cost + c.leverage * c.gap_penalty * gap**2
            energy, gaps[i] = (constrained, gap.detach()) if c.budget else (c.sparsity * cost, 0.0)
        total = total + objective(loss, log_posterior(likelihood, prior, c.strength), energy, c.beta)
        noise = noise - gaussian
        scores.append(score)
    _learn_latents(state, c, total, noise, soft=soft)
    if soft and c.budget:
        state.multiplier = (state.multiplier + c.leverage * c.dual_step * gaps).clamp(
            min=0.0 if gates.sure else -math.inf
        )
    _update(state, network, c, losses, scores, lr)
    for i, (theta, pulls) in enumerate(zip(state.weights, spikes, strict=False)):
        for name, pull in zip(theta, pulls, strict=True):
            # summed up to 1 / (1 - momentum), as the velocity would; of AdamW preconditioned as its steps are
            scale = 1 / _root(state, c, i, name) if c.optimizer == "adamw" else 1 / (1 - c.momentum)
            theta[name] = theta[name] / (1 + lr * c.beta * c.strength / n * scale * pull)


def _responsible(scale: Tensor, theta: Tensor, slab: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(U,) -> (U,), (U,): log N of slab and spike by responsibility; their gradients add up to equation 10's."""
    zero = torch.zeros_like(slab)
    in_slab = Normal(zero, 1 / slab).log_prob(scale)
    in_spike = Normal(zero, torch.full_like(slab, 1 / epsilon)).log_prob(scale)
    r = torch.stack([theta.log() + in_slab, (1 - theta).log() + in_spike]).softmax(0).detach()
    return r[0] * in_slab, r[1] * in_spike


def _learn_latents(state: State, c: Settings, total: Tensor, noise: Tensor, *, soft: bool) -> None:
    """One step of Adam on the objective for gate logits (while soft) and lambda, and on equation 9 for d."""
    state.adam.zero_grad()
    (state.log_d.grad,) = torch.autograd.grad(noise, state.log_d, retain_graph=True)
    if state.keep is None:
        (state.log_slab.grad,) = torch.autograd.grad(total, state.log_slab, retain_graph=True)
    if soft:
        (state.logits.grad,) = torch.autograd.grad(total, state.logits)
    state.adam.step()
    state.log_slab.data.clamp_(math.log(c.slab_bounds[0]), math.log(c.slab_bounds[1]))


def _update(
    state: State, network: Network, c: Settings, losses: list[list[Tensor]], scores: list[list[Tensor]], lr: float
) -> None:
    """Equation 15, Theta_i <- Theta_i - lr (grad loss_i - beta phi_i), with Nesterov's momentum or Adam's moments.

    Weight decay acts where no prior does; once the gates are decided what was removed stands still.
    """
    phi = _directions(state, network, c, scores, lr)
    state.steps += 1
    for i, theta in enumerate(state.weights):
        part = None if state.keep is None else network.slab_part(theta, state.keep[i])
        for k, name in enumerate(theta):
            shrinkage = c.weight_decay * theta[name]
            if name in network.ruled and state.keep is None:
                shrinkage = torch.zeros_like(theta[name])
            change, slab = losses[i][k] - c.beta * phi[i][k], 1 if part is None else part[name]
            if c.optimizer == "adamw":
                change = change * slab
                state.velocity[i][name] = c.momentum * state.velocity[i][name] + (1 - c.momentum) * change
                state.square[i][name] = c.adam_beta2 * state.square[i][name] + (1 - c.adam_beta2) * change**2
                mean = state.velocity[i][name] / (1 - c.momentum**state.steps)
                theta[name] = theta[name] - slab * lr * (shrinkage + mean / _root(state, c, i, name))
                continue
            change = (change + shrinkage) * slab
            state.velocity[i][name] = c.momentum * state.velocity[i][name] + change
            theta[name] = theta[name] - lr * (change + c.momentum * state.velocity[i][name])


def _root(state: State, c: Settings, i: int, name: str) -> Tensor:
    """Adam's preconditioner of a weight: the root of its mean squared gradient, corrected for its start at 0."""
    return (state.square[i][name] / (1 - c.adam_beta2**state.steps)).sqrt() + c.adam_epsilon


def _directions(
    state: State, network: Network, c: Settings, scores: list[list[Tensor]], lr: float
) -> list[list[Tensor]]:
    """Equation 14 in each block of coordinates.

    No bandwidth is of a distance that one step along the repulsion, summed up by momentum, would double; steps of AdamW
    are bounded by themselves.
    """
    shapes = [w.shape for w in state.weights[0].values()]
    x = torch.stack([torch.cat([w.flatten() for w in theta.values()]) for theta in state.weights])
    s = torch.stack([torch.cat([g.flatten() for g in row]) for row in scores])
    n = len(x)
    rate = 0.0 if c.optimizer == "adamw" else lr * c.beta / (1 - c.momentum)
    least = math.sqrt(rate * math.log(n) / c.num_data)
    parts = zip(x.split(network.blocks, 1), s.split(network.blocks, 1), strict=True)
    rows = torch.cat([stein_direction(a, b, c.num_data, c.bandwidth, least) for a, b in parts], 1)
    sizes = [shape.numel() for shape in shapes]
    return [[v.view(shape) for v, shape in zip(row.split(sizes), shapes, strict=True)] for row in rows]


def _at_units(values: Tensor, network: Network) -> Tensor:
    """(modules,) -> (U,): each module's value at its units."""
    return values.repeat_interleave(torch.tensor(network.units))


def _gradients(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a scalar, zero where it does not depend on an input."""
    found = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g.detach() for g, w in zip(found, inputs, strict=True)]
