"""Methods that keep what the next layer reads (ThiNet, CP), and fit that layer to what is left.

The papers go layer by layer, ThiNet with fine-tuning between, CP with shares set by hand; here all layers are ranked on
the dense network, so that one budget can choose, and the fits go from input to output. Images are looked at in 10
places each; a ridge of a tenth draws the fit to the old weights. Units that only grouped convolutions read, or others
than those of images, are ranked by the l2 norm of their filters, and nothing is fitted there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.baselines.protocol import Method, Published, Scene
from dllp.structure.slicing import Group, Recipe

PLACES = 10
"""Looks at each image; a linear layer after pooling has one place only, and is looked at there as often."""
RIDGE = 0.1
"""Share of the mean square that is added to every one: channels that rise and fall together would otherwise get huge
weights of both signs, which fine-tuning cannot undo."""
RERUN = "Zhuang et al. (DCP)"
"""Who measured the quoted figures of both methods on CIFAR-10: their papers have none."""
STRENGTHS, FAINTEST = 30, 1e-4
"""Penalties along the LASSO's path, and the last of them over the first."""


@dataclass(frozen=True)
class ThiNet(Method):
    """Units by the greedy order in which the next layer misses them least, the same share of every layer.

    Equation: with a_c the share of channel c in one output of the next layer at one place, the removed set T minimises
    sum over places of (sum_{c in T} a_c)^2, grown greedily one channel at a time; the kept channels are then scaled by
    the least squares of the full output on what is left.
    """

    name = "thinet"
    title = "ThiNet"
    paper = "Luo et al., ThiNet: a filter level pruning method for deep neural network compression"
    year = 2017
    published = (Published("vgg16_bn", 50, 0.14, RERUN),)

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

    def repair(self, small: nn.Module, recipe: Recipe, scene: Scene) -> None:
        """Fit the plain modules that lost inputs, from input to output."""
        readers = {name for group in scene.structure.groups for name in consumers(scene, group)}
        lost = [layer.name for layer in scene.structure.layers if "in" in recipe.get(layer.name, {})]
        names = [name for name in lost if name in readers]
        dense = observe(scene.network, names, scene.inputs)

        def mend(name: str, seen: Sample) -> None:
            self.fit(
                small.get_submodule(name), seen.patches, dense[name].outputs[:, recipe[name].get("out", slice(None))]
            )

        rebuild(small, names, scene.inputs, mend)

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


@dataclass(frozen=True)
class ChannelPruning(ThiNet):
    """Units by the LASSO's path, the same share of every layer; what reads them gets new weights by least squares.

    Equation: min over b of |Y - sum_c b_c X_c W_c|^2 / (2 N) + lambda |b|_1, lambda raised until enough channels are at
    0; then min over W' of |Y - sum_{c kept} X_c W'_c|^2, Y the dense network's output and X what the pruned one feeds.
    A unit's score is the largest lambda at which it is still chosen.
    """

    name = "cp"
    title = "channel pruning (CP)"
    paper = "He et al., Channel pruning for accelerating very deep neural networks"
    year = 2017
    published = (Published("vgg16_bn", 50, 0.32, RERUN),)

    def order(self, shares: Tensor) -> Tensor:
        """(N, units) -> (units,): the largest penalty under which the LASSO of the full output still has the unit."""
        gram, target = shares.T @ shares / len(shares), shares.T @ shares.sum(1) / len(shares)
        strongest = target.abs().max()  # from here on every weight is 0
        penalties = strongest * torch.logspace(0, math.log10(FAINTEST), STRENGTHS, dtype=target.dtype)
        weights = lasso(gram, target, penalties)
        chosen, last = weights != 0, weights[:, -1].abs()
        largest = torch.where(chosen.any(1), penalties[chosen.int().argmax(1)], 0)
        # of those that enter together, the one with more weight at the end comes first; of those that never do, and
        # come after all others, the one that gives more
        late = 0.1 * FAINTEST * strongest * gram.diagonal() / gram.diagonal().max().clamp_min(1e-12)
        early = largest + 1e-9 * largest.max() * last / last.max().clamp_min(1e-12)
        return torch.where(largest > 0, early, late)

    @torch.no_grad()
    def fit(self, module: nn.Module, patches: Tensor, wanted: Tensor) -> None:
        """New weights for a layer, so that at places with `patches` (N, I, K) it gives what is `wanted` (N, O)."""
        old = flat_weight(module).flatten(1).double()
        new = towards(patches.flatten(1).double(), wanted.double(), old.T)
        weight: Tensor = module.weight  # type: ignore[assignment]
        weight.copy_(new.T.reshape(weight.shape))


# ---- inputs and outputs of layers at random places of images


@dataclass(frozen=True)
class Sample:
    """N places of one layer: `patches` (N, I, K) that it reads there and its `outputs` (N, O), bias taken off."""

    patches: Tensor
    outputs: Tensor


def plain(module: nn.Module) -> bool:
    """True where every output of a module reads every input: such a layer can be rebuilt from patches."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros"
    return isinstance(module, nn.Linear)


def consumers(scene: Scene, group: Group) -> dict[str, Tensor]:
    """Names of the plain modules that read a group, and the group's unit of each of their inputs (I,), -1 for none."""
    modules = dict(scene.network.named_modules())
    read = [s for s in group.slices if s.role == "read" and s.name == f"{s.module}.weight"]
    return {s.module: s.unit for s in read if plain(modules[s.module])}


