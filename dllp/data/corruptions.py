"""Corrupted test images, through Pillow: Gaussian blur, sharpening, noise.

Two assumptions, stated because the paper leaves them open: the blur's radius is Pillow's, a standard deviation in
pixels; sharpening subtracts the 3x3 Laplacian (kernel 0 -1 0, -1 5 -1, 0 -1 0) and leaves the border as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from dllp.data.arrays import ArrayData
from dllp.errors import ConfigError, DataError

LAPLACE = (0, -1, 0, -1, 5, -1, 0, -1, 0)


@dataclass(frozen=True)
class Corruption:
    """One corruption: its `kind` and `level` (the blur's radius in pixels, the noise's sigma in units of 0..1)."""

    kind: str
    level: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """Text for :func:`parse`, for example `gaussian-blur:2`."""
        return self.kind if self.kind == "sharpen" else f"{self.kind}:{self.level:g}"

    def __call__(self, images: Tensor) -> Tensor:
        """Corrupted copies of uint8 images (N, C, H, W), C 1 or 3."""
        if images.ndim != 4 or images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
            raise DataError(
                f"{self.name} needs uint8 images with 1 or 3 channels, not {images.dtype} of shape "
                f"{tuple(images.shape)}"
            )
        old = np.ascontiguousarray(images.permute(0, 2, 3, 1).cpu().numpy())
        if self.kind == "noise":
            noise = np.random.default_rng(self.seed).standard_normal(old.shape, np.float32)
            new = np.clip(np.rint(old + (255 * self.level) * noise), 0, 255).astype(np.uint8)
        else:
            blur = self.kind == "gaussian-blur"
            kernel = ImageFilter.GaussianBlur(self.level) if blur else ImageFilter.Kernel((3, 3), LAPLACE, scale=1)
            new = np.empty_like(old)
            for i, pixels in enumerate(old):
                image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)  # grey has no third axis
                new[i] = np.asarray(image.filter(kernel)).reshape(pixels.shape)
        return torch.from_numpy(new).permute(0, 3, 1, 2).contiguous().to(images.device)

    def apply_to(self, data: ArrayData) -> ArrayData:
        """The same data set with corrupted images."""
        return replace(data, x=self(data.x))


def parse(text: str, seed: int = 0) -> list[Corruption]:
    """`gaussian-blur:1,2,3,5`, `sharpen` or `noise:0.1` as a list of corruptions, one for each level."""
    kind, _, levels = text.strip().partition(":")
    if kind == "sharpen" and not levels:
        return [Corruption(kind)]
    try:
        values = [float(level) for level in levels.split(",")]
    except ValueError:
        values = [0.0]
    if kind not in ("gaussian-blur", "noise") or not all(0 < value < math.inf for value in values):
        raise ConfigError(f"unknown corruption {text!r}: choose gaussian-blur:RADIUS,..., sharpen or noise:SIGMA,...")
    return [Corruption(kind, value, seed) for value in values]
