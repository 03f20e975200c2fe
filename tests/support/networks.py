"""Small networks, one for each way in which channels are coupled, and which channels are expected to be pruned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def images() -> Tensor:
    """(1, 3, 8, 8)"""
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)
    )


class Head(nn.Module):
    """Features, global average pooling, classifier."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features = features
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.fc(x.mean(tuple(range(2, x.dim()))) if x.dim() > 2 else x)


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def chain(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return Head(nn.Sequential(conv_bn(3, 8), activation(), conv_bn(8, 12, stride=2), activation()), 12)


def plain(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return Head(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), activation(), nn.Conv2d(8, 12, 3, padding=1), activation()), 12
    )


class Block(nn.Module):
    """Residual block; `shortcut` is "project" or "pad" where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv_bn(inputs, outputs, stride=stride), conv_bn(outputs, outputs)
        changes = stride > 1 or inputs != outputs
        self.project = conv_bn(inputs, outputs, 1, stride) if changes and shortcut == "project" else None
        self.pad = (outputs - inputs) // 2 if changes and shortcut == "pad" else 0

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.project is None else self.project(x)
        if self.pad:
            short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(self.conv2(F.relu(self.conv1(x))) + short)


def resnet(widths: tuple[int, ...] = (8, 12), depth: int = 2, shortcut: str = "project") -> nn.Module:
    layers: list[nn.Module] = [conv_bn(3, widths[0]), nn.ReLU()]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for i in range(depth):
            layers.append(Block(inputs, width, 2 if stage and not i else 1, shortcut))
            inputs = width
    return Head(nn.Sequential(*layers), inputs)


class Dense(nn.Module):
    """Every layer reads the concatenation of all before it, through a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1, self.conv1 = nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3, padding=1)
        self.norm2, self.conv2 = nn.BatchNorm2d(10), nn.Conv2d(10, 4, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(14)
        self.fc = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.conv1(F.relu(self.norm1(x)))], 1)
        x = torch.cat([x, self.conv2(F.relu(self.norm2(x)))], 1)
        return self.fc(F.relu(self.norm3(x)).mean((2, 3)))


class Branches(nn.Module):
    """Inception-like: branches of different widths, concatenated, and added to a convolution as wide as both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 6)
        self.left, self.right, self.across = conv_bn(6, 4, 1), conv_bn(6, 6), conv_bn(6, 10)
        self.last = nn.Conv2d(10, 7, 3)
        self.fc = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(torch.cat([self.left(x), self.right(x)], 1) + self.across(x))
        return self.fc(F.relu(self.last(x)).mean((2, 3)))


def separable() -> nn.Module:
    return Head(nn.Sequential(conv_bn(3, 8), nn.ReLU6(), conv_bn(8, 8, groups=8), nn.ReLU6(), conv_bn(8, 10, 1)), 10)


def grouped() -> nn.Module:
    return Head(nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 12, groups=4), nn.ReLU(), conv_bn(12, 6, 1)), 6)


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


def squeeze() -> nn.Module:
    return Head(nn.Sequential(conv_bn(3, 8), nn.ReLU(), Squeeze(8), conv_bn(8, 6), nn.ReLU()), 6)


class Spatial(nn.Module):
    """One channel of attention, broadcast over all others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attend, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 1, 1), nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.last(x * torch.sigmoid(self.attend(x))).mean((2, 3))


class GatedLinear(nn.Module):
    """Two halves of one convolution multiply each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 12, 3), nn.Conv2d(6, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.conv(x).chunk(2, 1)
        return self.last(left * torch.sigmoid(right)).mean((2, 3))


def sequence() -> nn.Module:
    layers = [nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.PReLU(8), nn.Conv1d(8, 6, 3), nn.InstanceNorm1d(6)]
    return Head(nn.Sequential(*layers, nn.PReLU()), 6)


def volume() -> nn.Module:
    return Head(nn.Sequential(nn.Conv3d(3, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ELU(), nn.Conv3d(6, 4, 2)), 4)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))


class Transformer(nn.Module):
    """Tokens, attention, norms and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm1(x + self.attend(x, x, x, need_weights=False)[0])
        x = self.norm2(x + self.down(F.gelu(self.up(x))))
        return self.fc(x.mean(1))


