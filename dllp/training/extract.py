"""Section 7: M_0, a particle in its full shape, and M_p, its slab part as a plain network, verified."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dllp.records import ExtractedParticle, Size
from dllp.structure.means import plain_means
from dllp.structure.slicing import copied, cut, fold_in
from dllp.structure.verification import verify
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.particles import Particles


def extract(
    particles: Particles, gating: ChannelGating | WeightGating | None, keep: Tensor | None, example: Any
) -> list[ExtractedParticle]:
    """The slab part of every particle; refuses, naming the layer, where it is not equal to the gated network."""
    if gating is None or keep is None:
        return [ExtractedParticle(plain(network), plain(network)) for network in particles.networks]
    if isinstance(gating, WeightGating):
        return [_zeroed(network, gating, row) for network, row in zip(particles.networks, keep, strict=True)]
    extracted = []
    for network, row in zip(particles.networks, keep.cpu(), strict=True):
        reference, recipe = plain(network), gating.recipe(network, row)
        verify(reference, gating.structure.groups, row, example)
        extracted.append(ExtractedParticle(cut(reference, recipe), reference, recipe, keep=row))
    return extracted


def plain(network: nn.Module) -> nn.Module:
    """A copy on the CPU in evaluation mode that shares no memory with the rows and holds no gradients."""
    network = copied(network).cpu().eval()
    plain_means(network)
    for parameter in network.parameters():
        parameter.data = parameter.data.contiguous()
        parameter.grad = None
    return network


def _zeroed(network: nn.Module, gating: WeightGating, keep: Tensor) -> ExtractedParticle:
    reference, pruned = plain(network), plain(network)
    names = fold_in(pruned, gating.fold, keep.cpu())
    return ExtractedParticle(pruned, reference, gated=names, keep=gating.in_order(keep[None])[0].cpu())


def costs(gating: ChannelGating | WeightGating, keep: Tensor) -> tuple[list[Size], dict[str, list[int]]]:
    """Decided gates (n, U) -> what each network costs, and kept and original channels (or weights) of each module."""
    z = keep.to(torch.get_default_dtype())
    pairs = zip(gating.flops.expected(z), gating.params.expected(z), strict=True)
    sizes = [Size(float(macs), round(float(params))) for macs, params in pairs]
    stored = gating.stored.to(keep.device)
    counts = gating.scales.module_sums(torch.cat([keep * stored, stored[None]])).cpu().T.tolist()
    return sizes, dict(zip(gating.scales.modules, counts, strict=True))
