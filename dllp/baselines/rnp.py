"""RNP: going up the layers, a decision network says how many of four groups of channels each image computes.

A decision process of one step for each layer. State: the mean over places of the layer's input, through an encoder of
the layer's own, and the hidden state of one recurrent cell that all layers share. Action i in 1..4 computes groups 1
to i; the first is always computed. Reward of action i: -price (i - 1), at the last layer also -alpha times the image's
cross-entropy, alpha such that this is -1 on average. Q(s, a) is drawn to r + max Q(s', .) by Huber's loss,
undiscounted. At evaluation the action with the largest Q is taken.

Training: the first `random` share of the epochs fine-tunes the network under random actions, so that the first groups
can stand alone; then each step moves the network by the cross-entropy and the decision network by its own loss, under
actions that are random with a probability that falls from 1 to 0.1 within half of the steps. No gradient passes from
one loss to the other's weights: the paper alternates longer stretches of both. The price rises while greedy actions
cost more than the budget and falls otherwise (dual ascent by `rate`, every 50 steps); what is left is met by a price
added to the choice, found by bisection on training images. Norms have one set of statistics, recomputed under the
final policy. `q_lr` is the decision network's learning rate, relative to that of all other weights.

The paper splits channels by position; here the first group has the filters with the largest l1 norms.
`fixed` = 1 to 4 computes so many groups for every image, without a decision network: a control.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from dllp.baselines.dynamic import ByImage, Chooses, Dynamic, Gate, Setup, Site, cheapest
from dllp.baselines.protocol import Published, check_range
from dllp.errors import ConfigError
from dllp.training.state import RunState

ACTIONS, ENCODED, HIDDEN = 4, 64, 128
EXPLORED = 0.1
"""Probability of a random action at the end."""
DUAL_STEPS = 50
"""Steps between two moves of the price."""
WATCHED = 256
"""Training images whose cost moves the price."""
STATISTICS = 100
"""Batches by which statistics of norms are recomputed."""
LOSS_RATE = 0.05
"""Of the running mean of the cross-entropy, whose inverse is alpha."""


class Policy(nn.Module):
    """The decision network: what all layers share of it, and the episode of the last forward pass.

    Attributes:
        explore: () probability of a random action in training; below 1 the decision network learns.
        fixed: Groups that every image computes; 0 decides.
        price: () of a group beyond the first, in the rewards.
        offset: The same, added to the choice at evaluation.
        mean_loss: () running mean of the cross-entropy, 0 before the first.
        values, actions: (B, 4) values and (B,) actions of each layer, 0 for the first group alone.
    """

    explore: Tensor
    price: Tensor
    mean_loss: Tensor

    def __init__(self, fixed: int, price: float) -> None:
        super().__init__()
        self.cell = nn.Identity() if fixed else nn.RNNCell(ENCODED, HIDDEN)
        self.decode = nn.Identity() if fixed else nn.Linear(HIDDEN, ACTIONS)
        self.fixed, self.offset = fixed, 0.0
        for name, value in (("explore", 1.0), ("price", price), ("mean_loss", 0.0)):
            self.register_buffer(name, torch.tensor(float(value)), persistent=False)
        self.state: Tensor | None = None
        self.values: list[Tensor] = []
        self.actions: list[Tensor] = []

    @property
    def macs(self) -> float:
        """Of one decision, its encoder aside."""
        return float(ENCODED * HIDDEN + HIDDEN * HIDDEN + HIDDEN * ACTIONS)

    def begin(self) -> None:
        """Start an episode."""
        self.state, self.values, self.actions = None, [], []

    def act(self, encoded: Tensor) -> Tensor:
        """(B, encoded) -> (B,) actions from 0 to 3."""
        if self.fixed:
            actions = torch.full((len(encoded),), self.fixed - 1, device=encoded.device)
        else:
            self.state = self.cell(encoded, self.state)
            self.values.append(self.decode(self.state))
            prices = self.offset * torch.arange(ACTIONS, device=encoded.device)
            actions = (self.values[-1].detach() - prices).argmax(1)
        if self.training:
            chance, drawn = torch.rand(len(actions), 2, device=actions.device).unbind(1)
            actions = torch.where(chance < self.explore, (drawn * ACTIONS).long().clamp_max(ACTIONS - 1), actions)
        self.actions.append(actions)
        return actions

    def watch(self, loss: Tensor) -> None:
        """Follow a () cross-entropy by the running mean."""
        rate = LOSS_RATE + (1 - LOSS_RATE) * (self.mean_loss == 0)
        self.mean_loss.lerp_(loss.detach().to(self.mean_loss), rate)

    def targets(self, losses: Tensor) -> list[Tensor]:
        """(B,) cross-entropies -> (B,) r + max Q(s', .) of each layer of the last episode."""
        rewards = [-self.price * action for action in self.actions]
        rewards[-1] = rewards[-1] - losses / self.mean_loss
        later = [values.detach().amax(1) for values in self.values[1:]]
        return [reward + value for reward, value in zip(rewards, [*later, torch.zeros_like(losses)], strict=True)]

    def loss(self, losses: Tensor) -> Tensor:
        """(B,) cross-entropies -> (): Huber's loss of the values of the actions taken, mean over layers and images."""
        taken = [v.gather(1, a[:, None])[:, 0] for v, a in zip(self.values, self.actions, strict=True)]
        return F.smooth_l1_loss(torch.stack(taken), torch.stack(self.targets(losses)))

    def raise_price(self, excess: float, rate: float) -> None:
        """Dual ascent: `excess` is the cost above the budget, as a share of the dense network's."""
        self.price.add_(rate * excess).clamp_(min=0)


class Nested(Gate):
    """Opens the first groups of a layer's units, as many as the policy says; `group` (units,) counts from 0."""

    group: Tensor

    def __init__(self, here: slice, sizes: Tensor, inputs: int, policy: Policy, first: bool) -> None:
        units = here.stop - here.start
        group = sizes.argsort(descending=True, stable=True).argsort(stable=True) * ACTIONS // units
        super().__init__(here, least=int((group == 0).sum()))
        self.encode = nn.Identity() if policy.fixed else nn.Linear(inputs, ENCODED)
        self.policy, self.first = policy, first
        self.register_buffer("group", group, persistent=False)
        self.macs = 0.0 if policy.fixed else inputs * ENCODED + policy.macs

    def choose(self, x: Tensor) -> None:
        if self.first:
            self.policy.begin()
        actions = self.policy.act(self.encode(x.detach().mean(2)))
        self.open = (self.group <= actions[:, None]).to(x.dtype)


@dataclass(frozen=True)
class RuntimePruning(Dynamic):
    """Groups of channels by a decision network that goes up the layers."""

    name = "rnp"
    title = "runtime neural pruning (RNP)"
    paper = "Lin et al., Runtime neural pruning"
    year = 2017
    published = (Published("vgg16_bn", 50, 0.85, rerun="an unnamed source"),)
    random: float = 1 / 3
    price: float = 0.1
    rate: float = 0.1
    q_lr: float = 0.1
    fixed: float = 0

    def __post_init__(self) -> None:
        check_range(price=self.price, rate=self.rate, q_lr=self.q_lr)
        check_range(1, random=self.random)
        if self.fixed not in range(ACTIONS + 1):
            raise ConfigError(f"fixed = {self.fixed:g}: give 1 to {ACTIONS} groups, or 0 to decide by image")

    def insert(self, network: nn.Module, sites: Sequence[Site], seed: int) -> list[Nested]:
        gates = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy = Policy(int(self.fixed), self.price)
            for site in sites:
                maker: Any = network.get_submodule(site.maker)
                sizes = maker.weight.detach().abs().flatten(1).sum(1)
                gate = Nested(site.here, sizes, maker.weight.shape[1], policy, first=not gates)
                network.set_submodule(site.maker, Chooses(maker, gate))
                gates.append(gate)
        return gates

    def fit(self, setup: Setup, epochs: int) -> ByImage:
        dense = setup.found.structure.flops.dense

        def loss(network: nn.Module, batch: Any) -> dict[str, Tensor]:
            x, y = batch
            logits = network(x)
            losses, policy = F.cross_entropy(logits, y, reduction="none"), policy_of(network)
            total = losses.mean()
            if not policy.fixed:
                policy.watch(total)
                total = total + (policy.explore < 1) * policy.loss(losses.detach())
            return {"loss": total, "logits": logits, "labels": y}

        def step(state: RunState) -> None:
            network = state.particles.networks[0]
            policy, since = policy_of(network), state.progress - self.random
            if since < 0 or self.random == 1:  # the last step, too
                policy.explore.fill_(1.0)
            elif policy.fixed:
                policy.explore.fill_(0.0)
            else:  # just below 1 the decision network learns
                policy.explore.fill_(max(EXPLORED, 1 - 1e-6 - 2 * since / (1 - self.random)))
                if state.step_index % DUAL_STEPS == 0:
                    cost = replace(setup.found, network=network).mean_cost(setup.inputs[:WATCHED])
                    policy.raise_price((cost - setup.budget) / dense, self.rate)

        own = {id(p) for gate in setup.found.gates for p in gate.parameters()}
        names = {name for name, p in setup.found.network.named_parameters() if id(p) in own}

        def groups(name: str, parameter: nn.Parameter) -> dict[str, float]:
            return {"lr": self.q_lr} if name in names else {}

        network = setup.train(setup.found.network, epochs, loss, start=step, step=step, groups=groups)
        found, policy = replace(setup.found, network=network), policy_of(network)
        if not policy.fixed:
            set_offset(found, setup.inputs, setup.budget)
        recompute_statistics(network, setup.batches)
        if not policy.fixed:
            set_offset(found, setup.inputs, setup.budget)
        return found


def policy_of(network: nn.Module) -> Policy:
    """The policy of a network."""
    return next(module for module in network.modules() if isinstance(module, Policy))


def set_offset(found: ByImage, inputs: Tensor, budget: float) -> None:
    """The least price in front of the choice at which the inputs' mean cost meets the budget."""
    policy = policy_of(found.network)

    def cost(offset: float) -> float:
        policy.offset = offset
        return found.mean_cost(inputs)

    highest = 1.0
    while cost(highest) > budget:
        highest *= 2
    policy.offset = cheapest(cost, budget, -highest, highest)


@torch.no_grad()
def recompute_statistics(network: nn.Module, batches: Any) -> None:
    """Statistics of norms as plain means over training batches, under the greedy policy."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for norm in norms:
        norm.train().reset_running_stats()
        norm.momentum = None
    for x, _ in islice(batches.epoch(0), STATISTICS):
        network(x)
    network.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
