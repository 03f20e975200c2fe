"""FBS: the saliency of each channel is predicted from the input of its layer, and the most salient ones are computed.

With s(x) the mean of |x| over places of each input channel, g = relu(A s + b) and pi = g on its k = ceil(d C) largest
entries, 0 elsewhere, a layer gives relu(pi * norm(conv(x)) + [pi > 0] * shift): pi stands for the norm's scale. Which
entries win takes no gradient, their values do. The loss has `strength` times the sum of |g| beside the cross-entropy.

k is the same for all images, so that d, the same for every layer, follows from the budget before training. A and b
start as the norm's scale times a small random matrix (std 0.05) and 1: the network starts about where it was. d falls
from 1 to its value in the first half of the epochs; the paper lowers it in steps. Where a channel's g is 0 it is not
computed even if it wins, but for the first one of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllp.baselines.dynamic import ByImage, Chooses, Dynamic, Gate, Setup, Site, Wrapper, cheapest, unwrapped
from dllp.baselines.protocol import Published, check_range
from dllp.training.state import RunState

SPREAD = 0.05
"""Standard deviation of the first predictors, relative to the scale that they predict."""


class Saliency(Gate):
    """Predicts the saliency of every unit; the `count` largest are open.

    Attributes:
        count: () a number of units.
        boost: (B, units) pi, with its gradient.
        size: () sum of g, mean over images.
    """

    count: Tensor

    def __init__(self, here: slice, inputs: int, scale: Tensor, generator: torch.Generator) -> None:
        super().__init__(here)
        self.predict = nn.Linear(inputs, self.units).to(scale.dtype)
        with torch.no_grad():
            random = torch.randn(self.units, inputs, generator=generator).to(scale)
            self.predict.weight.copy_(SPREAD * random * scale[:, None])
            self.predict.bias.copy_(scale)
        self.register_buffer("count", torch.tensor(self.units), persistent=False)
        self.macs = float(inputs * self.units)
        self.boost, self.size = self.open, torch.zeros(())

    def choose(self, x: Tensor) -> None:
        g = F.relu(self.predict(x.abs().mean(2)))
        order = g.argsort(dim=1, descending=True, stable=True)
        wins = (torch.arange(self.units, device=g.device) < self.count).to(g.dtype)
        self.open = torch.zeros_like(g).scatter_(1, order, wins.expand_as(g)) * (g > 0)
        self.open = self.open.scatter(1, order[:, :1], 1.0).detach()
        self.boost, self.size = g * self.open, g.sum(1).mean()


class Boosts(Wrapper):
    """A norm, or a layer without one, whose outputs are scaled by the saliencies of its gate."""

    gate: Saliency

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = unwrapped(self.module)
        y, shift = self.module(x), layer.bias
        shape = (len(y), -1, *[1] * (y.dim() - 2))
        boost, found = self.gate.boost.to(y.dtype).view(shape), self.gate.open.to(y.dtype).view(shape)
        if shift is None:
            return boost * y
        shift = shift.to(y.dtype).view(1, *shape[1:])
        return boost * (y - shift) + found * shift

    @torch.no_grad()
    def alone(self) -> nn.Module:
        layer: Any = unwrapped(self.module, alone=True)
        layer.weight.data = layer.weight * self.gate.boost[0].view(-1, *[1] * (layer.weight.dim() - 1))
        return layer


@dataclass(frozen=True)
class BoostingAndSuppression(Dynamic):
    """Channels by a saliency that is predicted from the input of their layer."""

    name = "fbs"
    title = "feature boosting and suppression (FBS)"
    paper = "Gao et al., Dynamic channel pruning: feature boosting and suppression"
    year = 2019
    published = (Published("vgg16_bn", 50, 0.47, rerun="an unnamed source"),)
    strength: float = 1e-8

    def __post_init__(self) -> None:
        check_range(strength=self.strength)

    @torch.no_grad()
    def insert(self, network: nn.Module, sites: Sequence[Site], seed: int) -> list[Gate]:
        generator, gates = torch.Generator().manual_seed(seed), []
        for site in sites:
            maker: Any = network.get_submodule(site.maker)
            scale = torch.ones_like(maker.weight[:, 0].flatten(1)[:, 0])
            if site.norm is not None:
                norm: Any = network.get_submodule(site.norm)
                scale = _positive(maker, norm)
            gate = Saliency(site.here, maker.weight.shape[1], scale, generator)
            network.set_submodule(site.maker, Chooses(maker, gate))
            last = site.norm or site.maker
            network.set_submodule(last, Boosts(network.get_submodule(last), gate))
            gates.append(gate)
        return gates

    def fit(self, setup: Setup, epochs: int) -> ByImage:
        found = setup.found
        removed = cheapest(lambda v: found.cost_of(lambda gate: _count(gate, 1 - v)), setup.budget, 0.0, 1.0)

        def loss(network: nn.Module, batch: Any) -> dict[str, Tensor]:
            x, y = batch
            logits = network(x)
            size = sum(gate.size for gate in network.modules() if isinstance(gate, Saliency))
            return {"loss": F.cross_entropy(logits, y) + self.strength * size, "logits": logits, "labels": y}

        def narrow(state: RunState) -> None:
            _set(state.particles.networks[0], 1 - removed * min(1.0, 2 * state.progress))

        network = setup.train(found.network, epochs, loss, start=narrow, step=narrow)
        _set(network, 1 - removed)
        return replace(found, network=network)


def _positive(maker: Any, norm: Any) -> Tensor:
    """A norm's scale, taken out of it, its signs moved into the filters: a saliency has none."""
    scale, sign = norm.weight.abs(), torch.where(norm.weight < 0, -1.0, 1.0).to(norm.weight)
    maker.weight.mul_(sign.view(-1, *[1] * (maker.weight.dim() - 1)))
    if maker.bias is not None:
        maker.bias.mul_(sign)
    norm.running_mean.mul_(sign)
    norm.weight.fill_(1.0).requires_grad_(False)
    return scale


def _count(gate: Gate, share: float) -> int:
    return max(1, math.ceil(round(share * gate.units, 9)))


def _set(network: nn.Module, share: float) -> None:
    """Let every gate open ceil(share * units), at least one."""
    for gate in network.modules():
        if isinstance(gate, Saliency):
            gate.count.fill_(_count(gate, share))
