"""Files that would fill memory if anyone believed them; run as a process, it prints what each one really took.

python bombs.py FOLDER    ->  a JSON object: name -> [declared bytes, bytes at the peak, outcome]
"""

from __future__ import annotations

import bz2
import io
import json
import os
import resource
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from dllp import data, files
from dllp.data import cifar10
from dllp.errors import DllpError
from dllp.runs import pretrained, settings
from dllp.runs.tensors import read_tensors
from paper.store import Store

MB = 2**20
SLACK = 48 * MB
"""What Python, numpy and PyTorch take for themselves."""


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(read: Callable[[], object]) -> tuple[int, str]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak()
    try:
        read()
        outcome = "taken"
    except DllpError as error:
        outcome = f"{type(error).__name__}: {error}"
    return peak() - before, outcome


def header(path: Path, text: str, body: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text.encode() + body)
    return path


def array(path: Path, shape: str, descr: str = "|u1", body: bytes = b"") -> None:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body)


def arrays(root: Path, name: str, x: np.ndarray | None = None, y: np.ndarray | None = None) -> Path:
    folder = root / name
    folder.mkdir()
    for part in ("train", "test"):
        np.save(folder / f"{part}_x.npy", np.zeros((4, 8, 8, 3), np.uint8) if x is None or part == "test" else x)
        np.save(folder / f"{part}_y.npy", np.arange(4) % 2 if y is None or part == "test" else y)
    return folder


def png(path: Path, width: int, height: int) -> None:
    """A header that declares a huge image, and almost no data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def bzip_bomb(path: Path, declared: int, real: int) -> None:
    packed = bz2.compress(bytes(real))
    name = b"clean.npy"
    fields = (20, 0, 12, 0, 0, 0, len(packed), declared, len(name))
    local = b"PK\x03\x04" + struct.pack("<HHHHHIIIHH", *fields, 0) + name
    central = b"PK\x01\x02" + struct.pack("<HHHHHHIIIHHHHHII", 20, *fields, 0, 0, 0, 0, 0, 0) + name
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local) + len(packed), 0)
    path.write_bytes(local + packed + central + end)


def cases(root: Path) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> bytes that the validated header declares (0 where it must be refused), and the reader."""
    found: dict[str, tuple[int, Callable[[], object]]] = {}
    lie = '{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}'
    one = header(root / "huge.safetensors", lie, bytes(64))
    two = header(root / "length.safetensors", "{}", length=2**60)
    three = header(root / "wide.safetensors", '{"a":' + "[" * 10**6)
    found["tensors that the file cannot hold"] = 0, lambda: read_tensors(one)
    found["a header without end"] = 0, lambda: read_tensors(two)
    found["a header of brackets"] = 1 * MB, lambda: read_tensors(three)
    hole = header(
        root / "hole.safetensors", '{"a": {"dtype": "U8", "shape": [40000000000], "data_offsets": [0, 40000000000]}}'
    )
    os.truncate(hole, hole.stat().st_size + 40_000_000_000)
    found["a sparse file of 40 GB"] = 0, lambda: read_tensors(hole)
    save_file({"a": torch.ones(16 * MB)}, root / "whole.safetensors")
    found["64 MB of tensors"] = 64 * MB, lambda: read_tensors(root / "whole.safetensors")["a"].clone()

    shape = arrays(root, "shape")
    array(shape / "train_x.npy", "(1000000000000, 8, 8, 3)")
    found["an array that the file cannot hold"] = 0, lambda: data.load(shape)
    labels = arrays(root, "labels", y=np.array([0, 1, 2, 2**40]))
    found["a label of 2**40"] = 0, lambda: data.load(labels)
    whole = arrays(root, "whole", x=np.ones((64, 512, 683, 3), np.uint8), y=np.arange(64) % 2)
    np.save(whole / "test_x.npy", np.ones((4, 512, 683, 3), np.uint8))
    found["64 MB of images"] = 68 * MB, lambda: data.load(whole)
    table = arrays(root, "table", x=np.ones((64, 2**18), np.float32), y=np.arange(64) % 2)
    np.save(table / "test_x.npy", np.ones((4, 2**18), np.float32))
    found["64 MB of numbers"] = 68 * MB, lambda: data.load(table)

    for name, size in (("bomb", (60_000, 60_000)), ("edge", (8000, 8000))):
        for part in ("train", "test"):
            for kind in ("a", "b"):
                (root / name / part / kind).mkdir(parents=True)
                png(root / name / part / kind / "x.png", *size)
    found["an image of 60,000 x 60,000"] = 0, lambda: data.load(root / "bomb")
    found["images of 192 MB with no data"] = 192 * MB, lambda: data.load(root / "edge", image_size=8)
    (root / "post" / "train" / "a").mkdir(parents=True)
    for name, size in (("tar", 2**33 - 1), ("pax", 2**32)):  # a hole in place of a label, and of an extended header
        (root / name).mkdir()
        info = tarfile.TarInfo("a.cls")
        info.size, info.type = size, tarfile.REGTYPE if name == "tar" else tarfile.XHDTYPE
        for part in ("train", "val"):
            path = root / name / f"{part}-000000.tar"
            path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
            os.truncate(path, 512 + size)
        found[f"a hole of {size >> 30} GB in a shard"] = 0, lambda name=name: data.load(root / name, image_size=8)
    packed = io.BytesIO()
    torch.save({"a": torch.zeros(32 * MB)}, packed)
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(root / "packed.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    del packed
    found["128 MB of zeros in packed weights"] = 0, lambda: pretrained.read(root / "packed.pt")

    (root / "deep.json").write_bytes(b"[" * 10**7)
    (root / "many.json").write_bytes(b"[" + b"{}," * (10 * MB) + b"{}]")
    (root / "digits.json").write_bytes(b"9" * 10**7)
    for name in ("deep", "many", "digits"):
        path = root / f"{name}.json"
        found[f"{name}.json"] = path.stat().st_size, lambda path=path: files.read_json(path)
    laughs = root / "laughs.yaml"
    lines = [
        "a: &a [x,x,x,x,x,x,x,x,x]",
        *(f"{b}: &{b} [{','.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    ]
    laughs.write_text("\n".join(lines))
    found["a billion laughs"] = 0, lambda: settings.read(laughs)
    nested = root / "nested.yaml"
    nested.write_text("epochs: " + "[" * 30_000)
    found["nested YAML"] = 0, lambda: settings.read(nested)

    memo = b"\x80\x02}r\xff\xff\xff\x7f."
    found["a pickle with place 2**31"] = 0, lambda: cifar10.decode_python(memo, "here")
    text = b"\x80\x02T\xff\xff\xff\x7fabc."
    found["a pickle with 2 GB of text"] = 0, lambda: cifar10.decode_python(text, "here")
    pair = b"\x80\x02}(K\x01\x85" + b"q\x01h\x01\x86" * 400 + b"K\x01u."
    found["a pickle that hashes for ever"] = 0, lambda: cifar10.decode_python(pair, "here")

    store = Store(root / "results")
    (root / "results" / "probabilities").mkdir(parents=True)
    bzip_bomb(root / "results" / "probabilities" / "bomb.npz", 1000, 300 * MB)
    found["probabilities of 300 MB in 1 kB"] = 0, lambda: store.probabilities("bomb")
    return found


def main(root: Path) -> dict[str, tuple[int, int, str]]:
    every = cases(root)
    Image.init()
    data.load(arrays(root, "warm"))
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 8 * 2**30,) * 2)  # a bomb that goes off ends this process only
    return {name: (declared, *measure(read)) for name, (declared, read) in every.items()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
