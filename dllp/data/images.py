"""One image from its bytes: the part of it that a draw asks for, in colour, no larger than its later size needs."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from dllp.data.bad import Unreadable

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
"""By content, whatever a file is called: Pillow would start Ghostscript for PostScript."""
PIXELS = 2**26
"""An image with more is refused by its header."""
LEAST_SIDE = 2
"""A single row of pixels is no picture: such files stand where a download went wrong."""
DRAWS = 5
"""Random numbers for each training image: area, shape, place (two) and mirror."""
CENTRE = 7 / 8
"""Side of the middle part that evaluation looks at, in units of the image's shorter side (224 of 256)."""
AREA, SHAPE = (0.08, 1.0), (3 / 4, 4 / 3)
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
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise Unreadable("it is no image" if file.seek(0, 2) else "it is empty") from None
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
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:
        raise Unreadable(_reason(error)) from None


def part(content: bytes, draw: Sequence[float] | None, size: int) -> np.ndarray:
    """(h, w, 3) uint8: the drawn part of an image, or its middle, still to be resized to `size` x `size`.

    A part that is much larger is made smaller by whole factors, inside the JPEG decoder where that is possible.
    """
    image = opened(io.BytesIO(content))
    width, height = image.size
    box = _middle(width, height) if draw is None else drawn(width, height, np.asarray(draw), AREA)
    factor = min(box[2], box[3]) / (GAP * size)
    if factor >= 2:
        image.draft(None, (math.ceil(width / factor), math.ceil(height / factor)))
        if image.size != (width, height):
            across, down = image.size[0] / width, image.size[1] / height
            box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    image = colour(image)
    left, top = int(box[0]), int(box[1])
    right = max(left + 1, min(image.width, round(box[0] + box[2])))
    bottom = max(top + 1, min(image.height, round(box[1] + box[3])))
    factor = int(min(right - left, bottom - top) / (GAP * size))
    if factor > 1:
        return _pixels(image.reduce(factor, (left, top, right, bottom)))
    whole = _pixels(image)
    found = whole[top:bottom, left:right]
    return found.copy() if 2 * found.size < whole.size else found  # a small part must not keep a large image alive


def _pixels(image: Image.Image) -> np.ndarray:
    """(H, W, 3) without the copy that numpy's own way takes."""
    return np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, 3)


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, width and height of the square that evaluation looks at."""
    side = max(1.0, CENTRE * min(width, height))
    return (width - side) / 2, (height - side) / 2, side, side


def drawn(width: int, height: int, draw: np.ndarray, area: tuple[float, float]) -> tuple[Any, Any, Any, Any]:
    """Random numbers (..., 4 or more) -> left, top, width and height (...,) of a box: its share of the area lies
    within `area`, its shape within :data:`SHAPE`. Where the image is too narrow for it, the box is cut to fit."""
    wanted = width * height * (area[0] + (area[1] - area[0]) * draw[..., 0])
    shape = np.exp(np.log(SHAPE[0]) + (np.log(SHAPE[1]) - np.log(SHAPE[0])) * draw[..., 1])
    w, h = np.minimum(np.sqrt(wanted * shape), width), np.minimum(np.sqrt(wanted / shape), height)
    w, h = np.maximum(1.0, np.minimum(w, h * SHAPE[1])), np.maximum(1.0, np.minimum(h, w * SHAPE[1]))
    return draw[..., 2] * (width - w), draw[..., 3] * (height - h), w, h


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:120]
