"""Networks of every family with nothing trivial in them, cut at random: what tests of slicing share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dllp.structure.groups import discover
from dllp.structure.slicing import Group, recipe
from dllp.training.particles import Layout, Particles
from tests.support import families

both_layouts = pytest.mark.parametrize("channels_last", [False, True])


def random_keep(groups: tuple[Group, ...], seed: int) -> torch.Tensor:
    """(U,) bool with at least one unit in each group, anything from one to all."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for group in groups:
        count = int(torch.randint(1, group.units + 1, (), generator=generator))
        parts.append(torch.randperm(group.units, generator=generator) < count)
    return torch.cat(parts)


def scrambled(model: nn.Module) -> nn.Module:
    """A float64 network in eval mode whose norms are not trivial."""
    generator = torch.Generator().manual_seed(7)
    model = model.double().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() < 2:
            tensor.data = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
    return model


def batch(family: families.Family, seed: int = 0) -> Tensor:
    """Four inputs in float64 (or four sequences of tokens)."""
    example, generator = family.example(), torch.Generator().manual_seed(seed)
    if not example.is_floating_point():
        return torch.randint(0, 11, (4, *example.shape[1:]), generator=generator)
    return torch.randn(4, *example.shape[1:], generator=generator, dtype=torch.float64)


def loss(output: object) -> Tensor:
    """A number that depends on every output, in another way on each."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    total = leaves[0].new_zeros(())
    for leaf in leaves:
        weight = torch.linspace(-1, 2, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
        total = total + (weight * leaf + 0.1 * leaf.square()).sum()
    return total


def pair(name: str, channels_last: bool = False) -> tuple[Particles, tuple[Group, ...]]:
    """Two different float64 particles of a family in training mode, and the groups of the family."""
    family = families.FAMILIES[name]
    made = [scrambled(family.build()).train() for _ in range(2)]
    example = family.example()
    groups = discover(made[0], example.double() if example.is_floating_point() else example).groups
    return Particles(made, channels_last=channels_last), groups


def sliced(name: str, channels_last: bool = False) -> tuple[Particles, tuple[Group, ...], list[Tensor]]:
    """The same after the gates are decided, differently for each particle; and the decisions (U,) of each."""
    particles, groups = pair(name, channels_last)
    keeps = [random_keep(groups, seed) for seed in (1, 2)]
    particles.slice([recipe(m, groups, keep) for m, keep in zip(particles.networks, keeps, strict=True)])
    return particles, groups, keeps


def is_padding(layout: Layout) -> Tensor:
    """(P,) bool: elements that belong to no parameter."""
    mask = torch.ones(layout.size, dtype=torch.bool)
    for segment in layout.segments.values():
        segment.view(mask).fill_(False)
    return mask
