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
    particles: Particles, gating: ChannelGating | WeightGating | None, keep: Tensor | None, example: Any,
    spike: float | None = None,
) -> list[ExtractedParticle]:  # fmt: skip
    """The slab part of every particle; refuses, naming the layer, where it is not equal to the gated network.

    With the root precision of a `spike` M_0 has its closed channels in it, whoever closed them.
    """
    if gating is None or keep is None:
        return [ExtractedParticle(plain(network), plain(network)) for network in particles.networks]
    if isinstance(gating, WeightGating):
        return [_zeroed(network, gating, row) for network, row in zip(particles.networks, keep, strict=True)]
    extracted = []
    sizes = gating.scales.of(particles.rows).cpu()
    for network, row, scales in zip(particles.networks, keep.cpu(), sizes, strict=True):
        reference, recipe = plain(network), gating.recipe(network, row)
        verify(reference, gating.structure.groups, row, example)
        if spike is not None:
            _into_spike(reference, gating, torch.where(row, 1.0, 1 / (spike * scales).clamp_min(1)))
        extracted.append(ExtractedParticle(cut(reference, recipe), reference, recipe, keep=row))
    return extracted


@torch.no_grad()
def _into_spike(reference: nn.Module, gating: ChannelGating, factors: Tensor) -> None:
    """Shrink what closed channels contribute to a network by `factors` (U,): their scales become the spike's std.

    The budget closes channels that are not in the spike yet. The factors multiply what reads a channel, as gates do,
    which is its scale for any activation. Widths under a norm stay as they are: its mean is over closed ones too.
    """
    for group, here in zip(gating.structure.groups, gating.structure.slices, strict=True):
        if any(piece.role == "mean" for piece in group.slices):
            factors[here] = 1
    parameters = dict(reference.named_parameters())
    weights = gating.fold.to("cpu")(parameters, factors.to(next(iter(parameters.values())).dtype))
    for name in parameters.keys() & weights.keys():
        parameters[name].copy_(weights[name])


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
