"""AutoML for model compression (AMC): an agent decides how much of each layer stays, paid with accuracy after the cut.

An episode walks the groups from input to output. The state of a group is 11 numbers, scaled to [0, 1] over the groups:
index, outputs, inputs, height, width, stride, kernel, FLOPs of the layer, FLOPs removed so far, FLOPs of the layers to
come, the last action. The action a in (0, 1] is the share that stays, lowered to what leaves the budget reachable if
every later group goes to the least share. Units with the largest sum |w| in the layers that read them stay, these
layers are refitted by least squares to the uncut network's outputs, and every step of the episode is paid with
-error. The best episode's shares are cut.

The agent is DDPG: actor mu and critic Q with targets mu', Q' that follow by 0.01; with b a running mean of rewards,

    y = r - b + (1 - done) Q'(s', mu'(s')),  Q minimises (Q(s, a) - y)^2, mu maximises Q(s, mu(s)).

Hyperparameters: `episodes` 400, the first `warmup` 100 of them at random; `images`, the training pairs that rewards are
measured on; the others are constants below, as in the authors' code.
Differences: rewards are of (augmented) training images, because the network that is given has been trained on all of
them: they are flatter than those of held-out images, and order strategies all the same; test images are never seen.
Actions are of groups of coupled channels in place of single layers, and the bound counts their cost exactly. Layers
with more than 1,152 inputs to fit are scaled channel by channel within an episode, and fitted whole at the end.
The agent is no sure gain over a random search: of ten fresh seeds of a small problem (200 episodes, 50 of them at
random; results/tuning) seven found a better network than 200 random episodes, two an equal one, one a worse one.
Published (the method's own): ResNet-56 on CIFAR-10, 0.9 lost at 50% fewer FLOPs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.baselines.protocol import Published, Scene, check_range
from dllp.baselines.reconstruction import (
    ChannelPruning,
    Sample,
    ThiNet,
    by_unit,
    consumers,
    flat_weight,
    observe,
    rebuild,
)
from dllp.posterior import evaluating
from dllp.structure.slicing import copied

LEAST = 0.2
"""Share of each group that stays, where the budget allows it."""
HIDDEN, LR_ACTOR, LR_CRITIC, FOLLOW = 300, 1e-4, 1e-3, 0.01
BATCH, MEMORY, BASELINE = 64, 100, 0.5
"""Steps of an update, episodes that are remembered, rate of the running mean of rewards."""
NOISE, COOLING = 0.5, 0.95
"""Deviation of the noise after the warm-up, and its factor with each episode."""
FITTED = 1152
"""Most inputs of a layer, times its kernel, that are fitted within an episode."""
Reward = Callable[[Sequence[int]], float]
"""Units of each group that stay -> what an episode is paid."""


@dataclass(frozen=True)
class AutoCompression(ChannelPruning):
    """As many units of each layer as an agent has learned to keep; what reads them is refitted by least squares."""

    name = "amc"
    title = "AutoML for model compression (AMC)"
    paper = "He et al., AMC: AutoML for model compression and acceleration on mobile devices"
    year = 2018
    published = (Published("resnet56", 50, 0.9),)
    labelled = True
    episodes: float = 400
    warmup: float = 100
    images: float = 5000

    def __post_init__(self) -> None:
        check_range(warmup=self.warmup)
        check_range(1e9, 1, episodes=self.episodes, images=self.images)

    def scores(self, scene: Scene) -> Tensor:
        order = magnitudes(scene)
        reward = Network(scene, order, int(self.images))
        best, _ = search(Walk(scene), reward, int(self.episodes), int(self.warmup))
        return scene.chosen(order, best)


def search(walk: Walk, reward: Reward, episodes: int, warmup: int) -> tuple[list[int], float]:
    """The best episode: units of each group that stay, and what it was paid."""
    with torch.random.fork_rng(devices=()):  # the agent lives on the CPU, the same on every device
        torch.manual_seed(walk.scene.config.seed)
        agent = Agent(walk.features.shape[1] + 3, MEMORY * walk.steps)
        known: dict[tuple[int, ...], float] = {}
        for episode in range(episodes):
            sigma = None if episode < warmup else NOISE * COOLING ** (episode - warmup)
            states, actions = walk.episode(lambda state, sigma=sigma: agent.act(state, sigma))
            counts = tuple(walk.counts)
            if counts not in known:
                known[counts] = reward(counts)
            paid = known[counts]
            agent.remember(states, actions, paid)
            if episode >= warmup:
                for _ in range(walk.steps):
                    agent.learn()
    best = max(known, key=known.__getitem__)
    return list(best), known[best]


# ---- the walk over the groups


class Walk:
    """Groups from input to output, their states, and the bound of each action.

    Attributes:
        features: (groups, 8) of the state that no action changes.
        counts: Units of each group that stay, as far as the episode has come; the least beyond.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene, self.units = scene, [group.units for group in scene.structure.groups]
        self.steps, self.budget = len(self.units), scene.config.budget[1] or 1.0
        self.least = [min(max(1, int(LEAST * n)), even) for n, even in zip(self.units, scene.even(), strict=True)]
        self.counts = list(self.least)
        features, self.macs = group_features(scene)
        self.features = torch.cat([features, self.macs[:, None]], dim=1)
        self.features = self.features / self.features.amax(0).clamp_min(1e-12)

    def episode(self, act: Callable[[Tensor], float]) -> tuple[Tensor, Tensor]:
        """(groups, state) and (groups,) of one walk; `act` answers a state by the share that it wants to keep."""
        self.counts = list(self.least)
        states, actions, last = [], [], 1.0
        for step in range(self.steps):
            whole = [*self.counts[:step], *self.units[step:]]
            removed = 1 - float(self.scene.cost(self.scene.first(whole)))
            to_come = float(self.macs[step + 1 :].sum() / self.macs.sum().clamp_min(1e-12))
            state = torch.cat([self.features[step], torch.tensor([removed, to_come, last])])
            self.counts[step] = self.bounded(step, act(state))
            last = self.counts[step] / self.units[step]
            states.append(state)
            actions.append(last)
        return torch.stack(states), torch.tensor(actions)

    def bounded(self, step: int, action: float) -> int:
        """Units of a group for an action in (0, 1]: as many as it wants, or the most that the budget allows."""
        least, wanted = self.least[step], max(self.least[step], round(action * self.units[step]))
        options = torch.arange(least, wanted + 1)
        tried = self.scene.first(self.counts).repeat(len(options), 1)
        tried[:, self.scene.structure.slices[step]] = torch.arange(self.units[step]) < options[:, None]
        fits = self.scene.cost(tried) <= self.budget * (1 + 1e-12)
        return least + max(0, int(fits.sum()) - 1)


