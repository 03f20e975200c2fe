"""Batched crop and alternating flip: pure indexing, so the same code is fast on every device."""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = 4


def draw(count: int, generator: torch.Generator) -> Tensor:
    """(count, 2) vertical and horizontal crop offsets in [-PADDING, PADDING]."""
    return torch.randint(-PADDING, PADDING + 1, (count, 2), generator=generator)


def flips(phase: Tensor, epoch: int) -> Tensor:
    """(N,) bool: whether each image is mirrored; every image alternates from its own random `phase`."""
    return (phase + epoch) % 2 == 1


def crop_flip(images: Tensor, index: Tensor, offset: Tensor, flip: Tensor) -> Tensor:
    """Images (N, C, H, W)[index] shifted by `offset` (B, 2) with reflection at the border, mirrored where `flip` (B,).

    One gather: neither a padded copy of the data nor an intermediate image is made.
    """
    _, channels, height, width = images.shape
    device = images.device
    rows = _reflect(torch.arange(height, device=device) + offset[:, :1], height)
    cols = _reflect(torch.arange(width, device=device) + offset[:, 1:], width)
    cols = torch.where(flip[:, None], cols.flip(1), cols)
    channel = torch.arange(channels, device=device)
    return images[index[:, None, None, None], channel[None, :, None, None], rows[:, None, :, None], cols[:, None, None]]


def _reflect(position: Tensor, size: int) -> Tensor:
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)
