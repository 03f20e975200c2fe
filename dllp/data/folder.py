"""Small folders of images, decoded into one uint8 array in memory."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dllp import files
from dllp.data import images, workers
from dllp.data.arrays import ArrayData, Augment
from dllp.data.augment import PADDING
from dllp.data.bad import MAX_BAD, Tally, Tell, Unreadable, shortened
from dllp.data.sources import Sources, of_files
from dllp.errors import DataError

TOGETHER = 64
"""Images that a thread decodes before it looks for others."""
LARGE = 2**24
"""Pixels of an image above which it is decoded alone: by many threads at once such images would fill the memory."""
ALONE = threading.Lock()


def is_image_folder(folder: Path) -> bool:
    return (folder / "train").is_dir()


def arrays(
    splits: dict[str, tuple[Sources, torch.Tensor]],
    size: tuple[int, int],
    *,
    resize: bool = False,
    max_bad: str | float = MAX_BAD,
    tell: Tell | None = None,
) -> tuple[ArrayData, ArrayData, ArrayData | None]:
    """(train, test, validation); validation is val/ where both val/ and test/ exist, else None.

    Every image is taken as RGB. With `resize` all are resized (bilinear) to `size`, width and height; without it all
    must have that size already. Normalisation is that of the training images.
    """
    loaded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, (place, y) in splits.items():
        pixels, read = _decode(place, size, Tally(len(place), max_bad, tell), resize)
        loaded[name] = pixels, y[read]
    mean, std = statistics(loaded["train"][0])
    split = {name: ArrayData(x, y, mean, std) for name, (x, y) in loaded.items()}
    train = replace(split["train"], augment=default_augment(split["train"].x))
    return train, split.get("test", split.get("val", train)), split.get("val") if "test" in split else None


def flat(folder: Path, size: tuple[int, int], max_bad: str | float = 0.0) -> torch.Tensor:
    """(N, 3, H, W) uint8: every image of a folder and of the folders in it, resized to `size` = (H, W)."""
    places = [folder, *sorted(p for p in _listed(folder) if p.is_dir() and not p.name.startswith("."))]
    paths = [p for place in places for p in sorted(_listed(place)) if p.suffix.lower() in images.SUFFIXES]
    if not paths:
        raise DataError(f"{folder} holds no image ({', '.join(sorted(images.SUFFIXES))}): give another folder")
    names = [str(files.contained(folder, path, DataError).relative_to(folder)) for path in paths]
    return _decode(of_files(folder, names), (size[1], size[0]), Tally(len(paths), max_bad), resize=True)[0]


def first_size(sources: Sources) -> tuple[int, int]:
    """Width and height of the first image that can be read."""
    reasons = []
    for i in range(len(sources)):
        try:
            with images.quiet():
                return images.opened(io.BytesIO(sources.read(i))).size
        except Unreadable as error:
            reasons.append(f"{sources.name(i)} ({error})")
    raise DataError(f"none of {len(sources)} training images can be read: {shortened(reasons)}")


def default_augment(x: torch.Tensor) -> Augment:
    """Colour images are cropped and flipped; grey ones may be writing, which a mirror makes wrong."""
    return "crop-flip" if x.shape[1] == 3 and min(x.shape[2:]) > PADDING else "none"


def statistics(x: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images (N, C, H, W), in units of 0..1."""
    counts = torch.stack([torch.bincount(x[:, c].flatten(), minlength=256) for c in range(x.shape[1])]).double()
    share = counts / counts.sum(1, keepdim=True)
    value = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ value
    std = (share @ value**2 - mean**2).clamp_min(0).sqrt()
    return tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist())


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}") from None


def _decode(sources: Sources, size: tuple[int, int], tally: Tally, resize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels, and which images they are: each is opened once, by threads, for Pillow decodes without Python's lock."""
    width, height = size
    if len(sources) * 3 * height * width > files.cap():
        raise DataError(
            f"{len(sources)} images of {width}x{height} take more than the {files.cap()} bytes of "
            f"${files.CAP_VARIABLE}: give a smaller image_size"
        )
    pixels = np.empty((len(sources), 3, height, width), np.uint8)

    def work(start: int) -> list[tuple[int, str]]:
        """Fill the rows from `start` on; returns what cannot be read."""
        bad = []
        for i in range(start, min(start + TOGETHER, len(sources))):
            try:
                pixels[i] = images.pixels(_image(sources, i, size, resize)).transpose(2, 0, 1)
            except Unreadable as error:
                bad.append((i, str(error)))
        return bad

    with images.quiet(), ThreadPoolExecutor(workers.cores()) as pool:
        bad = [found for some in pool.map(work, range(0, len(sources), TOGETHER)) for found in some]
    tally.add((sources.name(i), reason) for i, reason in bad)
    left_out = {i for i, _ in bad}
    read = [i for i in range(len(sources)) if i not in left_out]
    for k, i in enumerate(read):
        if k != i:
            pixels[k] = pixels[i]
    return torch.from_numpy(pixels[: len(read)]), torch.tensor(read, dtype=torch.int64)


def _image(sources: Sources, i: int, size: tuple[int, int], resize: bool) -> Image.Image:
    """One image of `size`, decoded as RGB."""
    image = images.opened(io.BytesIO(sources.read(i)))
    if image.size != size and not resize:
        raise DataError(
            f"{sources.path(i)} is {image.width}x{image.height} but others are {size[0]}x{size[1]}: "
            "give image_size to resize them all"
        )
    with ALONE if image.width * image.height > LARGE else nullcontext():
        image = images.colour(image)
        return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)
