"""Particles of every family of networks: with weights at random and gates, or cut at random."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from dllp.structure.groups import discover
from dllp.structure.slicing import Group, recipe
from dllp.training.particles import Layout, Particles
from tests.support import networks

# ---- cut at random


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


def batch(family: networks.Family, seed: int = 0) -> Tensor:
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
    family = networks.FAMILIES[name]
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


def intact(particles: Particles) -> bool:
    """True if every parameter still is a view into its row: assignments elsewhere can silently drop it."""
    held = [(particles.layout, *pair) for pair in zip(particles.networks, particles.rows, strict=True)]
    held += [(part.layout, part.network, part.row) for part in particles.sliced]
    return all(
        parameter.data_ptr() == layout.segments[name].view(row).data_ptr()
        for layout, network, row in held
        for name, parameter in network.named_parameters()
    )


def is_padding(layout: Layout) -> Tensor:
    """(P,) bool: elements that belong to no parameter."""
    mask = torch.ones(layout.size, dtype=torch.bool)
    for segment in layout.segments.values():
        segment.view(mask).fill_(False)
    return mask


# ---- networks with every kind of scale, for gates


CPU = torch.device("cpu")


class HalfNormed(nn.Module):
    """One of two convolutions that are added has a norm: its scales stand for both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = networks.conv_bn(3, 8), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.left(x) + self.right(x))).mean((2, 3))


def separable_plain() -> nn.Module:
    """A depth-wise convolution and its producer, neither with a norm: the unit has filters of both."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.PReLU(8), nn.Conv2d(8, 6, 1), nn.ReLU()]
    return networks.Head(nn.Sequential(*layers), 6)


def grouped_plain() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 1, groups=4), nn.ReLU(), nn.Conv2d(12, 6, 1)]
    return networks.Head(nn.Sequential(*layers), 6)


def transposed_plain() -> nn.Module:
    """Transposed, grouped transposed and depth-wise transposed convolutions, none with a norm."""
    return nn.Sequential(
        nn.ConvTranspose2d(3, 8, 2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 12, 2, groups=4),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 12, 2, groups=12),
        nn.ReLU(),
        nn.Conv2d(12, 3, 1),
    )


def affine_free() -> nn.Module:
    return networks.normed(lambda: nn.BatchNorm2d(8, affine=False))


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
CASES: dict[str, Case] = {name: (family.build, family.example) for name, family in networks.FAMILIES.items()} | {
    build.__name__: (build, networks.images)
    for build in (HalfNormed, separable_plain, grouped_plain, transposed_plain, affine_free)
}


def random_network(build: Callable[[], nn.Module]) -> nn.Module:
    """A network in which every parameter, the norms' too, is a random number of either sign."""
    model = build()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def setting(build: Callable[[], nn.Module], example: Tensor, channels_last: bool = False, n: int = 2):
    """n random networks as rows, and the structure."""
    models = [random_network(build) for _ in range(n)]
    structure = discover(models[0], example)
    return Particles(models, channels_last=channels_last), structure
