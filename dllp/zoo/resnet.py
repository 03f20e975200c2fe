"""Residual networks: the CIFAR family (ResNet-20, -56) and ResNet-50 in its ImageNet form."""

from __future__ import annotations

import re
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from dllp.errors import ConfigError
from dllp.structure.initialise import initialise

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

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
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


class CifarResNet(nn.Module):
    """Three stages of `blocks` basic blocks each, `width`, 2 and 4 times `width` channels; depth 6 blocks + 2."""

    def __init__(
        self, blocks: int, num_classes: int, in_channels: int, shortcut: Shortcut = "zero-pad", width: int = 16
    ) -> None:
        super().__init__()
        if shortcut not in get_args(Shortcut):
            raise ConfigError(f"shortcut = {shortcut!r} is unknown: choose zero-pad or projection")
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        layers: list[nn.Module] = []
        channels = width
        for stage in range(3):
            out = width * 2**stage
            for block in range(blocks):
                layers.append(BasicBlock(channels, out, 2 if stage and not block else 1, shortcut))
                channels = out
        self.blocks = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn(self.conv(x))))
        return self.classifier(self.flatten(self.pool(x)))


class ImageNetResNet(nn.Module):
    """Bottleneck network: 7x7 stem, four stages of 64, 128, 256, 512 inner channels."""

    def __init__(self, blocks: tuple[int, int, int, int], num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.depths = blocks
        self.conv = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        layers: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            for block in range(count):
                layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.maxpool(self.relu(self.bn(self.conv(x)))))
        return self.classifier(self.flatten(self.pool(x)))

    def usual_name(self, name: str) -> str:
        """Name of a tensor in torchvision's ResNet (conv1, layer2.0.downsample.0, fc) -> its name here."""
        match = re.fullmatch(r"layer([1-4])\.(\d{1,3})\.(.*)", name)
        if match:
            block = sum(self.depths[: int(match[1]) - 1]) + int(match[2])
            return f"blocks.{block}.{match[3].replace('downsample', 'shortcut')}"
        first, dot, rest = name.partition(".")
        return {"conv1": "conv", "bn1": "bn", "fc": "classifier"}.get(first, first) + dot + rest


def resnet20(num_classes: int = 10, in_channels: int = 3, shortcut: Shortcut = "zero-pad") -> CifarResNet:
    """ResNet-20: 0.27 M parameters, 41 MMACs at 32x32."""
    return CifarResNet(3, num_classes, in_channels, shortcut)


def resnet56(num_classes: int = 10, in_channels: int = 3, shortcut: Shortcut = "zero-pad") -> CifarResNet:
    """ResNet-56: 0.85 M parameters, 126 MMACs at 32x32."""
    return CifarResNet(9, num_classes, in_channels, shortcut)


def resnet50(num_classes: int = 1000, in_channels: int = 3) -> ImageNetResNet:
    """ResNet-50 v1.5: 25.6 M parameters, 4.1 GMACs at 224x224."""
    return ImageNetResNet((3, 4, 6, 3), num_classes, in_channels)
