"""Readers of data sets: arrays, CIFAR-10, images, tar shards."""

from __future__ import annotations

import functools
import gzip
import io
import random
import tarfile
from pathlib import Path

import numpy as np
from mutate import mutate, mutate_array
from PIL import Image
from reader import Reader

from dllp import data
from dllp.data import cifar10


def arrays(root: Path) -> list[Reader]:
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    whole = {}
    for part in ("train", "test"):
        for name, value in (("x", rng.integers(0, 255, (6, 5, 5, 3), np.uint8)), ("y", np.arange(6) % 3)):
            np.save(root / f"{part}_{name}.npy", value)
            whole[f"{part}_{name}.npy"] = (root / f"{part}_{name}.npy").read_bytes()

    def packed(value: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, value)
        return buffer.getvalue()

    def read(name: str, content: bytes) -> object:
        (root / name).write_bytes(content)
        try:
            return data.load(root)
        finally:
            (root / name).write_bytes(whole[name])

    more = {
        "train_x.npy": [rng.random((6, 4)), rng.random((6, 3, 5, 5)).astype(">f4"), np.zeros((6, 5, 5), np.uint8)],
        "train_y.npy": [rng.random((6, 2)).astype("f4"), np.arange(6, dtype=">i2") % 2, np.arange(6, dtype="u8")],
    }
    return [
        Reader(name, [whole[name], *map(packed, values)], functools.partial(read, name), "", (mutate_array,))
        for name, values in more.items()
    ]


def cifar(root: Path) -> list[Reader]:
    root.mkdir(parents=True)
    from tests.data.test_cifar10 import LABELS as DIGITS
    from tests.data.test_cifar10 import PIXELS, python2_pickle

    pickled = [python2_pickle(p[:2], y[:2].tolist()) for p, y in zip(PIXELS[:2], DIGITS, strict=False)]
    memo = pickled[0].replace(b"}(", b"}q\x01(", 1).replace(b"](", b"]q\x02(", 1).replace(b"u.", b"h\x02h\x02su.")
    raw = [bytes([int(y)]) + p.tobytes() for p, y in zip(PIXELS[0][:2], DIGITS[0], strict=False)]
    found = []
    for version, seeds in ((cifar10.PYTHON, [*pickled, memo]), (cifar10.BINARY, [b"".join(raw), raw[0]])):

        def read_file(content: bytes, version: cifar10.Version = version, first: bytes = seeds[0]) -> object:
            folder = root / version.folder
            folder.mkdir(exist_ok=True)
            for name in version.members():
                (folder / name).write_bytes(first)
            (folder / version.members()[2]).write_bytes(content)
            return cifar10.read_folder(folder, version)

        def read_packed(content: bytes, version: cifar10.Version = version) -> object:
            path = root / version.archive
            path.write_bytes(content)
            return cifar10.read_archive(path, version)

        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in version.members():
                info = tarfile.TarInfo(f"{version.folder}/{name}")
                info.size, info.pax_headers = len(seeds[0]), {"comment": "é"}
                tar.addfile(info, io.BytesIO(seeds[0]))
        plain = buffer.getvalue()

        def repacked(rng: random.Random, content: bytes, other: bytes, plain: bytes = plain) -> bytes:
            return gzip.compress(mutate(rng, plain, plain), 1)

        kind = "python" if version is cifar10.PYTHON else "binary"
        found.append(Reader(f"CIFAR-10 {kind}", seeds, read_file, "data_batch_3"))
        archive = [gzip.compress(plain, 1)]
        found.append(Reader(f"CIFAR-10 {kind} archive", archive, read_packed, version.archive, (repacked,), share=0.5))
    return found


def images(root: Path) -> list[Reader]:
    rng = np.random.default_rng(0)
    files: dict[str, list[bytes]] = {"png": [], "jpg": [], "bmp": [], "webp": []}
    for suffix, kind in (("png", "PNG"), ("jpg", "JPEG"), ("bmp", "BMP"), ("webp", "WEBP")):
        for mode in ("RGB", "L", "P", "RGBA") if kind == "PNG" else ("RGB",):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8)).convert(mode).save(buffer, kind)
            files[suffix].append(buffer.getvalue())
    found = []
    for suffix, seeds in files.items():
        folder = root / suffix
        for part in ("train", "test"):
            for name in ("a", "b"):
                (folder / part / name).mkdir(parents=True)
                (folder / part / name / f"one.{suffix}").write_bytes(seeds[0])
        path = folder / "train" / "b" / f"one.{suffix}"

        def read(content: bytes, path: Path = path, folder: Path = folder) -> object:
            path.write_bytes(content)
            return data.load(folder)

        found.append(Reader(f"image .{suffix}", seeds, read, path.name))
    return found


def shards(root: Path) -> list[Reader]:
    """A tar shard; half of the damage is done to its headers."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8)).save(buffer, "JPEG")
    seeds = []
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=form) as tar:
            for key, label in (("a", b"0"), ("b" * 120, b"1")):
                for suffix, content in (("jpg", buffer.getvalue()), ("cls", label)):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size, info.mtime = len(content), 0.5
                    tar.addfile(info, io.BytesIO(content))
        seeds.append(packed.getvalue())
    (root / "val-000000.tar").write_bytes(seeds[0])
    path = root / "train-000000.tar"

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return data.load(root, image_size=8, workers=0)

    def headers(rng: random.Random, content: bytes, other: bytes) -> bytes:
        """Damage to one header, and a checksum that fits it: else every change would be told by the checksum."""
        start = 512 * rng.randrange(max(1, len(content) // 512))
        block = bytearray(mutate(rng, content[start : start + 512], other)[:512].ljust(512, b"\0"))
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return content[:start] + bytes(block) + content[start + 512 :]

    return [Reader("tar shard", seeds, read, str(root), (headers,), share=0.5)]
