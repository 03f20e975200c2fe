"""Out-of-distribution inputs in the shape a network expects: noise, another data set, classes left out of training.

They have no labels that mean anything to the network; its uncertainty should tell them apart from its own test data.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from dllp.data import Dataset, load, names
from dllp.data.arrays import ArrayData, Split, generator
from dllp.data.image_folder import decode_folder
from dllp.data.images import map_images
from dllp.errors import ConfigError, DataError

NOISE, LEFT_OUT = "noise", "left-out"


def find(name: str, like: ArrayData, *, left_out: ArrayData | None = None, root: str | None = None) -> ArrayData:
    """Out-of-distribution inputs by name, in the shape of `like`.

    The name is `noise`, a data set that :func:`dllp.data.load` knows (its test split), a folder of a data set or of
    images, or `left-out`: the given examples of classes that a run was not trained on.
    """
    if name == NOISE:
        return noise(like)
    if name == LEFT_OUT:
        if left_out is None:
            raise ConfigError("the run left no class out: train one with --leave-out NAME,... first")
        return left_out
    path = Path(name).expanduser()
    if name in names() or (path / "test_x.npy").is_file():
        return resized(load(name, root=root).test.x, like)
    if path.is_dir():
        splits = ("test", "val") if (path / "train").is_dir() else ()
        held = next((path / split for split in splits if (path / split).is_dir()), path)
        return resized(decode_folder(held, _image_shape(like)[1:]), like)
    known = ", ".join((NOISE, *names(), LEFT_OUT))
    raise ConfigError(f"unknown out-of-distribution data {name!r}: choose {known} or a folder of images")


def same(name: str, other: str) -> bool:
    """True where both name the same data: the same word, or the same folder however its path is spelled."""
    words = {name, other} & {NOISE, LEFT_OUT, *names()}
    one, two = (os.path.realpath(os.path.expanduser(path)) for path in (name, other))
    return name == other or (not words and one == two)


def noise(like: ArrayData) -> ArrayData:
    """As many inputs as `like` has, every number uniform: over 0..255 for images, over its own range for floats."""
    rng = generator(0, 4)
    if like.x.dtype == torch.uint8:
        return unlabelled(like, torch.randint(0, 256, like.x.shape, generator=rng, dtype=torch.uint8))
    low, high = float(like.x.min()), float(like.x.max())
    return unlabelled(like, torch.rand(like.x.shape, generator=rng) * (high - low) + low)


def resized(images: Tensor, like: ArrayData) -> ArrayData:
    """uint8 images (N, 1 or 3, h, w) in size and channels of `like` (bilinear), normalised as its images are."""
    channels, height, width = _image_shape(like)
    mode, size = "L" if channels == 1 else "RGB", (width, height)
    return unlabelled(
        like, map_images(images, lambda x: x.convert(mode).resize(size, Image.Resampling.BILINEAR), "resizing")
    )


def _image_shape(like: ArrayData) -> tuple[int, int, int]:
    shape = tuple(like.x.shape[1:])
    if like.x.dtype != torch.uint8 or len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(f"images cannot become inputs of shape {shape} and type {like.x.dtype}: use noise instead")
    return shape[0], shape[1], shape[2]


def unlabelled(like: ArrayData, x: Tensor) -> ArrayData:
    """Inputs normalised as those of `like`; their labels are all zero and mean nothing."""
    return replace(like, x=x, y=torch.zeros(len(x), dtype=torch.int64), augment="none")


def without(data: Dataset, classes: tuple[str, ...]) -> Dataset:
    """The data set without some of its classes; their test inputs become its `left_out`."""
    if not data.train.is_classification:
        raise ConfigError(f"{data.name} is a regression: it has no classes to leave out")
    train, _ = leave_out(data.train, data.classes, classes)
    test, left = leave_out(data.test, data.classes, classes)
    held = data.validation and leave_out(data.validation, data.classes, classes)[0]
    stay = tuple(name for name in data.classes if name not in classes)
    return replace(data, train=train, test=test, validation=held, classes=stay, left_out=left)


def leave_out(data: Split, classes: tuple[str, ...], without: tuple[str, ...]) -> tuple[Split, Split]:
    """(kept, left out): examples of all other classes, relabelled 0.., and those of the named ones."""
    unknown = [name for name in without if name not in classes]
    if unknown:
        raise ConfigError(f"there is no class {unknown[0]!r} to leave out: choose from {', '.join(classes)}")
    if len(classes) - len(set(without)) < 2:
        raise ConfigError(f"leaving out {', '.join(without)} leaves fewer than two classes: name fewer")
    stays = torch.tensor([name not in without for name in classes])
    kept = stays[data.y.cpu()]
    relabel = stays.cumsum(0) - 1
    inside, outside = data.subset(kept.nonzero().flatten()), data.subset((~kept).nonzero().flatten())
    return (
        replace(inside, y=relabel.to(inside.y.device)[inside.y]),
        replace(outside, y=torch.zeros_like(outside.y), augment="none"),
    )
