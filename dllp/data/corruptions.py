"""Corrupted test images, through Pillow: Gaussian blur, sharpening, noise.

Two assumptions, stated because the paper leaves them open: the blur's radius is Pillow's, a standard deviation in
pixels; sharpening subtracts the 3x3 Laplacian (kernel 0 -1 0, -1 5 -1, 0 -1 0) and leaves the border as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from torch import Tensor

from dllp.data.arrays import ArrayData
from dllp.data.images import map_images
from dllp.errors import ConfigError

LAPLACE = ImageFilter.Kernel((3, 3), (0, -1, 0, -1, 5, -1, 0, -1, 0), scale=1)


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
        rng = np.random.default_rng(self.seed)

        def corrupted(image: Image.Image) -> Any:
            if self.kind == "noise":
                pixels = np.atleast_3d(np.asarray(image))
                noise = rng.standard_normal(pixels.shape, np.float32)
                return np.clip(np.rint(pixels + (255 * self.level) * noise), 0, 255).astype(np.uint8)
            return image.filter(LAPLACE if self.kind == "sharpen" else ImageFilter.GaussianBlur(self.level))

        return map_images(images, corrupted, self.name)

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
