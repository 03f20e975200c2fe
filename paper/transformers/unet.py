"""A small U-Net, and a made task for it: disks, squares and crosses in noise, one class for each pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIDE, KINDS = 48, 3
"""Pixels of a picture's side, and kinds of shapes; class 0 is the ground."""


class UNet(nn.Module):
    """Three scales, batch norms, and skips that are concatenated."""

    def __init__(self, width: int = 16, classes: int = KINDS + 1) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(1, width), _block(width, 2 * width)])
        self.bottom = _block(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.merge = nn.ModuleList([_block(4 * width, 2 * width), _block(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, classes, H, W)."""
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.head(x)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


def shapes(count: int, seed: int, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """(count, 1, side, side) pictures and (count, side, side) classes: three shapes each, later ones on top."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    labels = torch.zeros(count, side, side, dtype=torch.int64)
    values = torch.zeros(count, side, side)
    for _ in range(3):
        centre = torch.randint(side // 8, side - side // 8, (count, 2), generator=generator)
        size = torch.randint(side // 12, side // 5, (count, 1, 1), generator=generator)
        kind = torch.randint(1, KINDS + 1, (count, 1, 1), generator=generator)
        y, x = (rows - centre[:, 0, None, None]).abs(), (columns - centre[:, 1, None, None]).abs()
        disk, square = x * x + y * y <= size * size, torch.maximum(x, y) <= size
        cross = square & (torch.minimum(x, y) <= size // 3)
        inside = torch.where(kind == 1, disk, torch.where(kind == 2, square, cross))
        labels = torch.where(inside, kind, labels)
        values = torch.where(inside, 0.5 + torch.rand((count, 1, 1), generator=generator), values)
    noise = torch.randn(count, side, side, generator=generator)
    return (values + 0.4 * noise)[:, None], labels
