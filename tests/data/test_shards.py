"""Tar shards hold the same as folders, whatever tar wrote them; spoiled ones are one line."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dllp.data import StreamBatches
from dllp.errors import DataError
from tests.support import pictures


@pytest.mark.parametrize(
    ("form", "long"),
    [
        (tarfile.PAX_FORMAT, ""), (tarfile.USTAR_FORMAT, ""), (tarfile.GNU_FORMAT, "x" * 150 + "/"),
        (tarfile.PAX_FORMAT, "é" * 120 + "/"),
    ],
)  # fmt: skip
def test_shards_hold_the_same_as_folders(photographs: Path, tmp_path: Path, form: int, long: str) -> None:
    packed = pictures.shards(tmp_path / "packed", photographs, form=form, long=long)
    assert len(list(packed.glob("train-*.tar"))) == 3
    a, b = pictures.load(photographs), pictures.load(packed)
    assert b.classes == ("0", "1") and torch.equal(a.test.x, b.test.x) and torch.equal(a.test.y, b.test.y)
    batches = [list(StreamBatches(s.train, 5, seed=0).epoch(1)) for s in (a, b)]
    assert pictures.same(*batches)
    (packed / "classes.txt").write_text("cat\ndog\n")
    assert pictures.load(packed).classes == ("cat", "dog")
    (packed / "classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match="names 1 classes, but the labels need 2"):
        pictures.load(packed)


def test_a_bad_image_in_a_shard_has_a_name(own_photographs: Path, tmp_path: Path) -> None:
    (own_photographs / "train" / "dog" / "005.jpg").write_bytes(b"nothing")
    told: list[str] = []
    split = pictures.streamed(
        pictures.shards(tmp_path / "packed", own_photographs),
        max_bad="10%",
        report=lambda image: told.append(str(image)),
    )
    list(StreamBatches(split, 8, seed=0).epoch(0))
    assert len(told) == 1 and "train-000001.tar:dog-005.jpg is left out" in told[0]


def write(path: Path, *members: tuple[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            pictures.add(tar, name, content)


def spoiled(packed: Path) -> Iterator[tuple[str, str]]:
    """Ways to spoil the first shard, each with what is told."""
    path = packed / "train-000000.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    yield "cut", "train-000000.tar"
    path.write_bytes(whole[:700] + b"\xff" * 500 + whole[1200:])
    yield "overwritten", "train-000000.tar"
    path.write_bytes(b"")
    yield "empty", "is damaged .empty file"
    with tarfile.open(path, "w:gz") as tar:
        pictures.add(tar, "a.jpg", whole)
    yield "compressed", "is damaged .* write the shard anew, uncompressed"
    write(path, ("a.jpg", b"1"), ("a.txt", b"2"))
    yield "no label", "has no .cls beside it"
    for text in (b"cat", b"-1", b"70000", b"9" * 100, b""):
        write(path, ("a.jpg", b"1"), ("a.cls", text))
        yield "bad label", "the number of a class is needed"
    write(path, ("a.jpg", b"1"), ("a.png", b"1"), ("a.cls", b"0"))
    yield "twice", "two images called 'a'"
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    yield "link", "is no plain file"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.pax_headers = {"comment": "x" * 100_000}
        tar.addfile(info)
    yield "long header", "extended header of"
    write(path, ("a.jpg", b"1"), ("a.cls", b"0"), ("b.jpg", b"1"), ("b.cls", b"0"))
    for other in packed.glob("train-00000[12].tar"):
        other.unlink()
    yield "one class", "one class only"
    write(path, ("a.jpg", b"1"), ("a.cls", b"0"), ("b.jpg", b"1"), ("b.cls", b"2"))
    yield "a class that val has and train lacks", "class '1' of val .* is missing in train"
    path.unlink()
    yield "no shard", "holds val: give .* train-000000.tar"


def test_spoiled_shards_are_one_line(photographs: Path, tmp_path: Path) -> None:
    for name, message in spoiled(pictures.shards(tmp_path / "packed", photographs)):
        with pytest.raises(DataError, match=message) as caught:
            pictures.load(tmp_path / "packed")
        assert "\n" not in str(caught.value), name


def test_members_cannot_name_a_place(photographs: Path, tmp_path: Path) -> None:
    packed = pictures.shards(tmp_path / "packed", photographs)
    content = next((photographs / "train" / "cat").iterdir()).read_bytes()
    write(packed / "train-000000.tar", ("../../../escape.jpg", content), ("../../../escape.cls", b"0"))
    pictures.streamed(packed)
    assert not list(tmp_path.parent.rglob("escape*"))
    (tmp_path / "elsewhere.tar").write_bytes(b"")
    (packed / "train-000009.tar").symlink_to(tmp_path / "elsewhere.tar")
    with pytest.raises(DataError, match="leads out of"):
        pictures.load(packed)
