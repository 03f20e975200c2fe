"""Each way in which channels are coupled: a network, and which of its channels are expected to be pruned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.networks import (
    Branches,
    Dense,
    Features,
    GatedLinear,
    Scaled,
    Spatial,
    Transformer,
    Twice,
    between,
    chain,
    flattened,
    grouped,
    images,
    mlp,
    normed,
    plain,
    resnet,
    separable,
    sequence,
    shuffle,
    squeeze,
    transposed,
    volume,
)


@dataclass(frozen=True)
class Family:
    """A network, an example it takes, and the root modules expected to be pruned and kept whole."""

    build: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    pruned: tuple[str, ...]
    whole: tuple[str, ...] = ()


def _stem(*names: str) -> tuple[str, ...]:
    return tuple(f"features.{name}" for name in names)


FAMILIES: dict[str, Family] = {
    "chain": Family(chain, images, _stem("0.0", "2.0"), ("fc",)),
    "sigmoid": Family(lambda: chain(nn.Sigmoid), images, _stem("0.0", "2.0"), ("fc",)),
    "plain": Family(plain, images, _stem("0", "2"), ("fc",)),
    "softplus": Family(lambda: plain(nn.Softplus), images, _stem("0", "2"), ("fc",)),
    "resnet": Family(
        resnet, images, _stem("0.0", "2.conv1.0", "3.conv1.0", "4.project.0", "4.conv1.0", "5.conv1.0"), ("fc",)
    ),
    "zero_pad": Family(
        lambda: resnet((4, 8, 12), 1, "pad"),
        images,
        _stem("2.conv1.0", "3.conv1.0", "4.conv1.0"),
        ("features.0.0", "features.3.conv2.0", "features.4.conv2.0", "fc"),
    ),
    "dense": Family(Dense, images, ("stem", "conv1", "conv2"), ("fc",)),
    "branches": Family(Branches, images, ("stem.0", "left.0", "right.0", "last"), ("fc",)),
    "separable": Family(separable, images, _stem("0.0", "4.0"), ("fc",)),
    "grouped": Family(grouped, images, _stem("0.0", "2.0", "4.0"), ("fc",)),
    "squeeze": Family(squeeze, images, _stem("0.0", "2.down", "3.0"), ("fc",)),
    "spatial": Family(Spatial, images, ("conv",), ("last",)),
    "gated_linear": Family(GatedLinear, images, ("conv",), ("last",)),
    "sequence": Family(sequence, lambda: torch.randn(2, 3, 9), _stem("0", "3"), ("fc",)),
    "volume": Family(volume, lambda: torch.randn(1, 3, 4, 4, 4), _stem("0", "3"), ("fc",)),
    "mlp": Family(mlp, lambda: torch.randn(4, 6), ("0", "2"), ("5",)),
    "transformer": Family(Transformer, lambda: torch.arange(7)[None], ("up",), ("down", "fc")),
    "twice": Family(Twice, images, ("last",), ("stem", "fc")),
    "group_norm": Family(lambda: normed(lambda: nn.GroupNorm(2, 8)), images, _stem("3"), ("features.0", "fc")),
    "response_norm": Family(lambda: normed(lambda: nn.LocalResponseNorm(3)), images, _stem("3"), ("features.0", "fc")),
    "scaled": Family(Scaled, images, ("inner",), ("conv", "last")),
    "features": Family(Features, images, ("first",), ("second", "last")),
    "flattened": Family(flattened, images, ("0", "4"), ("6",)),
    "transposed": Family(transposed, images, ("0", "2", "6"), ("8",)),
}

REFUSED: dict[str, Callable[[], nn.Module]] = {
    "shuffle": lambda: between(shuffle),
    "flip": lambda: between(lambda x: x.flip(1)),
    "padding": lambda: between(lambda x: F.pad(x, (0, 0, 0, 0, 2, 2)), 12),
    "mean": lambda: between(lambda x: x - x.mean(1, keepdim=True)),
}
