"""Augmentation of images in memory: batched crops and alternating flips, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from dllp.data.images import ASPECT, crop_boxes, triangle_weights

PADDING = 4
AREA = (0.25, 1.0)
"""Fraction of an image that a resized crop shows. Images in memory are small: less of one is no picture any more."""


def crop_offsets(count: int, generator: torch.Generator) -> Tensor:
    """(count, 2) vertical and horizontal crop offsets in [-PADDING, PADDING]."""
    return torch.randint(-PADDING, PADDING + 1, (count, 2), generator=generator)


def random_boxes(count: int, generator: torch.Generator, height: int, width: int) -> Tensor:
    """(count, 4) top, left, height and width of random crops of an image, in pixels."""
    draws = torch.rand(count, 4, generator=generator, dtype=torch.float64).numpy()
    wide, high, across, down = torch.from_numpy(crop_boxes(draws, AREA)).unbind(1)
    unit, longest = (height * width) ** 0.5, ASPECT[1]
    wide, high = (wide * unit).clamp(max=width), (high * unit).clamp(max=height)
    wide, high = wide.minimum(high * longest).clamp(min=1), high.minimum(wide * longest).clamp(min=1)
    return torch.stack([down * (height - high), across * (width - wide), high, wide], dim=1).float()


def flips(phase: Tensor, epoch: int) -> Tensor:
    """(N,) bool, True for mirrored images; every image alternates from its own random `phase`."""
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


def resized_crop(images: Tensor, index: Tensor, box: Tensor, flip: Tensor) -> Tensor:
    """The crops `box` (B, 4) of images (N, C, H, W)[index] resized to whole images, mirrored where `flip` (B,)."""
    x = images[index].float()
    top, left, high, wide = box.unbind(1)
    rows, columns = _enlarged(top, high, x.shape[2]), _enlarged(left, wide, x.shape[3])
    columns = torch.where(flip[:, None, None], columns.flip(1), columns)
    x = rows[:, None] @ x @ columns[:, None].mT
    return x.to(images.dtype) if images.is_floating_point() else x.round_().clamp_(0, 255).to(images.dtype)


def _enlarged(start: Tensor, length: Tensor, size: int) -> Tensor:
    """(B,) start and length of crops of `size` pixels -> (B, size, size): weight of each old pixel in each new one."""
    place = (torch.arange(size, device=start.device) + 0.5) * (length / size)[:, None] + start[:, None]
    return triangle_weights(place, torch.ones_like(start), size)


def _reflect(position: Tensor, size: int) -> Tensor:
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)
