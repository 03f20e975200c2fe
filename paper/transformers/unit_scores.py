"""Other ways to choose the units of a transformer, each written from its description.

Magnitude and Taylor score every unit of the structure, summed over all weights that go with it, and rank units by their
score over the mean of their group, as Torch-Pruning does. ShortGPT removes the blocks that change their input least.
Wanda, for whole neurons, takes in each feed-forward layer those of the smallest |weight| times norm of the input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.errors import StructureError
from dllp.structure.groups import Structure
from dllp.structure.select import select
from dllp.structure.slicing import cut, recipe

Loss = Callable[[nn.Module, Any], Tensor]


def magnitude(network: nn.Module, structure: Structure) -> Tensor:
    """(U,): L2 norm of all weights of each unit."""
    squares = {name: p.detach().square() for name, p in network.named_parameters()}
    return relative(structure, unit_sums(structure, squares).sqrt())


def taylor(network: nn.Module, structure: Structure, loss: Loss, batches: Iterable[Any]) -> Tensor:
    """(U,): |weight times gradient|, summed over all weights of each unit, of the mean loss over some batches."""
    network.zero_grad()
    count = 0
    for batch in batches:
        loss(network, batch).backward()
        count += 1
    values = {n: (p * p.grad / count).detach().abs() for n, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    return relative(structure, unit_sums(structure, values))


def unit_sums(structure: Structure, values: dict[str, Tensor]) -> Tensor:
    """Parameters' values by name -> (U,): sums over the entries that go with each unit."""
    total = torch.zeros(structure.units)
    for group, part in zip(structure.groups, structure.slices, strict=True):
        for piece in (p for p in group.slices if p.name in values):
            value = values[piece.name].movedim(piece.axis, 0)
            sums = value.reshape(len(value), -1).sum(1).cpu()
            of_unit = piece.unit >= 0
            total[part].index_add_(0, piece.unit[of_unit], sums[of_unit])
    return total


def relative(structure: Structure, scores: Tensor) -> Tensor:
    """(U,) -> (U,): over the mean of each group, so that heads and neurons can be ranked together."""
    parts = [scores[part] / scores[part].mean().clamp_min(1e-30) for part in structure.slices]
    return torch.cat(parts)


def chosen(network: nn.Module, structure: Structure, scores: Tensor, keep: float) -> nn.Module:
    """The network cut to its best units within a share of the multiply-accumulates."""
    kept = select(structure, scores, cost=structure.flops, keep=keep)
    return cut(network, recipe(network, structure.groups, kept))


# ---- language models with `model.layers`


@torch.no_grad()
def shortgpt(network: Any, batches: Iterable[Any], removed: float) -> Any:
    """A copy without the share of blocks whose outputs are most like their inputs (cosine, mean over tokens)."""
    layers = list(network.model.layers)
    likeness = dict.fromkeys(layers, 0.0)

    def see(layer: nn.Module, args: tuple[Tensor, ...], after: Any) -> None:
        after = after[0] if isinstance(after, tuple) else after
        likeness[layer] += float(F.cosine_similarity(args[0].double(), after.double(), dim=-1).mean())

    _watch(network, layers, see, batches)
    order = sorted(range(len(layers)), key=lambda k: -likeness[layers[k]])
    gone = order[: round(removed * len(layers))]
    result: Any = copy.deepcopy(network)
    remaining: Any = nn.ModuleList(layer for k, layer in enumerate(result.model.layers) if k not in gone)
    result.model.layers, result.config.num_hidden_layers = remaining, len(remaining)
    for k, layer in enumerate(remaining):
        layer.self_attn.layer_idx = k
    return result


def _watch(network: Any, layers: Iterable[nn.Module], see: Callable[..., None], batches: Iterable[Any]) -> None:
    """Run a language model on batches; `see` is called with each of some layers, its arguments and its output."""
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(see).remove)
        for batch in batches:
            network(input_ids=batch["input_ids"], use_cache=False)


@torch.no_grad()
def wanda_neurons(network: nn.Module, structure: Structure, batches: Iterable[Any], keep: float) -> nn.Module:
    """The network without the neurons of least score, the same share in each feed-forward layer, within a budget."""
    readers: dict[str, Any] = {name: m for name, m in network.named_modules() if name.endswith("down_proj")}
    squares: dict[nn.Module, Tensor] = dict.fromkeys(readers.values(), torch.zeros(()))

    def see(layer: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
        squares[layer] = squares[layer] + args[0].flatten(0, -2).double().square().sum(0)

    _watch(network, readers.values(), see, batches)
    ranks = torch.full((structure.units,), torch.inf)
    for group, part in zip(structure.groups, structure.slices, strict=True):
        for piece in group.slices:
            name = piece.name.removesuffix(".weight")
            if name in readers and piece.axis == 1 and piece.role == "read" and group.units == len(piece.unit):
                score = readers[name].weight.abs().double().sum(0) * squares[readers[name]].sqrt()
                of_unit = torch.zeros(group.units, dtype=torch.float64).index_add_(0, piece.unit, score.cpu())
                ranks[part] = of_unit.argsort().argsort() / group.units  # a share of each layer, whatever its scale
    if not bool(ranks.isfinite().any()):
        raise StructureError("no neurons in front of a down_proj were found")
    # neurons alone: everything else ranks above them all
    return chosen(network, structure, ranks.float().clamp_max(2.0), keep)
