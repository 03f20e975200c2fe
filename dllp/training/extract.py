"""Section 7: M_0, a particle in its full shape, and M_p, its slab part as a plain network, verified."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dllp.structure.groups import verify
from dllp.structure.slicing import Recipe, copied, cut
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.particles import Particles


@dataclass(frozen=True)
class Slab:
    """One extracted particle.

    Attributes:
        network: M_p, a plain module of the original class with no gates, no hooks and nothing of this package.
        reference: M_0, the slab as trained to the end and the spike as it stood when the gates became discrete.
        recipe: Kept channels of each module; empty for single weights, which are exact zeros instead.
        gated: Names of the parameters that hold those zeros.
        keep: (U,) bool, the gates that stayed open.
    """

    network: nn.Module
    reference: nn.Module
    recipe: Recipe = field(default_factory=dict)
    gated: tuple[str, ...] = ()
    keep: Tensor | None = None


def extract(
    particles: Particles, gating: ChannelGating | WeightGating | None, keep: Tensor | None, example: Any
) -> list[Slab]:
    """The slab part of every particle; refuses, naming the layer, where it is not equal to the gated network."""
    if gating is None or keep is None:
        return [Slab(plain(network), plain(network)) for network in particles.networks]
    if isinstance(gating, WeightGating):
        return [_zeroed(network, gating, row) for network, row in zip(particles.networks, keep, strict=True)]
    slabs = []
    for network, row in zip(particles.networks, keep.cpu(), strict=True):
        reference, recipe = plain(network), gating.recipe(network, row)
        verify(reference, gating.structure.groups, row, example)
        slabs.append(Slab(cut(reference, recipe), reference, recipe, keep=row))
    return slabs


def plain(network: nn.Module) -> nn.Module:
    """A copy on the CPU in evaluation mode that shares no memory with the rows and holds no gradients."""
    network = copied(network).cpu().eval()
    for parameter in network.parameters():
        parameter.data = parameter.data.contiguous()
        parameter.grad = None
    return network


def _zeroed(network: nn.Module, gating: WeightGating, keep: Tensor) -> Slab:
    reference, pruned = plain(network), plain(network)
    with torch.no_grad():
        weights = gating.weights(dict(network.named_parameters()), keep.to(next(network.parameters()).dtype))
        parameters = dict(pruned.named_parameters())
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    return Slab(pruned, reference, gated=tuple(weights), keep=gating.in_order(keep[None])[0].cpu())
