"""What tests of streamed data share: folders of small JPEGs, the same as tar shards, and files that are no pictures."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dllp import data
from dllp.data import StreamedData
from dllp.data.sources import from_class_folders
from dllp.data.unreadable import Report, UnreadableImages


def jpeg(rng: np.random.Generator, size: tuple[int, int], mode: str = "RGB", bright: int = 0) -> bytes:
    """Smooth noise: JPEG keeps it well."""
    small = Image.fromarray(rng.integers(bright, bright + 156, (4, 4, 3), np.uint8))
    buffer = io.BytesIO()
    small.resize(size, Image.Resampling.BICUBIC).convert(mode).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def folder(root: Path, train: int = 12, val: int = 4, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """train/<class>/ and val/<class>/ with images of many sizes, the classes dark and bright."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for k, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                size = int(rng.integers(18, 40)), int(rng.integers(18, 40))
                (root / part / name / f"{i:03d}.jpg").write_bytes(jpeg(rng, size, bright=100 * (k % 2)))
    return root


def training(
    root: Path, image_size: int, max_bad: str = "90%", report: Report | None = None, **options: Any
) -> StreamedData:
    """The training images of a class folder, none of which was looked at before."""
    sources, counts = from_class_folders(root, "train")
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(list(counts.values())))
    return StreamedData(sources, y, image_size, UnreadableImages(len(sources), max_bad, report), **options)


def load(root: Path, **options: Any) -> data.Dataset:
    """A set that is streamed, by this process alone unless `workers` says otherwise."""
    return data.load(root, **{"image_size": 16, "augment": "resized-crop", "workers": 0, **options})


def streamed(root: Path, **options: Any) -> StreamedData:
    """The training images of such a set."""
    found = load(root, **options).train
    assert isinstance(found, StreamedData)
    return found


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether batches are equal, bit for bit."""
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


def shards(root: Path, source: Path, split: int = 10, form: int = tarfile.PAX_FORMAT, long: str = "") -> Path:
    """The images of a class folder as tar shards of `split` images, in the same order."""
    root.mkdir()
    for part in ("train", "val"):
        classes = sorted(p.name for p in (source / part).iterdir())
        files = [(path, k) for k, name in enumerate(classes) for path in sorted((source / part / name).iterdir())]
        for number in range(0, len(files), split):
            with tarfile.open(root / f"{part}-{number // split:06d}.tar", "w", format=form) as tar:
                for path, label in files[number : number + split]:
                    key = f"{long}{path.parent.name}-{path.stem}"
                    add(tar, f"{key}.jpg", path.read_bytes())
                    add(tar, f"{key}.cls", str(label).encode())
    return root


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(content), 0.5  # a time that needs an extended header
    tar.addfile(info, io.BytesIO(content))


def bad(root: Path) -> list[str]:
    """Six files that are no pictures, one of each kind, in a class folder; returns their names."""
    whole = next(root.glob("*.jpg")).read_bytes()
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "PNG")
    huge = io.BytesIO()
    Image.new("1", (9000, 9000)).save(huge, "PNG")
    files = {
        "cut.jpg": whole[: len(whole) * 3 // 4], "empty.jpg": b"", "text.jpg": b"no image at all",
        "one.png": buffer.getvalue(), "huge.png": huge.getvalue(),
        "post.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }  # fmt: skip
    for name, content in files.items():
        (root / name).write_bytes(content)
    return list(files)
