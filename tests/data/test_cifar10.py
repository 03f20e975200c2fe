"""CIFAR-10's official forms, made small: archives, extracted folders, arrays, downloads, and hostile files."""

import hashlib
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dllp import data
from dllp.data import cifar10
from dllp.data.cifar10 import BINARY, PYTHON, Version, decode_binary, decode_python, download
from dllp.errors import DataError

PER_FILE = 4
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, PER_FILE, 3072), np.uint8)
LABELS = RNG.integers(0, 10, (6, PER_FILE))


def python2_pickle(pixels: np.ndarray, labels: list[int], dtype: bytes = b"u1") -> bytes:
    """Protocol 2 as Python 2 wrote it: byte strings are SHORT_BINSTRING/BINSTRING, which Python 3 never writes."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b")
    array += b"\x87R(" + number(1) + number(pixels.shape[0]) + number(pixels.shape[1]) + b"\x86"
    array += b"cnumpy\ndtype\n" + text(dtype) + number(0) + number(1) + b"\x87R("
    array += number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array += b"\x89" + text(pixels.tobytes()) + b"tb"
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    names = b"](" + text(b"a.png") + b"e"
    parts = text(b"data") + array + text(b"labels") + listed + text(b"filenames") + names
    return b"\x80\x02}(" + text(b"batch_label") + text(b"testing") + parts + b"u."


def files(version: Version) -> dict[str, bytes]:
    contents = {}
    for name, pixels, labels in zip(version.members(), PIXELS, LABELS, strict=True):
        if version is PYTHON:
            contents[name] = python2_pickle(pixels, labels.tolist())
        else:
            contents[name] = np.concatenate([labels[:, None].astype(np.uint8), pixels], 1).tobytes()
    return contents


def archive(contents: dict[str, bytes], folder: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in {"readme.html": b"hello", "../../escape": b"no", **contents}.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def place(root: Path, version: Version, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an archive under its official name, with the checksum it then has."""
    checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
    which = "PYTHON" if version is PYTHON else "BINARY"
    monkeypatch.setattr(cifar10, which, version._replace(checksum=checksum))
    (root / version.archive).write_bytes(content)
    return root / version.archive


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch, tmp_path_factory):
    """Neither the user's own data nor the network can be reached by a test."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.delenv("DLLP_DATA", raising=False)
    monkeypatch.setattr(cifar10, "URL", "file:///nowhere/")


def check(loaded: data.Dataset) -> None:
    assert loaded.classes[3] == "cat" and loaded.train.augment == "crop-flip" and loaded.test.augment == "none"
    assert torch.equal(loaded.train.x, torch.from_numpy(PIXELS[:5].reshape(-1, 3, 32, 32)))
    assert torch.equal(loaded.train.y, torch.from_numpy(LABELS[:5].reshape(-1)))
    assert torch.equal(loaded.test.x, torch.from_numpy(PIXELS[5].reshape(-1, 3, 32, 32)))
    assert torch.equal(loaded.test.y, torch.from_numpy(LABELS[5]))


@pytest.mark.parametrize("version", [PYTHON, BINARY], ids=["python", "binary"])
def test_archives_and_extracted_folders(version, tmp_path, monkeypatch):
    path = place(tmp_path, version, archive(files(version), version.folder), monkeypatch)
    check(data.load("cifar10", root=tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    path.unlink()
    (tmp_path / version.folder).mkdir()
    for name, content in files(version).items():
        (tmp_path / version.folder / name).write_bytes(content)
    check(data.load("cifar10", root=tmp_path))
    monkeypatch.setenv("DLLP_DATA", str(tmp_path / version.folder))
    check(data.load("cifar10"))


def test_arrays(tmp_path):
    images = PIXELS.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.save(tmp_path / "train_x.npy", images[: 5 * PER_FILE])
    np.save(tmp_path / "train_y.npy", LABELS[:5].reshape(-1))
    np.save(tmp_path / "test_x.npy", images[5 * PER_FILE :])
    np.save(tmp_path / "test_y.npy", LABELS[5])
    check(data.load("cifar10", root=tmp_path))
    np.save(tmp_path / "train_x.npy", images[: 5 * PER_FILE, :16])
    np.save(tmp_path / "test_x.npy", images[5 * PER_FILE :, :16])
    with pytest.raises(DataError, match=r"holds uint8 of shape \(20, 16, 32, 3\): CIFAR-10 is uint8"):
        data.load("cifar10", root=tmp_path)


def test_labels_that_are_no_integers_are_not_cut_to_them(tmp_path):
    images = PIXELS.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    for part, where in (("train", slice(0, 5 * PER_FILE)), ("test", slice(5 * PER_FILE, None))):
        np.save(tmp_path / f"{part}_x.npy", images[where])
        np.save(tmp_path / f"{part}_y.npy", LABELS.reshape(-1)[where].astype(">i2"))
    check(data.load("cifar10", root=tmp_path))
    for part in ("train", "test"):
        whole = np.load(tmp_path / f"{part}_y.npy")
        np.save(tmp_path / f"{part}_y.npy", whole + 0.9)
        with pytest.raises(DataError, match=rf"{part}_y\.npy holds float64 of shape .*integers from 0 to 9"):
            data.load("cifar10", root=tmp_path)
        np.save(tmp_path / f"{part}_y.npy", whole)


def test_checksum_is_verified(tmp_path):
    (tmp_path / PYTHON.archive).write_bytes(archive(files(PYTHON), PYTHON.folder))
    with pytest.raises(DataError, match=f"is damaged .MD5 .*expected {PYTHON.checksum}.*get it again"):
        data.load("cifar10", root=tmp_path)


def test_download_is_verified_and_atomic(tmp_path, monkeypatch):
    server, root = tmp_path / "server", tmp_path / "root"
    server.mkdir()
    root.mkdir()
    content = archive(files(PYTHON), PYTHON.folder)
    place(server, PYTHON, content, monkeypatch)
    monkeypatch.setattr(cifar10, "URL", f"file://{server}/")
    reports = []
    check(data.load("cifar10", root=root, progress=lambda done, size: reports.append((done, size))))
    assert reports[-1] == (len(content), len(content))
    assert [p.name for p in root.iterdir()] == [PYTHON.archive]

    for checksum, limit, message in (
        (PYTHON.checksum, 10**9, "is damaged"),
        ("", 10, "more than the expected 10 bytes"),
    ):
        with pytest.raises(DataError, match=message):
            download(f"file://{server}/{PYTHON.archive}", root / "again", checksum, limit)
    assert [p.name for p in root.iterdir()] == [PYTHON.archive]


def test_without_a_network_the_way_out_is_named(tmp_path):
    with pytest.raises(DataError, match=rf"cannot download .*{PYTHON.archive}.* put it into {tmp_path}") as caught:
        data.load("cifar10", root=tmp_path)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="is no folder"):
        data.load("cifar10", root=tmp_path / "missing")


def test_archives_that_lack_members(tmp_path, monkeypatch):
    contents = files(BINARY)
    last = contents.pop("test_batch.bin")
    path = place(tmp_path, BINARY, archive(contents, BINARY.folder), monkeypatch)
    with pytest.raises(DataError, match=r"no readable archive .*test_batch\.bin"):
        data.load("cifar10", root=tmp_path)
    place(tmp_path, BINARY, b"no archive", monkeypatch)
    with pytest.raises(DataError, match="no readable archive"):
        data.load("cifar10", root=tmp_path)
    path.unlink()
    (tmp_path / "data_batch_1.bin").write_bytes(last)
    with pytest.raises(DataError, match=r"cannot read .*data_batch_2\.bin"):
        data.load("cifar10", root=tmp_path)
    monkeypatch.setattr(cifar10, "MEMBER_LIMIT", len(last) - 1)
    with pytest.raises(DataError, match="more than the 12291 that are read"):
        data.load("cifar10", root=tmp_path)


def test_pickles_with_memo_entries_and_in_fortran_order():
    content = python2_pickle(PIXELS[0], LABELS[0].tolist())
    memo = content.replace(b"}(", b"}q\x01(", 1).replace(b"](", b"]q\x02(", 1).replace(b"u.", b"h\x02h\x02su.")
    assert np.array_equal(decode_python(memo, "here")[0], decode_python(content, "here")[0])
    fortran = decode_python(content.replace(b"\x89T", b"\x88T"), "here")[0]
    expected = np.frombuffer(PIXELS[0].tobytes(), np.uint8).reshape((PER_FILE, 3072), order="F")
    assert np.array_equal(fortran.reshape(PER_FILE, 3072), expected)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_are_never_executed(tmp_path):
    target = tmp_path / "touched"
    for protocol in (0, 2, 4):
        with pytest.raises(DataError, match="here is no CIFAR-10 batch"):
            decode_python(pickle.dumps(Hostile(target), protocol), "here")
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}.",
        pickle.dumps({b"data": [1], b"labels": [1]}, 2),
        python2_pickle(PIXELS[0], LABELS[0].tolist(), dtype=b"O8"),
        python2_pickle(PIXELS[0], [10] * PER_FILE),
        python2_pickle(PIXELS[0], [1] * (PER_FILE - 1)),
        python2_pickle(PIXELS[0][:, :9], [1] * PER_FILE),
        python2_pickle(PIXELS[0], LABELS[0].tolist())[:-90],
        python2_pickle(PIXELS[0], LABELS[0].tolist()).replace(b"cnumpy\nndarray\n", b"cos\nsystem\n"),
        python2_pickle(PIXELS[0], LABELS[0].tolist())
        .replace(b"\x87R(J\x03", b"\x87R0N(J\x03")
        .replace(b"tb\x89", b"t0\x89"),
    ],
)
def test_damaged_pickles(content):
    with pytest.raises(DataError, match="here is") as caught:
        decode_python(content, "here")
    assert "\n" not in str(caught.value)


def test_damaged_binaries():
    with pytest.raises(DataError, match="no whole number of records"):
        decode_binary(bytes(3072), "here")
    with pytest.raises(DataError, match=r"labels in 0\.\.9"):
        decode_binary(bytes([11]) + bytes(3072), "here")