def group_features(scene: Scene) -> tuple[Tensor, Tensor]:
    """(groups, 7): index, outputs, inputs, height, width, stride, kernel of each group's layer; (groups,) its FLOPs."""
    shapes: dict[nn.Module, torch.Size] = {}
    names = [group.name.partition(":")[0] for group in scene.structure.groups]
    modules = [scene.network.get_submodule(name) for name in names]

    def look(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        shapes[module] = output.shape

    with ExitStack() as stack, evaluating(scene.network), torch.no_grad():
        for module in modules:
            stack.callback(module.register_forward_hook(look).remove)
        scene.network(scene.inputs[:1])
    macs, rows = {layer.name: layer.macs for layer in scene.structure.layers}, []
    for k, module in enumerate(modules):
        weight = dict(module.named_parameters(recurse=False)).get("weight", nn.Parameter(torch.empty(1, 1)))
        sides = list(shapes[module][2:]) if len(shapes[module]) == 4 else [1, 1]
        stride = getattr(module, "stride", 1)
        stride, kernel = stride if isinstance(stride, int) else stride[0], math.prod(weight.shape[2:])
        rows.append([k, len(weight), weight[0].numel() / kernel, *sides, stride, kernel])
    return torch.tensor(rows, dtype=torch.float32), torch.tensor([float(macs.get(name, 0.0)) for name in names])


# ---- the network that pays


def magnitudes(scene: Scene) -> Tensor:
    """(U,): sum |w| over the inputs that read each unit; of its filters where no plain layer reads it."""
    made, parts = scene.filter_matrix().abs().sum(1).double().cpu(), []
    for group, here in zip(scene.structure.groups, scene.structure.slices, strict=True):
        readers = consumers(scene, group)
        sizes = {name: flat_weight(scene.network.get_submodule(name)).abs().sum((0, 2)) for name in readers}
        read = [by_unit(sizes[name].double().cpu(), unit, group.units) for name, unit in readers.items()]
        parts.append(torch.stack(read).sum(0) if read else made[here])
    return torch.cat(parts)


class Network:
    """The uncut network with zeros in place of what goes, refitted, and its accuracy on training pairs, less 1."""

    def __init__(self, scene: Scene, order: Tensor, images: int) -> None:
        self.scene, self.order = scene, order
        self.pairs = list(scene.examples(images))
        self.readers = [consumers(scene, group) for group in scene.structure.groups]
        named = {name for found in self.readers for name in found}
        self.names = [layer.name for layer in scene.structure.layers if layer.name in named]
        self.network = copied(scene.network).eval().requires_grad_(False)
        self.wanted = observe(scene.network, self.names, scene.inputs)

    @torch.no_grad()
    def __call__(self, counts: Sequence[int]) -> float:
        keep = self.scene.largest(self.order, counts)
        stays = self._inputs(keep)
        self.network.load_state_dict(self.scene.network.state_dict())
        for name, mine in stays.items():
            weight = self.network.get_parameter(f"{name}.weight")
            weight.mul_(mine.view(1, -1, *[1] * (weight.dim() - 2)))
        rebuild(self.network, self.names, self.scene.inputs, lambda name, seen: self._fit(name, seen, stays[name]))
        hits = sum(float((self.network(x).argmax(1) == y).sum()) for x, y in self.pairs)
        return hits / sum(len(x) for x, _ in self.pairs) - 1

    def _inputs(self, keep: Tensor) -> dict[str, Tensor]:
        """bool (I,) for each reader: the inputs that stay."""
        result: dict[str, Tensor] = {}
        for found, part in zip(self.readers, keep.split([g.units for g in self.scene.structure.groups]), strict=True):
            for name, unit in found.items():
                mine = torch.cat([part, torch.tensor([True])])[unit].to(self.scene.inputs.device)
                result[name] = result[name] & mine if name in result else mine
        return result

    def _fit(self, name: str, seen: Sample, mine: Tensor) -> None:
        if bool(mine.all()):
            return
        weight, part = self.network.get_parameter(f"{name}.weight"), nn.Module()
        part.weight = nn.Parameter(weight[:, mine], requires_grad=False)
        method = ChannelPruning() if part.weight[0].numel() <= FITTED else ThiNet()
        method.fit(part, seen.patches[:, mine], self.wanted[name].outputs)
        weight[:, mine] = part.weight


# ---- the agent


class Critic(nn.Module):
    """Q of states (B, S) and actions (B, 1)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.state, self.action = nn.Linear(size, HIDDEN), nn.Linear(1, HIDDEN)
        self.hidden, self.value = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        return self.value(self.hidden((self.state(state) + self.action(action)).relu()).relu())


class Agent:
    """DDPG with a memory of so many steps of states of so many numbers."""

    def __init__(self, size: int, memory: int) -> None:
        layers = nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        self.actor, self.critic = nn.Sequential(*layers, nn.Sigmoid()), Critic(size)
        self.targets = copy.deepcopy((self.actor, self.critic))
        self.to_act = torch.optim.Adam(self.actor.parameters(), LR_ACTOR, fused=True)
        self.to_judge = torch.optim.Adam(self.critic.parameters(), LR_CRITIC, fused=True)
        self.parts, self.most = (size, 1, 1, size, 1), memory
        self.memory = torch.empty(0, sum(self.parts))
        self.baseline: float | None = None

    @torch.no_grad()
    def act(self, state: Tensor, sigma: float | None) -> float:
        """A share in [0, 1]: at random without sigma, else the actor's with normal noise, truncated to [0, 1]."""
        uniform = torch.rand(())
        if sigma is None:
            return float(uniform)
        mean = self.actor(state[None])[0, 0]
        low, high = torch.special.ndtr((torch.tensor([0.0, 1.0]) - mean) / sigma)
        noisy = mean + sigma * torch.special.ndtri(low + uniform * (high - low))
        return float(noisy.clamp(0, 1) if noisy.isfinite() else mean)

    def remember(self, states: Tensor, actions: Tensor, paid: float) -> None:
        """(steps, S) and (steps,) of an episode, every step of which is paid the same."""
        following = torch.cat([states[1:], states[-1:]])
        done = torch.arange(len(states)) == len(states) - 1
        rewards = torch.full((len(states), 1), paid)
        rows = torch.cat([states, actions[:, None], rewards, following, done[:, None]], dim=1)
        self.memory = torch.cat([self.memory, rows])[-self.most :]

    def learn(self) -> None:
        """One step of critic and actor on a random part of the memory."""
        drawn = self.memory[torch.randint(len(self.memory), (BATCH,))]
        state, action, paid, after, done = drawn.split(self.parts, dim=1)
        mean = float(paid.mean())
        self.baseline = mean if self.baseline is None else self.baseline + BASELINE * (mean - self.baseline)
        loss = F.mse_loss(self.critic(state, action), self.wanted(paid, after, done))
        self.to_judge.zero_grad()
        loss.backward()
        self.to_judge.step()
        value = -self.critic(state, self.actor(state)).mean()
        self.to_act.zero_grad()
        value.backward()
        self.to_act.step()
        with torch.no_grad():
            for target, source in zip(self.targets, (self.actor, self.critic), strict=True):
                for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
                    slow.lerp_(fast, FOLLOW)

    @torch.no_grad()
    def wanted(self, paid: Tensor, after: Tensor, done: Tensor) -> Tensor:
        """(B, 1): what the critic should answer; nothing follows the last step of an episode."""
        actor, critic = self.targets
        return paid - (self.baseline or 0.0) + (1 - done) * critic(after, actor(after))
