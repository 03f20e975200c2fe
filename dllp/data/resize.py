"""Images of any size to one size: one by one on a CPU, many at once on a GPU.

The filter is the triangle that Pillow calls bilinear: without aliasing where an image shrinks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

CHUNK = 64
"""Images resized at once: as floats they take much more memory than as bytes."""


def resize_one(image: np.ndarray, mirror: bool, size: int) -> np.ndarray:
    """(h, w, 3) uint8 -> (3, size, size) uint8, mirrored if asked for."""
    old = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    new = interpolate(old, (size, size), mode="bilinear", antialias=True)[0].numpy()
    return new[:, :, ::-1] if mirror else new


def resize_all(pixels: Tensor, extent: Tensor, mirror: Tensor, size: int) -> Tensor:
    """(B, 3, size, size) uint8 of images one after the other, mirrored where `mirror` (B,) says so.

    Two matrix products for each image, all in one batch.

    Args:
        pixels: All bytes of the first image, (h, w, 3), then those of the second, and so on, on the device.
        extent: (B, 2) h and w of each, in the host's memory, and so `mirror`.
    """
    areas = extent.prod(1)
    parts = zip((areas.cumsum(0) - areas).split(CHUNK), extent.split(CHUNK), mirror.split(CHUNK), strict=True)
    found = [_product(pixels.view(-1, 3), *part, size) for part in parts if len(part[0])]
    return torch.cat(found) if found else pixels.new_empty((0, 3, size, size))


def _product(pixels: Tensor, start: Tensor, extent: Tensor, mirror: Tensor, size: int) -> Tensor:
    """Images whose first pixels (N, 3) are at `start` (B,)."""
    count, device = len(extent), pixels.device
    height, width = extent.amax(0).tolist()
    start, extent, mirror = (part.to(device, non_blocking=True) for part in (start, extent, mirror))
    down, across = torch.arange(height, device=device), torch.arange(width, device=device)
    # One canvas for all: what lies beyond an image has no weight, and only has to be somewhere.
    index = (start + down[:, None] * extent[:, 1]).T[:, :, None] + across
    canvas = pixels[index.clamp_(max=len(pixels) - 1)].view(count, height, width * 3).float()
    place = (torch.arange(size, device=device) + 0.5).expand(count, size)
    rows = _weights(place, extent[:, 0], height, size)
    columns = _weights(torch.where(mirror[:, None], size - place, place), extent[:, 1], width, size)
    # The three colours lie side by side in either product: one larger matrix is faster than three.
    x = torch.bmm(rows, canvas).view(count, size, width, 3)
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
