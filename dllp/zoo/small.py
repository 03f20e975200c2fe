"""Small networks: for the embedded digits, for benchmarks on a CPU, and for tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from dllp.structure.initialise import initialise
from dllp.zoo.resnet import CifarResNet, Shortcut


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
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(width, num_classes)
    model = nn.Sequential(layers)
    initialise(model)
    return model


def small_resnet(num_classes: int = 10, in_channels: int = 3, shortcut: Shortcut = "projection") -> CifarResNet:
    """ResNet-8: one basic block in each of three stages."""
    return CifarResNet(1, num_classes, in_channels, shortcut)


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
    model = nn.Sequential(layers)
    initialise(model)
    return model
