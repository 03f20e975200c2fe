"""Discrimination-aware channel pruning (DCP): inputs of a layer that let a classifier behind it still tell the classes.

Extra heads, linear(mean over places of relu(batch norm(x))), are trained with the network before the cut. For a layer
with weights W, and the next head behind it (the network's own output behind the last one),

    L(W) = L_M + strength * L_S,  L_M = mean squared difference of its output to the uncut network's / 2,
                                  L_S = cross-entropy of the head.

The layer begins without any input channel. In each round the channels with the largest gradient of L (sum over outputs
of the norm of their kernels, as in the authors' code) get their trained weights back, and L is minimised over the
weights of all channels chosen so far, by one pass of SGD; nothing else moves. Layers go from input to output.

Hyperparameters: `strength` 1 and `heads` 3 as in the paper; `rounds`, the most for a layer, 16 (the paper: one for each
channel); `images`, the training pairs that a pass sees (the paper: all of CIFAR-10's).
Differences: the share of channels that every layer keeps follows from the budget; heads and network are trained
together in a third of the fine-tuning's epochs, in place of 100 more, each head's gradient weighted by its depth as in
the authors' code; heads stand at equal FLOPs; several readers of the same channels choose one set by the sum of their
L_M; the paper fine-tunes for 400 epochs. Units that no plain layer reads are ranked by the l2 norm of their filters.
Published (the method's own): ResNet-56 on CIFAR-10, 0.31 lost at 50% fewer FLOPs; VGGNet, -0.17 at 50%; ResNet-50 on
ImageNet, 1.06 at 55.6%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.baselines.protocol import Method, Published, Scene, check_range
from dllp.baselines.reconstruction import by_unit, consumers, plain
from dllp.structure.slicing import Recipe, copied
from dllp.training.objective import LossFn

BATCH, LR, MOMENTUM, DECAY = 128, 0.01, 0.9, 1e-4
"""SGD over a layer's weights, as in the authors' code."""
FAINTEST = 0.01
"""Least weight of a head's gradient in the network."""


@dataclass(frozen=True)
class DiscriminationAware(Method):
    """Units by the order in which the layers that read them choose them, the same share of every layer."""

    name = "dcp"
    title = "discrimination-aware channel pruning (DCP)"
    paper = "Zhuang et al., Discrimination-aware channel pruning for deep neural networks"
    year = 2018
    published = (Published("resnet56", 50, 0.31), Published("vgg16_bn", 50, -0.17))
    labelled = True
    before_cut = 1 / 3
    strength: float = 1.0
    heads: float = 3
    rounds: float = 16
    images: float = 2000

    def __post_init__(self) -> None:
        check_range(strength=self.strength, heads=self.heads)
        check_range(1e9, 1, rounds=self.rounds, images=self.images)

    def prepare(self, scene: Scene) -> tuple[nn.Module, LossFn]:
        with torch.random.fork_rng():
            torch.manual_seed(scene.config.seed)
            heads = Heads(scene.network, head_places(scene, int(self.heads)), scene.inputs[:2])
        return heads, partial(total_loss, heads.classes)

    def scores(self, scene: Scene) -> Tensor:
        network = copied(scene.network).eval().requires_grad_(False)
        heads = copied(cast(Heads, scene.around)).eval().requires_grad_(False)
        x, y = (torch.cat(parts) for parts in zip(*scene.examples(int(self.images)), strict=True))
        pairs = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        norms = scene.filter_matrix().norm(dim=1).double().cpu()  # for what no plain layer reads
        order, counts = [], scene.even()
        for group, here, count in zip(scene.structure.groups, scene.structure.slices, counts, strict=True):
            readers = consumers(scene, group)
            values = norms[here]
            if readers:
                place = next_place(scene, heads.places, readers)
                selection = Selection(network, heads, place, self.strength, readers, group.units, pairs)
                values = selection.grow(count, int(self.rounds))
                scene.found.update(zip(readers, selection.weights, strict=True))
            order.append(values)
        return scene.chosen(torch.cat(order), counts)

    @torch.no_grad()
    def repair(self, small: nn.Module, recipe: Recipe, scene: Scene) -> None:
        """Give the layers that lost inputs the weights that the selection has found."""
        for name, weight in scene.found.items():
            for axis, side in enumerate(("out", "in")):
                if side in recipe.get(name, {}):
                    weight = weight.index_select(axis, torch.tensor(recipe[name][side], device=weight.device))
            small.get_parameter(f"{name}.weight").copy_(weight)


