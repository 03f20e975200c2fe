"""Many images of many sizes to one size, on the device: two matrix products for each image, all in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""Images resized at once: as floats they take much more memory than as bytes."""


def resize(canvas: Tensor, extent: Tensor, size: int, mirror: Tensor | None = None) -> Tensor:
    """(B, H, W, 3) uint8, each image in the top left (B, 2) part of its canvas -> (B, 3, size, size) uint8.

    The filter is the triangle that Pillow calls bilinear: without aliasing where an image shrinks. Images are
    mirrored where `mirror` (B,) says so.
    """
    flags = torch.zeros(len(canvas), dtype=torch.bool, device=canvas.device) if mirror is None else mirror
    parts = zip(canvas.split(CHUNK), extent.split(CHUNK), flags.split(CHUNK), strict=True)
    return torch.cat([_resize(images, lengths, size, flip) for images, lengths, flip in parts])


def _resize(canvas: Tensor, extent: Tensor, size: int, mirror: Tensor) -> Tensor:
    count, height, width, _ = canvas.shape
    place = (torch.arange(size, device=canvas.device) + 0.5).expand(count, size)
    rows = _weights(place, extent[:, 0], height, size)
    columns = _weights(torch.where(mirror[:, None], size - place, place), extent[:, 1], width, size)
    # The three colours lie side by side in either product: one larger matrix is faster than three.
    x = torch.bmm(rows, canvas.reshape(count, height, width * 3).float()).view(count, size, width, 3)
    x = torch.bmm(columns, x.transpose(1, 2).reshape(count, width, size * 3)).view(count, size, size, 3)
    return x.permute(0, 3, 2, 1).round().clamp_(0, 255).to(torch.uint8)


def _weights(place: Tensor, length: Tensor, span: int, size: int) -> Tensor:
    """(B, size) places of new pixels, (B,) old ones along a canvas of `span` -> (B, size, span) their shares."""
    scale = length.float() / size
    return shares(place * scale[:, None], scale.clamp_min(1), span, length)


def shares(place: Tensor, reach: Tensor, span: int, length: Tensor | None = None) -> Tensor:
    """(B, size, span): what each of `span` old pixels gives to each new one, by a triangle of half width `reach` (B,).

    Args:
        place: (B, size): where the new pixels lie among the old ones.
        length: (B,): how many old pixels there are, where they are fewer than `span`.
    """
    old = torch.arange(span, device=place.device) + 0.5
    weights = (old - place[:, :, None]).abs_().div_(-reach[:, None, None]).add_(1).clamp_min_(0)
    if length is not None:
        weights *= old < length[:, None, None]
    return weights.div_(weights.sum(2, keepdim=True))
