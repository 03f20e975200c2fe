"""LIWS: feature maps are trained to be sparse image by image, and small ones are not read by the next layer.

Training minimises the cross-entropy plus `strength` times the mean over images of the sum over channels of
|F_c|_2 / sqrt(places), F_c the map of channel c as the next layer reads it. Then an image drops the channels of a layer
whose norm is below a threshold times the layer's mean norm: norms of different layers cannot be compared, because the
penalty is met by shrinking norms' scales. One threshold for all chosen layers, by bisection on training images, meets
the budget. Layers are chosen by the coefficient of variation of their norms (standard deviation over mean): those below
the median stay whole where the rest can meet the budget without dropping a channel above its layer's mean norm.

A channel is computed before its norm is known: only the layers that read it are saved, cost times the share of inputs
that is kept. Threshold and schedule are assumptions, the paper's were not found; the strength was chosen on held-out
images of digits (results/tuning): weaker ones leave maps too even to drop any, three times as much closes the layers.
Of the epochs the last `after` train with the thresholds in place, which are then set anew; 0 as far as known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllp.baselines.dynamic import ByImage, Dynamic, Gate, Setup, Site, cheapest
from dllp.baselines.protocol import Published, check_range

TINY = 1e-24
"""Added to mean squares: the root has no gradient at 0."""


class FeatureNorms(Gate):
    """Opens the units whose norm is at least `threshold` times the mean of all, and the largest one.

    Attributes:
        unit: (I,) the unit of each input of the first layer that reads them, one more than there are for none.
        inputs: (units + 1,) inputs of each unit.
        norms: (B, units) |F_c|_2 / sqrt(places), with their gradients.
    """

    unit: Tensor
    inputs: Tensor

    def __init__(self, here: slice, unit: Tensor) -> None:
        super().__init__(here)
        self.register_buffer("unit", torch.where(unit < 0, self.units, unit), persistent=False)
        self.register_buffer("inputs", self.unit.bincount(minlength=self.units + 1), persistent=False)
        self.seen = int((unit >= 0).sum())
        self.norms, self.threshold = self.open, 0.0

    def see(self, x: Tensor) -> None:
        squares = x.square().mean(2)
        sums = squares.new_zeros(len(x), self.units + 1).index_add_(1, self.unit, squares)
        self.norms = (sums / self.inputs.clamp_min(1) + TINY).sqrt()[:, : self.units]
        self.macs = float(self.seen * x.shape[2])
        found = self.norms.detach()
        self.open = (found >= self.threshold * found.mean(1, keepdim=True)).to(found.dtype)
        self.open.scatter_(1, found.argmax(1, keepdim=True), 1.0)


@dataclass(frozen=True)
class InstanceSparsity(Dynamic):
    """Channels whose feature map is small for an image are not read by the next layer."""

    name = "liws"
    title = "instance-wise sparsity (LIWS)"
    paper = "Liu et al., Learning instance-wise sparsity for accelerating deep models"
    year = 2019
    published = (Published("vgg16_bn", 70.6, 0.8),)
    computes_all = True
    strength: float = 0.1
    after: float = 0

    def __post_init__(self) -> None:
        check_range(strength=self.strength, after=self.after)

    def insert(self, network: nn.Module, sites: Sequence[Site], seed: int) -> list[FeatureNorms]:
        return [FeatureNorms(site.here, next(iter(site.readers.values()))) for site in sites]

    def penalty(self, network: nn.Module) -> Tensor:
        """() of the last forward pass: strength times the sum of all norms, mean over images."""
        sums = [gate.norms.sum(1).mean() for gate in network.modules() if isinstance(gate, FeatureNorms)]
        return self.strength * torch.stack(sums).sum()

    def fit(self, setup: Setup, epochs: int) -> ByImage:
        after = min(round(self.after), epochs - 1)

        def loss(network: nn.Module, batch: Any) -> dict[str, Tensor]:
            x, y = batch
            logits = network(x)
            return {"loss": F.cross_entropy(logits, y) + self.penalty(network), "logits": logits, "labels": y}

        found = replace(setup.found, network=setup.train(setup.found.network, epochs - after, loss))
        set_thresholds(found, setup.inputs, setup.budget)
        if after:
            found = replace(found, network=setup.train(found.network, after, loss))
            set_thresholds(found, setup.inputs, setup.budget)
        return found


def variation(gate: FeatureNorms) -> float:
    """Coefficient of variation of a layer's norms, mean over the images of the last forward pass."""
    norms = gate.norms.detach()
    return float((norms.std(1, correction=0) / norms.mean(1)).mean())


def set_thresholds(found: ByImage, inputs: Tensor, budget: float) -> None:
    """One threshold for layers of large variation, as many as the budget needs, at which the inputs' mean meets it."""
    gates = [gate for gate in found.gates if isinstance(gate, FeatureNorms)]

    def cost(threshold: float, count: int) -> float:
        for i, gate in enumerate(gates):
            gate.threshold = threshold if i < count else 0.0
        return found.mean_cost(inputs)

    cost(0.0, 0)
    gates.sort(key=variation, reverse=True)
    counts = range((len(gates) + 1) // 2, len(gates) + 1)
    count = next((count for count in counts if cost(1.0, count) <= budget), len(gates))
    highest = 1.0 if cost(1.0, count) <= budget else float(max(gate.units for gate in gates))
    cost(cheapest(lambda threshold: cost(threshold, count), budget, 0.0, highest), count)
