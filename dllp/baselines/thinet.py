"""ThiNet: a channel matters by what the next layer loses without it.

Equation: with a_c the share of channel c in one output of the next layer at one place, the removed set T minimises
sum over places of (sum_{c in T} a_c)^2, grown greedily one channel at a time; the kept channels are then scaled by the
least squares of the full output on what is left. The paper goes layer by layer with fine-tuning between; here all
layers are ranked on the dense network, so that one budget can choose, and the scales are fitted from input to output.
Hyperparameters: images, with 10 places in each; the share, here the same for every layer and set by the budget; a ridge
of a tenth that draws the fit to the old weights. Units that only grouped convolutions read, or others than those of
images, are ranked by the l2 norm of their filters, and nothing is fitted there.
Published: VGG-16 on CIFAR-10, 0.14 points lost at 50% fewer FLOPs (as quoted by the DLLP paper's Table 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dllp.baselines.protocol import Method, Published, Scene
from dllp.baselines.samples import Sample, consumers, contributions, flat_weight, observe, rebuild, towards
from dllp.structure.slicing import Recipe


@dataclass(frozen=True)
class ThiNet(Method):
    """Units by the greedy order in which the next layer misses them least, the same share of every layer."""

    name = "thinet"
    title = "ThiNet"
    paper = "Luo et al., ThiNet: a filter level pruning method for deep neural network compression"
    year = 2017
    published = (Published("vgg16_bn", 50, 0.14),)

    def scores(self, scene: Scene) -> Tensor:
        names = [name for group in scene.structure.groups for name in consumers(scene, group)]
        seen = observe(scene.network, names, scene.inputs)
        norms = scene.filter_matrix().norm(dim=1).double()  # for what no plain layer reads
        parts = []
        for group, here in zip(scene.structure.groups, scene.structure.slices, strict=True):
            shares = contributions(scene, group, seen)
            parts.append(norms[here].cpu() if shares is None else self.order(shares))
        return scene.ranked(torch.cat(parts))

    def order(self, shares: Tensor) -> Tensor:
        """(N, units) -> (units,): the later a unit is given up, the higher."""
        return removal_order(shares)

    def repair(self, small: nn.Module, recipe: Recipe, scene: Scene) -> None:
        """Fit what reads the kept channels, from input to output."""
        names = rebuilt(scene, recipe)
        dense = observe(scene.network, list(names), scene.inputs)

        def mend(name: str, seen: Sample) -> None:
            self.fit(small.get_submodule(name), seen.patches, dense[name].outputs[:, names[name]])

        rebuild(small, list(names), scene.inputs, mend)

    @torch.no_grad()
    def fit(self, module: nn.Module, patches: Tensor, wanted: Tensor) -> None:
        """Scale the inputs of a layer so that at places with `patches` (N, I, K) it gives what is `wanted` (N, O)."""
        weight = flat_weight(module)
        places = torch.arange(len(patches), device=patches.device)
        output = places % len(weight)  # one output for each place: every one is seen equally often
        shares = (patches * weight[output]).sum(2).double()
        start = torch.ones(shares.shape[1], 1, dtype=shares.dtype, device=shares.device)
        scales = towards(shares, wanted[places, output].double()[:, None], start)
        module.weight.mul_(scales.to(weight).view(1, -1, *[1] * (module.weight.dim() - 2)))  # type: ignore


def removal_order(shares: Tensor) -> Tensor:
    """(N, units) -> (units,): 0 for the unit given up first, and so on, each time the one that is missed least."""
    gram = shares.T @ shares
    order = torch.empty(len(gram), dtype=torch.float64)
    cost = gram.diagonal().clone()  # of giving up each unit beside those already gone
    left = torch.ones(len(gram), dtype=torch.bool)
    for position in range(len(gram)):
        unit = int(torch.where(left, cost, torch.inf).argmin())
        order[unit], left[unit] = position, False
        cost += 2 * gram[unit]
    return order


def rebuilt(scene: Scene, recipe: Recipe) -> dict[str, Tensor | slice]:
    """The plain modules that lost inputs, from input to output, and which of their outputs are left."""
    readers = {name for group in scene.structure.groups for name in consumers(scene, group)}
    lost = [layer.name for layer in scene.structure.layers if "in" in recipe.get(layer.name, {})]
    kept = {name: recipe[name].get("out") for name in lost if name in readers}
    return {name: slice(None) if out is None else torch.tensor(out) for name, out in kept.items()}