# ---- heads


class Heads(nn.Module):
    """A network and a classifier at each of some layers' inputs: (B, (heads + 1) classes), the network's own first."""

    def __init__(self, network: nn.Module, places: Sequence[str], x: Tensor) -> None:
        super().__init__()
        self.network, self.places = network, tuple(places)
        with torch.no_grad():
            self.classes = network.eval()(x).shape[1]
            widths = [features(network.get_submodule(p), arriving(network, p, (), x)[0]).shape[1] for p in self.places]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.linears = nn.ModuleList(nn.Linear(width, self.classes) for width in widths)
        order = [name for name, module in network.named_modules() if plain(module)]
        self.weights = [max(FAINTEST, (order.index(place) / len(order)) ** 2) for place in self.places]
        self.to(x.device)

    def forward(self, x: Tensor) -> Tensor:
        seen: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[module] = args[0]

        layers = [self.network.get_submodule(place) for place in self.places]
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(keep).remove)
            answers = [self.network(x)]
        for place, layer, weight in zip(self.places, layers, self.weights, strict=True):
            answers.append(self.classify(place, weight * seen[layer] + (1 - weight) * seen[layer].detach()))
        return torch.cat(answers, dim=1)

    def classify(self, place: str, x: Tensor) -> Tensor:
        """Inputs of the layer at a place -> logits (B, classes)."""
        k = self.places.index(place)
        x = features(self.network.get_submodule(place), x)
        return self.linears[k](self.norms[k](x).relu().mean(2))


