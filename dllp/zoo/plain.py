"""Networks without shortcuts: VGG in its CIFAR form, a small CNN for the digits, and a multi-layer perceptron."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from dllp.structure.initialise import initialise

# Widths of the convolutions of each stage of VGG; every stage ends in a 2x2 max-pool.
STAGES_11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))
STAGES_16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg11_bn(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """VGG-11: 8 convolutions, 9.2 M parameters, 153 MMACs at 32x32."""
    return _vgg(STAGES_11, num_classes, in_channels)


def vgg16_bn(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """VGG-16: 13 convolutions, 14.7 M parameters, 313 MMACs at 32x32."""
    return _vgg(STAGES_16, num_classes, in_channels)


def _vgg(stages: tuple[tuple[int, ...], ...], num_classes: int, width: int) -> nn.Sequential:
    """Convolutions with batch normalisation, one global pool and one linear classifier."""
    layers: list[nn.Module] = []
    for stage in stages:
        for out in stage:
            layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            width = out
        layers.append(nn.MaxPool2d(2))
    return _convolutional(OrderedDict(features=nn.Sequential(*layers)), width, num_classes)


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
