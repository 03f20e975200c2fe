"""Images: opened under limits, decoded as RGB, cropped and resized one by one; augmented in batches in memory.

The filter of all resizing is the triangle that Pillow calls bilinear: without aliasing where an image shrinks.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from dllp.data.unreadable import Unreadable
from dllp.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # by content: Pillow would start Ghostscript for PostScript
MAX_PIXELS = 2**26  # an image with more is refused by its header
MIN_SIDE = 2  # a single row of pixels is no picture: such files stand where a download went wrong
DRAWS = 5  # random numbers for each training image: area, aspect ratio, position (two) and mirror
CENTRE = 7 / 8  # side of the centre crop that evaluation looks at, in units of the image's shorter side (224 of 256)
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # ranges of a random crop: fraction of the image's area, width over height
AREA_IN_MEMORY = (0.25, 1.0)  # the same for images in memory: they are small, less of one is no picture any more
PADDING = 4  # pixels by which images in memory are shifted at most
OVERSIZE = 1.5  # images are decoded no smaller than this many times their later size: what is lost then cannot be seen
LARGE = 2**24  # pixels of an image above which it is decoded alone: many at once would fill the memory
ALONE = threading.Lock()


def open_image(file: BinaryIO) -> Image.Image:
    """The image as its header describes it, its size checked, not decoded yet."""
    try:
        image = Image.open(file, formats=FORMATS)
    except (UnidentifiedImageError, SyntaxError):
        raise Unreadable("it is no image" if file.seek(0, io.SEEK_END) else "it is empty") from None
    except Exception as error:  # a damaged image can raise almost anything
        raise Unreadable(_reason(error)) from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Unreadable(f"it is {width}x{height}: more than {MAX_PIXELS} pixels are not read")
    if min(width, height) < MIN_SIDE:
        raise Unreadable(f"it is {width}x{height}: {MIN_SIDE} pixels a side are the least")
    return image


def alone(image: Image.Image) -> AbstractContextManager[object]:
    """A large image is decoded, and made smaller, while no other is."""
    return ALONE if image.width * image.height > LARGE else nullcontext()


def to_rgb(image: Image.Image) -> Image.Image:
    """The decoded image as RGB; grey, CMYK and palettes are converted, of 16-bit grey the high byte is taken."""
    try:
        image.load()
        if image.mode[0] in "IF":  # I;16, in older versions of Pillow I: convert would clip it at 255
            grey = np.asarray(image)
            if grey.dtype.kind == "f" or grey.min() < 0 or grey.max() >= 2**16:
                raise Unreadable("its pixels have more than 16 bits, and no known white: save it with 8 or 16 bits")
            image = Image.fromarray((grey >> 8).astype(np.uint8))
        return image if image.mode == "RGB" else image.convert("RGB")
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(_reason(error)) from None


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:120]


def map_images(images: Tensor, work: Callable[[Image.Image], Any], purpose: str) -> Tensor:
    """uint8 images (N, 1 or 3, H, W), each as Pillow's image through `work`, which returns an image or its pixels."""
    if images.ndim != 4 or images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
        found = f"{images.dtype} of shape {tuple(images.shape)}"
        raise DataError(f"{purpose} needs uint8 images with 1 or 3 channels, not {found}")
    done = []
    for pixels in images.permute(0, 2, 3, 1).contiguous().cpu().numpy():
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)  # grey has no third axis
        done.append(np.atleast_3d(work(image)))
    return torch.from_numpy(np.stack(done)).permute(0, 3, 1, 2).contiguous().to(images.device)


def crop_boxes(draws: np.ndarray, area: tuple[float, float] = AREA) -> np.ndarray:
    """(B, DRAWS) random numbers -> (B, 4) width, height, horizontal and vertical position of a crop for each image.

    Sizes are in units of the root of the image's area, positions in units of the room that the crop leaves.
    """
    fraction = area[0] + (area[1] - area[0]) * draws[:, 0]
    aspect = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** draws[:, 1]
    return np.stack([np.sqrt(fraction * aspect), np.sqrt(fraction / aspect), draws[:, 2], draws[:, 3]], 1)


def crop(content: bytes, box: Sequence[float] | None, size: int) -> np.ndarray:
    """(h, w, 3) uint8: a crop of an encoded image that later becomes a square of `size` pixels.

    `box` is a row of :func:`crop_boxes`, None the centre. A much larger crop is made smaller by whole factors, inside
    the JPEG decoder where that is possible.
    """
    image = open_image(io.BytesIO(content))
    width, height = image.size
    left, top, across, down = _centre(width, height) if box is None else _fitted(width, height, box)
    factor = min(across, down) / (OVERSIZE * size)
    if factor >= 2:
        image.draft(None, (math.ceil(width / factor), math.ceil(height / factor)))
        x, y = image.width / width, image.height / height
        left, top, across, down = left * x, top * y, across * x, down * y
    with alone(image):
        image = to_rgb(image)
        right = max(int(left) + 1, min(image.width, round(left + across)))
        bottom = max(int(top) + 1, min(image.height, round(top + down)))
        place = int(left), int(top), right, bottom
        factor = int(min(right - place[0], bottom - place[1]) / (OVERSIZE * size))
        return np.asarray(image.reduce(factor, place) if factor > 1 else image.crop(place))


def _centre(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, width and height of the square that evaluation looks at."""
    side = max(1.0, CENTRE * min(width, height))
    return (width - side) / 2, (height - side) / 2, side, side


def _fitted(width: int, height: int, box: Sequence[float]) -> tuple[float, float, float, float]:
    """Left, top, width and height of a box, cut to fit into a narrow image. Numpy is slower for one."""
    unit = math.sqrt(width * height)
    w, h = min(unit * box[0], width), min(unit * box[1], height)
    w, h = max(1.0, min(w, h * ASPECT[1])), max(1.0, min(h, w * ASPECT[1]))
    return box[2] * (width - w), box[3] * (height - h), w, h


def resize_one(image: np.ndarray, mirror: bool, size: int) -> np.ndarray:
    """(h, w, 3) uint8 -> (3, size, size) uint8, mirrored if `mirror`."""
    old = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    new = interpolate(old, (size, size), mode="bilinear", antialias=True)[0].numpy()
    return new[:, :, ::-1] if mirror else new


def random_boxes(count: int, generator: torch.Generator, height: int, width: int) -> Tensor:
    """(count, 4) top, left, height and width of random crops of an image, in pixels."""
    draws = torch.rand(count, 4, generator=generator, dtype=torch.float64).numpy()
    wide, high, across, down = torch.from_numpy(crop_boxes(draws, AREA_IN_MEMORY)).unbind(1)
    unit, longest = (height * width) ** 0.5, ASPECT[1]
    wide, high = (wide * unit).clamp(max=width), (high * unit).clamp(max=height)
    wide, high = wide.minimum(high * longest).clamp(min=1), high.minimum(wide * longest).clamp(min=1)
    return torch.stack([down * (height - high), across * (width - wide), high, wide], dim=1).float()


def crop_flip(images: Tensor, index: Tensor, offset: Tensor, flip: Tensor) -> Tensor:
    """Images (N, C, H, W)[index], shifted by `offset` (B, 2) with reflection, mirrored by `flip` (B,): one gather."""
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
    old = torch.arange(size, device=start.device) + 0.5
    place = old * (length / size)[:, None] + start[:, None]
    weights = (1 - (old - place[:, :, None]).abs_()).clamp_min_(0)
    return weights.div_(weights.sum(2, keepdim=True))


def _reflect(position: Tensor, size: int) -> Tensor:
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)
