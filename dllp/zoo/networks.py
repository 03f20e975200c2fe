"""The networks: VGG in its CIFAR form, ResNets of CIFAR (8, 20, 56) and ImageNet (50), a small CNN and an MLP."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from dllp.errors import ConfigError
from dllp.structure.initialise import initialise

# Widths of the convolutions of each stage of VGG; every stage ends in a 2x2 max-pool.
STAGES_11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))
STAGES_16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _vgg(stages: tuple[tuple[int, ...], ...], num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Convolutions with batch normalisation, one global pool and one linear classifier."""
    layers: list[nn.Module] = []
    width = in_channels
    for stage in stages:
        for out in stage:
            layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            width = out
        layers.append(nn.MaxPool2d(2))
    return _convolutional(OrderedDict(features=nn.Sequential(*layers)), width, num_classes)


vgg11_bn = partial(_vgg, STAGES_11)  # 8 convolutions, 9.2 M parameters, 153 MMACs at 32x32
vgg16_bn = partial(_vgg, STAGES_16)  # 13 convolutions, 14.7 M parameters, 313 MMACs at 32x32


def small_cnn(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """Three 3x3 convolutions of 32, 64 and 64 channels with batch normalisation, made for 8x8 digits."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = in_channels
    for i, out in enumerate((32, 64, 64), start=1):
        layers[f"conv{i}"] = nn.Conv2d(width, out, 3, padding=1, bias=False)
        layers[f"bn{i}"] = nn.BatchNorm2d(out)
        layers[f"relu{i}"] = nn.ReLU()
        if i == 2:
            layers["maxpool"] = nn.MaxPool2d(2)
        width = out
    return _convolutional(layers, width, num_classes)


def mlp(
    num_classes: int = 10, in_channels: int = 1, image_size: int = 8, hidden: Sequence[int] = (128, 128)
) -> nn.Sequential:
    """Linear layers with ReLU between them; for tables `in_channels` is the number of columns, `image_size` 1."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = in_channels * image_size**2
    for i, out in enumerate(hidden, start=1):
        layers[f"linear{i}"] = nn.Linear(width, out)
        layers[f"relu{i}"] = nn.ReLU()
        width = out
    layers["classifier"] = nn.Linear(width, num_classes)
    return _initialised(layers)


def _convolutional(layers: OrderedDict[str, nn.Module], width: int, num_classes: int) -> nn.Sequential:
    """The layers, a global pool over their `width` channels, and a linear classifier."""
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(width, num_classes)
    return _initialised(layers)


def _initialised(layers: OrderedDict[str, nn.Module]) -> nn.Sequential:
    model = nn.Sequential(layers)
    initialise(model)
    return model


Shortcut = Literal["zero-pad", "projection"]


class ZeroPadShortcut(nn.Module):
    """Option A of He et al.: every `stride`-th pixel, new channels zero, half of them on each side."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        before = (out_channels - in_channels) // 2
        self.padding = (before, out_channels - in_channels - before)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, *self.padding))


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            make = ZeroPadShortcut if shortcut == "zero-pad" else _projection
            self.shortcut = make(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.bn2(self.conv2(out)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions, the stride on the 3x3 (v1.5), beside an identity or projection."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        width = out_channels // 4
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu3 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = _projection(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        return self.relu3(self.bn3(self.conv3(out)) + self.shortcut(x))


class _ResNet(nn.Sequential):
    """Stem, `depths[i]` blocks in stage i, global pool and classifier.

    `make` takes a block's input and output channels and its stride. The first stage gives `out` channels; every later
    one twice as many as the stage before, and halves the sides of the images.
    """

    def __init__(
        self, stem: dict[str, nn.Module], make: Callable[[int, int, int], nn.Module], channels: int, out: int,
        depths: Sequence[int], num_classes: int,
    ) -> None:  # fmt: skip
        blocks: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(make(channels, out * 2**stage, 2 if stage and not block else 1))
                channels = out * 2**stage
        layers = OrderedDict(**stem, blocks=nn.Sequential(*blocks), pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
        super().__init__(OrderedDict(layers, classifier=nn.Linear(channels, num_classes)))
        initialise(self)


class CifarResNet(_ResNet):
    """Three stages of `blocks` basic blocks each, `width`, 2 and 4 times `width` channels; depth 6 blocks + 2."""

    def __init__(
        self, blocks: int, num_classes: int = 10, in_channels: int = 3, shortcut: Shortcut = "zero-pad", width: int = 16
    ) -> None:
        if shortcut not in get_args(Shortcut):
            raise ConfigError(f"shortcut = {shortcut!r} is unknown: choose zero-pad or projection")
        conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        stem = {"conv": conv, "bn": nn.BatchNorm2d(width), "relu": nn.ReLU()}
        super().__init__(stem, partial(BasicBlock, shortcut=shortcut), width, width, (blocks,) * 3, num_classes)


class ImageNetResNet(_ResNet):
    """Bottleneck network: 7x7 stem, four stages of 64, 128, 256, 512 inner channels."""

    def __init__(self, depths: tuple[int, int, int, int], num_classes: int = 1000, in_channels: int = 3) -> None:
        conv = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        stem = {"conv": conv, "bn": nn.BatchNorm2d(64), "relu": nn.ReLU(), "maxpool": pool}
        super().__init__(stem, Bottleneck, 64, 256, depths, num_classes)
        self.depths = depths

    def usual_name(self, name: str) -> str:
        """Name of a tensor in torchvision's ResNet (conv1, layer2.0.downsample.0, fc) -> its name here."""
        match = re.fullmatch(r"layer([1-4])\.(\d{1,3})\.(.*)", name)
        if match:
            block = sum(self.depths[: int(match[1]) - 1]) + int(match[2])
            return f"blocks.{block}.{match[3].replace('downsample', 'shortcut')}"
        first, dot, rest = name.partition(".")
        return {"conv1": "conv", "bn1": "bn", "fc": "classifier"}.get(first, first) + dot + rest


small_resnet = partial(CifarResNet, 1, shortcut="projection")  # ResNet-8: one basic block in each of three stages
resnet20 = partial(CifarResNet, 3)  # 0.27 M parameters, 41 MMACs at 32x32
resnet56 = partial(CifarResNet, 9)  # 0.85 M parameters, 126 MMACs at 32x32
resnet50 = partial(ImageNetResNet, (3, 4, 6, 3))  # ResNet-50 v1.5: 25.6 M parameters, 4.1 GMACs at 224x224