def by_unit(values: Tensor, unit: Tensor, units: int) -> Tensor:
    """(..., I) -> (..., units): sums over the inputs of each unit (I,), -1 for none."""
    unit = unit.to(values.device)
    mine = unit >= 0
    return values.new_zeros(*values.shape[:-1], units).index_add_(-1, unit[mine], values[..., mine])


@torch.no_grad()
def observe(network: nn.Module, names: Sequence[str], inputs: Tensor) -> dict[str, Sample]:
    """Run the network once and look at random places of the named layers, the same ones each time."""
    found: dict[str, Sample] = {}
    rebuild(network, names, inputs, found.__setitem__)
    return found


@torch.no_grad()
def rebuild(network: nn.Module, names: Sequence[str], inputs: Tensor, mend: Callable[[str, Sample], None]) -> None:
    """Run the network once; `mend` sees what each named layer reads and may change it before what follows reads it.

    A layer that is called several times is looked at the first time.
    """
    seen: set[str] = set()

    def hook(name: str) -> Callable[..., Tensor]:
        def look(module: nn.Linear | nn.Conv2d, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if name in seen:
                return output
            seen.add(name)
            mend(name, _look(module, args[0].detach(), output.detach()))
            mended: Tensor = module.forward(*args)
            return mended

        return look

    was_training = network.training
    with ExitStack() as stack:
        for name in names:
            stack.callback(network.get_submodule(name).register_forward_hook(hook(name)).remove)
        network.eval()(inputs)
    network.train(was_training)


def _look(module: nn.Linear | nn.Conv2d, x: Tensor, y: Tensor) -> Sample:
    bias = 0 if module.bias is None else module.bias.detach()
    if isinstance(module, nn.Linear):
        if x.dim() == 2:
            x, y = x.repeat_interleave(PLACES, 0), y.repeat_interleave(PLACES, 0)
        return Sample(x.flatten(0, -2)[:, :, None], y.flatten(0, -2) - bias)
    generator = torch.Generator().manual_seed(0)
    count = PLACES * len(x)
    high, wide = y.shape[2:]
    image = torch.arange(len(x)).repeat_interleave(PLACES)
    row, column = (torch.randint(size, (count,), generator=generator) for size in (high, wide))
    padded = F.pad(x, module._reversed_padding_repeated_twice)
    (down, across), (tall, broad), (skip_y, skip_x) = module.stride, module.kernel_size, module.dilation
    ys = (row * down)[:, None, None] + (torch.arange(tall) * skip_y)[None, :, None]
    xs = (column * across)[:, None, None] + (torch.arange(broad) * skip_x)[None, None, :]
    patches = padded[image[:, None, None], :, ys, xs]  # (N, tall, broad, I)
    return Sample(patches.flatten(1, 2).transpose(1, 2), y[image, :, row, column] - bias)


@torch.no_grad()
def contributions(scene: Scene, group: Group, seen: dict[str, Sample]) -> Tensor | None:
    """(N, units): what each unit adds to one random output at each place; None where nothing plain reads the group."""
    parts = []
    generator = torch.Generator().manual_seed(scene.config.seed)
    for name, unit in consumers(scene, group).items():
        patches, weight = seen[name].patches.double(), flat_weight(scene.network.get_submodule(name)).double()
        output = torch.randint(len(weight), (len(patches),), generator=generator)
        each = (patches * weight[output.to(weight.device)]).sum(2).cpu()  # (N, I)
        parts.append(by_unit(each, unit, group.units))
    return torch.cat(parts) if parts else None


def flat_weight(module: nn.Module) -> Tensor:
    """A plain module's weight as (O, I, K)."""
    weight: Tensor = module.weight.detach()  # type: ignore[assignment, union-attr]
    return weight.reshape(*weight.shape[:2], -1)


def towards(matrix: Tensor, target: Tensor, start: Tensor, ridge: float = RIDGE) -> Tensor:
    """(N, p), (N, q) and (p, q) -> least squares of target on matrix, drawn to `start` where the data says little."""
    gram = matrix.T @ matrix
    gram.diagonal().add_(ridge * gram.diagonal().mean().clamp_min(1e-12))
    return start + torch.linalg.solve(gram, matrix.T @ (target - matrix @ start))


def lasso(gram: Tensor, target: Tensor, penalties: Tensor) -> Tensor:
    """(units, penalties): argmin over b of b' gram b / 2 - b' target + penalty |b|_1, for falling penalties.

    The path is linear between the knots of least-angle regression.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import lars_path_gram

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a unit that others rebuild exactly is left out
        knots, _, weights = lars_path_gram(
            target.numpy(), gram.numpy(), n_samples=1, method="lasso",
            alpha_min=float(penalties[-1]),  # type: ignore[arg-type]
            max_iter=20 * len(target),
        )  # fmt: skip
    at = penalties.numpy()
    return torch.from_numpy(np.stack([np.interp(at, knots[::-1], path[::-1]) for path in weights]))
