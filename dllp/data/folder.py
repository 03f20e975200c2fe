"""Images in class folders: train/<class>/*.png and val or test/<class>/*.png, decoded into one uint8 array."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dllp import reading
from dllp.data.arrays import ArrayData, Augment
from dllp.data.augment import PADDING
from dllp.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
"""By content, whatever a file is called: Pillow would start Ghostscript for PostScript."""
PIXELS = 2**26
"""An image with more is refused by its header."""


def is_image_folder(folder: Path) -> bool:
    return (folder / "train").is_dir()


def arrays(
    folder: Path, image_size: int | None = None
) -> tuple[ArrayData, ArrayData, ArrayData | None, tuple[str, ...]]:
    """(train, test, validation, classes); validation is val/ where both val/ and test/ exist, else None.

    Every image is taken as RGB. With `image_size` all are resized to that square (bilinear); without it all must
    have one size already. Normalisation is that of the training images.
    """
    parts = {name: _files(folder / name) for name in ("train", "val", "test") if (folder / name).is_dir()}
    if len(parts) < 2:
        raise DataError(f"{folder} has neither val/ nor test/ beside train/: put <class>/*.png folders into one")
    classes = tuple(parts["train"])
    if len(classes) < 2:
        raise DataError(f"{folder / 'train'} holds {len(classes)} class folders: at least two are needed")
    for name, files in parts.items():
        extra = sorted(set(files) - set(classes))
        if extra:
            raise DataError(f"class {extra[0]!r} of {folder / name} is missing in {folder / 'train'}: add or remove it")
    size = (image_size, image_size) if image_size else None
    loaded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, files in parts.items():
        paths = [path for c in files for path in files[c]]
        pixels, size = _decode(folder, paths, size, resize=image_size is not None)
        labels = [classes.index(c) for c in files for _ in files[c]]
        loaded[name] = pixels, torch.tensor(labels)
    mean, std = statistics(loaded["train"][0])
    split = {name: ArrayData(x, y, mean, std) for name, (x, y) in loaded.items()}
    train = replace(split["train"], augment=default_augment(split["train"].x))
    return train, split.get("test", split.get("val", train)), split.get("val") if "test" in split else None, classes


def flat(folder: Path, size: tuple[int, int]) -> torch.Tensor:
    """(N, 3, H, W) uint8: every image of a folder and of the folders in it, resized to `size` = (H, W)."""
    places = [folder, *sorted(p for p in _listed(folder) if p.is_dir() and not p.name.startswith("."))]
    paths = [p for place in places for p in sorted(_listed(place)) if p.suffix.lower() in SUFFIXES]
    if not paths:
        raise DataError(f"{folder} holds no image ({', '.join(sorted(SUFFIXES))}): give another folder")
    return _decode(folder, paths, (size[1], size[0]), resize=True)[0]


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


def _files(folder: Path) -> dict[str, list[Path]]:
    classes: dict[str, list[Path]] = {}
    for child in sorted(p for p in _listed(folder) if p.is_dir() and not p.name.startswith(".")):
        if not child.name.isprintable():
            raise DataError(f"{child} has a name that is no text: rename it")
        classes[child.name] = sorted(p for p in _listed(child) if p.suffix.lower() in SUFFIXES)
        if not classes[child.name]:
            raise DataError(f"{child} holds no image ({', '.join(sorted(SUFFIXES))}): fill it or remove it")
    if not classes:
        raise DataError(f"{folder} holds no class folders: put the images into {folder.name}/<class>/")
    return classes


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}") from None


def _decode(
    root: Path, paths: list[Path], size: tuple[int, int] | None, resize: bool
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Every header first: memory is taken when all images are known to fit it."""
    for path in paths:
        found = _image(reading.contained(root, path, DataError)).size
        size = size or found
        if found != size and not resize:
            raise DataError(
                f"{path} is {found[0]}x{found[1]} but others are {size[0]}x{size[1]}: "
                "give image_size to resize them all"
            )
    width, height = size or (0, 0)
    if len(paths) * 3 * height * width > reading.cap():
        raise DataError(
            f"{len(paths)} images of {width}x{height} take more than the {reading.cap()} bytes of "
            f"${reading.CAP_VARIABLE}: give a smaller image_size"
        )
    pixels = np.empty((len(paths), 3, height, width), np.uint8)
    for i, path in enumerate(paths):
        image = _image(path, decode=True)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels[i] = np.asarray(image).transpose(2, 0, 1)
    return torch.from_numpy(pixels), (width, height)


def _image(path: Path, decode: bool = False) -> Image.Image:
    """The image as its header describes it, or decoded as RGB."""
    try:
        with reading.open_plain(path, DataError) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow finds odd about a file, and sizes: checked here
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > PIXELS:
                    raise DataError(f"{path} is {image.width}x{image.height}: more than {PIXELS} pixels are not read")
                return image.convert("RGB") if decode else image
    except DataError:
        raise
    except Exception as error:  # a damaged image can raise almost anything
        raise DataError(f"cannot read the image {path} ({error}): replace or remove it") from None
