"""Corrupted test images, through Pillow: Gaussian blur, sharpening, noise.

Two assumptions, stated because the paper leaves them open: the blur's radius is Pillow's, a standard deviation in
pixels; sharpening subtracts the 3x3 Laplacian (kernel 0 -1 0, -1 5 -1, 0 -1 0) and leaves the border as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from dllp.data.arrays import ArrayData
from dllp.errors import ConfigError, DataError

LAPLACE = (0, -1, 0, -1, 5, -1, 0, -1, 0)
KINDS = ("gaussian-blur", "sharpen", "noise")
Images = TypeVar("Images", Tensor, np.ndarray)


@dataclass(frozen=True)
class Corruption:
    """One corruption: its `kind` and `level` (the blur's radius in pixels, the noise's sigma in units of 0..1)."""

    kind: str
    level: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """As :func:`parse` reads it, for example `gaussian-blur:2`."""
        return self.kind if self.kind == "sharpen" else f"{self.kind}:{self.level:g}"

    def __call__(self, images: Images) -> Images:
        """Corrupted copies of uint8 images: a tensor (N, C, H, W) or an array (N, H, W, C), C 1 or 3."""
        if not isinstance(images, Tensor):
            return self._apply(images)
        if images.ndim != 4 or images.dtype != torch.uint8:
            raise DataError(self._needs(str(images.dtype), tuple(images.shape)))
        out = self._apply(images.permute(0, 2, 3, 1).cpu().numpy())
        return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous().to(images.device)

    def apply_to(self, data: ArrayData) -> ArrayData:
        """The same data set with corrupted images."""
        return replace(data, x=self(data.x))

    def _apply(self, images: np.ndarray) -> np.ndarray:
        if images.ndim != 4 or images.dtype != np.uint8 or images.shape[3] not in (1, 3):
            raise DataError(self._needs(str(images.dtype), images.shape))
        if self.kind == "noise":
            noise = np.random.default_rng(self.seed).standard_normal(images.shape, np.float32)
            return np.clip(np.rint(images + (255 * self.level) * noise), 0, 255).astype(np.uint8)
        blur = self.kind == "gaussian-blur"
        filtering = ImageFilter.GaussianBlur(self.level) if blur else ImageFilter.Kernel((3, 3), LAPLACE, scale=1)
        out = np.empty(images.shape, np.uint8)
        grey = images.shape[3] == 1
        for i, pixels in enumerate(np.ascontiguousarray(images)):
            filtered = np.asarray(Image.fromarray(pixels[:, :, 0] if grey else pixels).filter(filtering))
            out[i] = filtered[:, :, None] if grey else filtered
        return out

    def _needs(self, dtype: str, shape: tuple[int, ...]) -> str:
        return f"{self.name} needs uint8 images with 1 or 3 channels, not {dtype} of shape {shape}"


def parse(text: str, seed: int = 0) -> list[Corruption]:
    """`gaussian-blur:1,2,3,5`, `sharpen` or `noise:0.1` as a list of corruptions, one for each level."""
    kind, _, levels = text.strip().partition(":")
    if kind not in KINDS:
        raise ConfigError(f"unknown corruption {kind!r}: choose gaussian-blur:RADIUS,..., sharpen or noise:SIGMA,...")
    if kind == "sharpen":
        if levels:
            raise ConfigError(f"corruption {text!r}: sharpen takes no level")
        return [Corruption(kind)]
    try:
        values = [float(level) for level in levels.split(",")]
    except ValueError:
        raise ConfigError(f"corruption {text!r}: give its levels as numbers, for example {kind}:1,2") from None
    if not all(0 < value < math.inf for value in values):
        raise ConfigError(f"corruption {text!r}: every level must be a positive number")
    return [Corruption(kind, value, seed) for value in values]