def features(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs of a plain layer -> (B, channels, places)."""
    x = x.movedim(-1, 1) if isinstance(module, nn.Linear) else x
    return x.reshape(*x.shape[:2], -1)


def total_loss(classes: int, network: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Cross-entropy of the network plus that of all heads."""
    x, y = batch
    answers = network(x).split(classes, dim=1)
    return {"loss": torch.stack([F.cross_entropy(a, y) for a in answers]).sum(), "logits": answers[0], "labels": y}


def head_places(scene: Scene, count: int) -> list[str]:
    """Layers at whose input a head stands: nearest to equal FLOPs, where nothing is cut if there are so many."""
    macs = [layer.macs for layer in scene.structure.layers]
    read = {name for group in scene.structure.groups for name in consumers(scene, group)}
    inner = [k for k, layer in enumerate(scene.structure.layers) if plain(scene.network.get_submodule(layer.name))]
    inner = [k for k in inner if 0 < k < len(macs) - 1]
    whole = [k for k in inner if scene.structure.layers[k].name not in read]
    choices = whole if len(whole) >= count else inner
    wanted = [sum(macs) * (k + 1) / (count + 1) for k in range(count)]
    found = {min(choices, key=lambda k: abs(sum(macs[:k]) - at)) for at in wanted} if choices else set()
    return [scene.structure.layers[k].name for k in sorted(found)]


def next_place(scene: Scene, places: Sequence[str], readers: Mapping[str, Tensor]) -> str | None:
    """The first head behind all layers that read a group; None for the network's own output."""
    order = {layer.name: k for k, layer in enumerate(scene.structure.layers)}
    last = max(order[name] for name in readers)
    return next((place for place in places if order[place] > last), None)


# ---- the selection of one group


class _Arrived(Exception):
    """The end of a forward pass that need not go on."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def arriving(
    network: nn.Module, place: str | None, names: Iterable[str], x: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The input of a layer, or the network's output for None; and the outputs of named layers on the way."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            outputs[name] = output.clone()  # what follows may change it in place

        return hook

    def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise _Arrived(args[0])

    with ExitStack() as stack:
        for name in names:
            stack.callback(network.get_submodule(name).register_forward_hook(keep(name)).remove)
        if place is not None:
            stack.callback(network.get_submodule(place).register_forward_pre_hook(stop).remove)
        try:
            return network(x), outputs
        except _Arrived as arrived:
            return arrived.x, outputs


class Selection:
    """Units of one group, chosen by the layers that read them; the network's weights of these layers move.

    Args:
        network: In evaluation mode, cut up to here by zeros.
        heads: The uncut network with its heads.
        place: The layer at whose input the head stands that judges; None for the network's own output.
        readers: Layers that read the group, with the unit of each input, -1 for none.
    """

    def __init__(
        self, network: nn.Module, heads: Heads, place: str | None, strength: float, readers: Mapping[str, Tensor],
        units: int, pairs: Sequence[tuple[Tensor, Tensor]],
    ) -> None:  # fmt: skip
        self.network, self.heads, self.place, self.strength = network, heads, place, strength
        self.readers, self.units, self.pairs = readers, units, pairs
        self.weights = [network.get_parameter(f"{name}.weight") for name in readers]
        with torch.no_grad():
            self.wanted = [arriving(heads.network, place, readers, x)[1] for x, _ in pairs]

    def grow(self, count: int, rounds: int) -> Tensor:
        """(units,): the first chosen of `count` units has the highest value; the others follow by their gradient.

        Weights of units that are not chosen are left at 0.
        """
        trained = [weight.detach().clone() for weight in self.weights]
        values, gradient = torch.zeros(2, self.units, dtype=torch.float64)
        step, done = math.ceil(count / rounds), 0
        for weight in self.weights:
            weight.requires_grad_()
        self._write([torch.zeros_like(weight) for weight in trained], torch.ones(self.units, dtype=torch.bool))
        while done < count:
            gradient = self.gradients()
            order = torch.where(values > 0, -1, gradient).argsort(descending=True, stable=True)
            best = order[: min(step, count - done)]
            values[best] = 1 + self.units - done - torch.arange(len(best), dtype=torch.float64)
            done += len(best)
            self._write(trained, torch.zeros(self.units, dtype=torch.bool).index_fill(0, best, True))
            self.fit(values > 0)
        for weight in self.weights:
            weight.requires_grad_(False)
        return torch.where(values > 0, values, 0.9 * gradient / gradient.max().clamp_min(1e-300))

    def loss(self, k: int) -> Tensor:
        """() L_M + strength * L_S, mean over batch k."""
        x, y = self.pairs[k]
        arrived, outputs = arriving(self.network, self.place, self.readers, x)
        logits = arrived if self.place is None else self.heads.classify(self.place, arrived)
        missed = [(outputs[name] - self.wanted[k][name]).square().mean() / 2 for name in self.readers]
        return torch.stack(missed).sum() + self.strength * F.cross_entropy(logits, y)

    def gradients(self) -> Tensor:
        """(units,): size of the gradient of the mean loss in the weights that read each unit."""
        totals = [torch.zeros_like(weight) for weight in self.weights]
        for k, (x, _) in enumerate(self.pairs):
            found = torch.autograd.grad(self.loss(k) * len(x), self.weights)
            totals = [total + gradient for total, gradient in zip(totals, found, strict=True)]
        result = torch.zeros(self.units, dtype=torch.float64)
        for total, unit in zip(totals, self.readers.values(), strict=True):
            sizes = total.flatten(2).norm(dim=2) if total.dim() > 2 else total.abs()
            result += by_unit(sizes.sum(0).double().cpu(), unit, self.units)
        return result / sum(len(x) for x, _ in self.pairs)

    def fit(self, chosen: Tensor) -> None:
        """One pass of SGD over the weights that read the chosen units (units,)."""
        moving = [self._inputs(k, chosen) for k in range(len(self.weights))]
        optimizer = torch.optim.SGD(self.weights, LR, MOMENTUM, nesterov=True)
        for k in range(len(self.pairs)):
            found = torch.autograd.grad(self.loss(k), self.weights)
            for weight, gradient, mine in zip(self.weights, found, moving, strict=True):
                weight.grad = (gradient + DECAY * weight.detach()) * mine
            optimizer.step()
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor], units: Tensor) -> None:
        """Set the weights that read some units (units,)."""
        for k, weight in enumerate(self.weights):
            weight.copy_(torch.where(self._inputs(k, units), values[k], weight))

    def _inputs(self, k: int, units: Tensor) -> Tensor:
        """bool (1, I, ...): the inputs of layer k that read some units (units,)."""
        weight, unit = self.weights[k], list(self.readers.values())[k]
        mine = torch.cat([units, torch.tensor([False])])[unit]  # unit -1 reads the last entry
        return mine.view(1, -1, *[1] * (weight.dim() - 2)).to(weight.device)
