"""Networks with every kind of scale, as particles with random weights: what tests of the gates share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllp.structure.groups import discover
from dllp.training.particles import Particles
from tests.support import families, networks

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
CASES: dict[str, Case] = {name: (family.build, family.example) for name, family in families.FAMILIES.items()} | {
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
