"""VGG with batch normalisation in its CIFAR form: one global pool and one linear classifier."""

from __future__ import annotations

from torch import Tensor, nn

from dllp.structure.initialise import initialise

# Widths of the convolutions of each stage; every stage ends in a 2x2 max-pool.
STAGES_11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))
STAGES_16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    """(B, in_channels, H, W) with H, W >= 32 to logits (B, num_classes)."""

    def __init__(self, stages: tuple[tuple[int, ...], ...], num_classes: int, in_channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_channels
        for stage in stages:
            for out in stage:
                layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
                width = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(width, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(self.pool(self.features(x))))


def vgg11_bn(num_classes: int = 10, in_channels: int = 3) -> VGG:
    """VGG-11: 8 convolutions, 9.2 M parameters, 153 MMACs at 32x32."""
    return VGG(STAGES_11, num_classes, in_channels)


def vgg16_bn(num_classes: int = 10, in_channels: int = 3) -> VGG:
    """VGG-16: 13 convolutions, 14.7 M parameters, 313 MMACs at 32x32."""
    return VGG(STAGES_16, num_classes, in_channels)