class Twice(nn.Module):
    """One convolution called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.shared(F.relu(self.shared(F.relu(self.stem(x))))))
        return self.fc(F.relu(self.last(x)).mean((2, 3)))


def normed(norm: Callable[[], nn.Module]) -> nn.Module:
    return Head(nn.Sequential(nn.Conv2d(3, 8, 3), norm(), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU()), 6)


class Scaled(nn.Module):
    """A bare parameter multiplies the channels of the first convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inner, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 5, 1)
        self.scale = nn.Parameter(torch.ones(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.inner(self.conv(x) * self.scale))).mean((2, 3))


class Masked(nn.Conv2d):
    """A convolution with more tensors than PyTorch's: a fixed mask of its weights, a factor for each output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3)
        self.mask = nn.Buffer(torch.ones_like(self.weight).tril())
        self.factor = nn.Parameter(torch.ones(outputs))

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight * self.mask, self.bias) * self.factor[:, None, None]


class Features(nn.Module):
    """Returns inner features beside the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.second(F.relu(self.first(x)))
        return self.last(F.relu(features)).mean((2, 3)), features


def flattened() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 10),
        nn.ReLU(),
        nn.Linear(10, 5),
    )


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, 2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 6, 3, groups=6),
        nn.ConvTranspose2d(6, 4, 2, 2, groups=2),
        nn.Softplus(),
        nn.Conv2d(4, 3, 1),
    )


def between(function: Callable[[Tensor], Tensor], wide: int = 8) -> nn.Module:
    """An operation on the channels between two convolutions."""
    return Head(nn.Sequential(nn.Conv2d(3, 8, 3), Apply(function), nn.Conv2d(wide, 6, 3), nn.ReLU()), 6)


def shuffle(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 2, x.shape[1] // 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


# ---- the families, with what is expected of each


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
    "transformer": Family(Transformer, lambda: torch.arange(7)[None], ("embed", "attend", "up"), ("fc",)),
    "twice": Family(Twice, images, ("stem", "last"), ("fc",)),
    "group_norm": Family(lambda: normed(lambda: nn.GroupNorm(2, 8)), images, _stem("0", "3"), ("fc",)),
    "response_norm": Family(lambda: normed(lambda: nn.LocalResponseNorm(3)), images, _stem("3"), ("features.0", "fc")),
    "scaled": Family(Scaled, images, ("conv", "inner"), ("last",)),
    "glu": Family(lambda: between(lambda x: F.glu(x, 1), 4), images, _stem("0", "2"), ("fc",)),
    "unshuffled": Family(lambda: between(nn.PixelUnshuffle(2), 32), images, _stem("0", "2"), ("fc",)),
    "shuffled": Family(lambda: between(nn.ChannelShuffle(2)), images, _stem("0", "2"), ("fc",)),
    "masked": Family(lambda: Head(Masked(3, 8), 8), images, ("features",), ("fc",)),
    "features": Family(Features, images, ("first",), ("second", "last")),
    "flattened": Family(flattened, images, ("0", "4"), ("6",)),
    "transposed": Family(transposed, images, ("0", "2", "6"), ("8",)),
}

MIXING: dict[str, Callable[[], nn.Module]] = {
    "flip": lambda: between(lambda x: x.flip(1)),
    "padding": lambda: between(lambda x: F.pad(x, (0, 0, 0, 0, 2, 2)), 12),
    "softmax": lambda: between(lambda x: x.softmax(1)),
    "sum": lambda: between(lambda x: x - x.sum(1, keepdim=True)),
}
