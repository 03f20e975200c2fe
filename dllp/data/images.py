"""One image from its bytes: the part of it that a draw asks for, in colour, no larger than its later size needs."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from dllp.data.bad import Unreadable

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
"""By content, whatever a file is called: Pillow would start Ghostscript for PostScript."""
JPEG = b"\xff\xd8\xff"
PIXELS = 2**26
"""An image with more is refused by its header."""
LEAST_SIDE = 2
"""A single row of pixels is no picture: such files stand where a download went wrong."""
DRAWS = 5
"""Random numbers for each training image: area, shape, place (two) and mirror."""
CENTRE = 7 / 8
"""Side of the middle part that evaluation looks at, in units of the image's shorter side (224 of 256)."""
AREA, SHAPE = (0.08, 1.0), (3 / 4, 4 / 3)
SMALL = 2**14
"""Pixels up to which an image is copied faster whole than cropped."""
GAP = 1.5
"""Images are decoded no smaller than this many times their later size: what is lost then cannot be seen."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, such as what Pillow finds odd about a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def opened(file: BinaryIO) -> Image.Image:
    """The image as its header describes it, its size checked."""
    start = file.read(len(JPEG))
    file.seek(0)
    try:
        # Most are JPEGs: where images are small, Pillow's way to find that out takes a twentieth of all time.
        image = JpegImageFile(file) if start == JPEG else Image.open(file, formats=FORMATS)
    except (UnidentifiedImageError, SyntaxError):
        raise Unreadable("it is no image" if start else "it is empty") from None
    except Exception as error:  # a damaged image can raise almost anything
        raise Unreadable(_reason(error)) from None
    width, height = image.size
    if width * height > PIXELS:
        raise Unreadable(f"it is {width}x{height}: more than {PIXELS} pixels are not read")
    if min(width, height) < LEAST_SIDE:
        raise Unreadable(f"it is {width}x{height}: {LEAST_SIDE} pixels a side are the least")
    return image


def colour(image: Image.Image) -> Image.Image:
    """The decoded image as RGB; grey, CMYK and palettes are converted."""
    try:
        image.load()
        if image.mode[0] in "IF":  # I;16, in older versions of Pillow I: it would be clipped at 255
            image = Image.fromarray(_high_bytes(np.asarray(image)))
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:
        raise Unreadable(_reason(error)) from None


def boxes(draws: np.ndarray, area: tuple[float, float] = AREA) -> np.ndarray:
    """(B, DRAWS) random numbers -> for each image what :class:`Part` takes of it: width and height, place across, down.

    Sizes are in units of the root of the image's area, places in units of the room that the part leaves.
    """
    share = area[0] + (area[1] - area[0]) * draws[:, 0]
    shape = SHAPE[0] * (SHAPE[1] / SHAPE[0]) ** draws[:, 1]
    return np.stack([np.sqrt(share * shape), np.sqrt(share / shape), draws[:, 2], draws[:, 3]], 1)


class Part:
    """The part of an image that is wanted, on its way from its bytes: opened, then :meth:`decode`, then :meth:`cut`.

    Args:
        content: The encoded image.
        box: One of :func:`boxes`; None for the middle.
        size: Side of the square that the part becomes later. A part that is much larger is made smaller by whole
            factors, inside the JPEG decoder where that is possible.
    """

    __slots__ = ("box", "image", "size")

    def __init__(self, content: bytes, box: Sequence[float] | None, size: int) -> None:
        self.image, self.size = opened(io.BytesIO(content)), size
        width, height = self.image.size
        left, top, across, down = _middle(width, height) if box is None else _drawn(width, height, box)
        factor = min(across, down) / (GAP * size)
        if factor >= 2:
            self.image.draft(None, (math.ceil(width / factor), math.ceil(height / factor)))
            x, y = self.image.width / width, self.image.height / height
            left, top, across, down = left * x, top * y, across * x, down * y
        self.box = left, top, left + across, top + down

    @property
    def area(self) -> int:
        """Pixels that will be decoded."""
        return self.image.width * self.image.height

    def decode(self) -> Part:
        self.image = colour(self.image)
        return self

    def cut(self) -> np.ndarray:
        """(h, w, 3) uint8."""
        image = self.image
        width, height = image.size
        left, top = int(self.box[0]), int(self.box[1])
        right = max(left + 1, min(width, round(self.box[2])))
        bottom = max(top + 1, min(height, round(self.box[3])))
        factor = int(min(right - left, bottom - top) / (GAP * self.size))
        if factor > 1:
            return pixels(image.reduce(factor, (left, top, right, bottom)))
        if width * height > SMALL:
            return pixels(image.crop((left, top, right, bottom)))
        return pixels(image)[top:bottom, left:right]


def pixels(image: Image.Image) -> np.ndarray:
    """(H, W, 3) without the copy that numpy's own way takes."""
    return np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, 3)


def _high_bytes(grey: np.ndarray) -> np.ndarray:
    """16 bits as 8: the high byte is what Pillow itself keeps of 16-bit colour."""
    if grey.dtype.kind == "f" or grey.min() < 0 or grey.max() >= 2**16:
        raise Unreadable("its pixels have more than 16 bits, and no known white: save it with 8 or 16 bits")
    return (grey >> 8).astype(np.uint8)


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, width and height of the square that evaluation looks at."""
    side = max(1.0, CENTRE * min(width, height))
    return (width - side) / 2, (height - side) / 2, side, side


def _drawn(width: int, height: int, box: Sequence[float]) -> tuple[float, float, float, float]:
    """The same of a box; where the image is too narrow for it, the box is cut to fit. Numpy is slower for one."""
    unit = math.sqrt(width * height)
    w, h = min(unit * box[0], width), min(unit * box[1], height)
    w, h = max(1.0, min(w, h * SHAPE[1])), max(1.0, min(h, w * SHAPE[1]))
    return box[2] * (width - w), box[3] * (height - h), w, h


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:120]
