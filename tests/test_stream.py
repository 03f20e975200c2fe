"""Folders of any size and tar shards: the same batches for any number of workers, from any step on, whatever is bad."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from dllp import data
from dllp.data import ArrayData, StreamBatches, StreamedData, images, ood, reader, stream
from dllp.data.bad import Tally, Unreadable, share
from dllp.data.resize import resize_all, resize_one
from dllp.errors import ConfigError, DataError
from tests import pictures


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures.folder(tmp_path_factory.mktemp("pictures") / "set")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder that a test may spoil."""
    return pictures.folder(tmp_path / "set")


def load(root: Path, **options: Any) -> data.Dataset:
    return data.load(root, **{"image_size": 16, "augment": "resized-crop", "workers": 0, **options})


def train(root: Path, **options: Any) -> StreamedData:
    found = load(root, **options).train
    assert isinstance(found, StreamedData)
    return found


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


# ---- one size for all


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=3),
    st.integers(1, 40),
    st.booleans(),
)
def test_resizing_is_pillows(sizes: list[tuple[int, int]], size: int, flip: bool) -> None:
    rng = np.random.default_rng(len(sizes))
    images = [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in sizes]
    pixels = torch.from_numpy(np.concatenate([image.reshape(-1) for image in images]))
    together = resize_all(pixels, torch.tensor(sizes), torch.full((len(sizes),), flip), size)
    for image, found in zip(images, together, strict=True):
        wanted = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        wanted = wanted[:, :, ::-1] if flip else wanted
        for new in (found.numpy(), resize_one(image, flip, size)):
            assert new.shape == (3, size, size) and int(np.abs(new.astype(int) - wanted).max()) <= 1


def part(content: bytes, box: list[float] | None, size: int) -> np.ndarray:
    return images.Part(content, box, size).decode().cut()


@given(st.integers(2, 600), st.integers(2, 600), st.lists(st.floats(0, 1), min_size=5, max_size=5), st.integers(8, 64))
def test_parts_lie_in_the_image_and_are_no_larger_than_needed(w: int, h: int, draw: list[float], size: int) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (w, h), (90, 120, 200)).save(buffer, "JPEG")
    for box in (images.boxes(np.array([draw]))[0], None):
        found = part(buffer.getvalue(), box, size)
        assert found.dtype == np.uint8 and min(found.shape) >= 1 and found.shape[0] <= h and found.shape[1] <= w
        assert max(found.shape[:2]) <= 4 / 3 * 2 * images.GAP * size + 2
        assert int(np.abs(found.astype(int) - (90, 120, 200)).max()) <= 4, "nothing but the image"


def test_evaluation_sees_the_middle() -> None:
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[2:30, 18:46] = 200
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    found = part(buffer.getvalue(), None, 28)
    assert found.shape == (28, 28, 3) and found.min() == 200


def test_large_photographs_are_decoded_small(monkeypatch: pytest.MonkeyPatch) -> None:
    content = pictures.jpeg(np.random.default_rng(0), (1600, 1200))
    drafts = []
    monkeypatch.setattr(images, "colour", lambda image: drafts.append(image.size) or image.convert("RGB"))
    small = part(content, None, 32)
    assert drafts == [(200, 150)] and min(small.shape[:2]) >= 32
    monkeypatch.setattr(images, "GAP", 1000)
    whole = part(content, None, 32)
    pair = [resize_one(found.copy(), False, 32).astype(float) for found in (small, whole)]
    assert np.abs(pair[0] - pair[1]).mean() < 2


# ---- order and place


def test_batches_do_not_depend_on_workers_and_go_on_from_any_step(root: Path) -> None:
    split = train(root)
    first, second = (list(StreamBatches(split, 7, seed=3).epoch(e)) for e in (0, 1))
    assert len(first) == 3 and first[0][0].shape == (7, 3, 16, 16) and first[0][0].dtype == torch.float32
    assert not torch.equal(first[0][0], second[0][0])
    several = StreamBatches(replace(split, workers=2), 7, seed=3)
    assert same(list(several.epoch(0)), first) and same(list(several.epoch(1)), second), "on into the next epoch"
    assert same(list(several.epoch(1, 2)), second[2:]) and same(list(several.epoch(0, 1)), first[1:])
    assert not same(list(StreamBatches(split, 7, seed=4).epoch(0)), first)
    assert same([StreamBatches(split, 7, seed=3).first(7)], first[:1])


def test_an_epoch_left_early_is_no_place_to_go_on(root: Path) -> None:
    source = StreamBatches(train(root), 8, seed=0)
    whole = list(source.epoch(0))
    next(source.epoch(0))
    assert same(list(source.epoch(0)), whole)
    assert same(list(source.epoch(0, 1)), whole[1:])


def test_random_numbers_of_the_run_are_left_alone(root: Path) -> None:
    source = StreamBatches(train(root, workers=1), 8, seed=0)
    torch.manual_seed(5)
    list(source.epoch(0))
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))


def test_an_epoch_shows_every_image_once_and_both_sides(root: Path) -> None:
    plain = train(root, augment="resized-crop")
    labels = torch.cat([y for _, y in StreamBatches(plain, 4, seed=0).epoch(0)])
    assert labels.bincount().tolist() == [12, 12]
    middle = replace(plain, augment="none")
    one = {x.numpy().tobytes() for x, _ in StreamBatches(middle, 1, seed=0).epoch(0)}
    two = {x.numpy().tobytes() for x, _ in StreamBatches(middle, 1, seed=1).epoch(5)}
    assert one == two and len(one) == 24
    seen = torch.stack([x[0] for x, _ in StreamBatches(middle, 1, seed=0).epoch(0)])
    decoded = middle.decoded().inputs(slice(None))
    assert torch.allclose(seen.mean((2, 3)).sort(0).values, decoded.mean((2, 3)).sort(0).values, atol=1e-2)


def test_a_set_is_normalised_split_and_left_out_as_in_memory(root: Path) -> None:
    whole = load(root)
    assert whole.classes == ("cat", "dog") and (whole.num_classes, whole.in_channels, whole.image_size) == (2, 3, 16)
    assert isinstance(whole.test, ArrayData) and whole.test.x.shape == (8, 3, 16, 16)
    assert whole.test.y.tolist() == [0] * 4 + [1] * 4 and whole.test.mean == whole.train.mean
    x = whole.train.decoded().inputs(slice(None)) if isinstance(whole.train, StreamedData) else torch.zeros(0)
    assert x.mean((0, 2, 3)).abs().max() < 1e-3 and float(x.std()) == pytest.approx(1, abs=0.05)
    held = load(root, validation=6)
    assert len(held.train) == 18 and held.validation is not None and held.validation.y.bincount().tolist() == [3, 3]
    assert x[whole.train.y == 0].mean() < x[whole.train.y == 1].mean()


def test_classes_can_be_left_out(tmp_path: Path) -> None:
    found = ood.without(load(pictures.folder(tmp_path / "set", 4, 2, ("a", "b", "c"))), ("b",))
    assert found.train.y.tolist() == [0] * 4 + [1] * 4 and found.classes == ("a", "c")
    assert found.left_out is not None and len(found.left_out) == 2
    assert len(next(StreamBatches(found.train, 8, seed=0).epoch(0))[1]) == 8


def test_a_folder_is_streamed_where_it_does_not_fit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(data.load(root, image_size=16).train, ArrayData)
    monkeypatch.setattr(data, "IN_MEMORY", 1000)
    monkeypatch.setattr(stream, "IN_MEMORY", 1000)
    files, mapped = [], np.memmap
    monkeypatch.setattr(np, "memmap", lambda *args, **options: files.append(args) or mapped(*args, **options))
    large = data.load(root, image_size=16, workers=0)
    assert isinstance(large.train, StreamedData) and large.train.augment == "resized-crop"
    assert files, "the test images lie in a file"
    assert torch.equal(large.test.x, load(root).test.x)
    with pytest.raises(DataError, match="give their image_size"):
        data.load(root)
    with pytest.raises(DataError, match="is for images in memory"):
        data.load(root, image_size=16, augment="crop-flip")
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 0}))
    with pytest.raises(DataError, match="no room for"):
        data.load(root, image_size=16, workers=0)


# ---- what is bad


def test_few_bad_files_are_named_and_left_out(own: Path) -> None:
    names = pictures.bad(own / "train" / "dog")
    rng = np.random.default_rng(1)
    (own / "train" / "dog" / "grey.jpg").write_bytes(pictures.jpeg(rng, (30, 30), "L"))
    (own / "train" / "dog" / "ink.jpg").write_bytes(pictures.jpeg(rng, (30, 30), "CMYK"))
    (own / "val" / "cat" / "empty.jpg").touch()
    told: list[str] = []
    split = load(own, max_bad="25%", tell=told.append)
    assert len(split.train) == 32 and len(split.test) == 8 and split.test.y.tolist() == [0] * 4 + [1] * 4
    alone, several = (StreamBatches(replace(split.train, workers=w), 8, seed=0) for w in (0, 2))
    assert same(list(alone.epoch(0)), list(several.epoch(0)))
    assert len(told) == 7 and len(set(told)) == 7
    assert all(any(f"dog/{name} is left out" in line for line in told) for name in names)
    assert "6 of 32 images so far" in " ".join(told)
    for reason in ("it is empty", "it is no image", "1x1", "9000x9000", "runcated"):
        assert any(reason in line for line in told), reason


@pytest.mark.parametrize("augment", ["resized-crop", "none", "crop-flip"])
def test_many_bad_files_are_an_error_with_their_list(own: Path, augment: str) -> None:
    names = pictures.bad(own / "train" / "cat")
    with pytest.raises(DataError, match=r"cannot read 1 of 30 images, more than max_bad = 0.1% allows"):
        split = data.load(own, image_size=16, augment=augment, workers=0).train
        list(StreamBatches(split, 8, seed=0).epoch(0))
    with pytest.raises(DataError, match="cannot read 5 of 30") as caught:
        split = data.load(own, image_size=16, augment=augment, workers=0, max_bad=0.15).train
        list(StreamBatches(split, 8, seed=0).epoch(0))
    assert sum(name in str(caught.value) for name in names) == 5 and "\n" not in str(caught.value)


def test_nothing_to_read_ends_too(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = train(own, max_bad="99%")
    for path in (own / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    monkeypatch.setattr(reader, "TRIES", 3)
    with pytest.raises(DataError, match="3 images in a row cannot be read"):
        next(StreamBatches(split, 2, seed=0).epoch(0))
    with pytest.raises(DataError, match="cannot read 24 of 24"):
        split.decoded()
    with pytest.raises(DataError, match="no images to decode"):
        split.subset([]).decoded()
    with pytest.raises(DataError, match="none of 24 training images can be read"):
        data.load(own)
    with pytest.raises(DataError, match="is empty"):
        StreamBatches(split.subset([]), 2, seed=0)


@pytest.mark.parametrize("value", ["-1%", "100%", "1", "x", "%", 1.5, "nan"])
def test_a_share_of_bad_files_is_below_one(value: str | float) -> None:
    with pytest.raises(ConfigError, match="max_bad"):
        share(value)
    assert share("0.1%") == pytest.approx(0.001) and share("0.5") == share(0.5) == 0.5
    Tally(10, 0.5).add("one", "why")


def test_a_folder_in_which_val_has_more_classes(own: Path) -> None:
    (own / "val" / "eel").mkdir()
    (own / "val" / "eel" / "1.jpg").write_bytes(pictures.jpeg(np.random.default_rng(0), (20, 20)))
    with pytest.raises(DataError, match=r"class 'eel' of .*val is missing in .*train"):
        load(own)


def test_a_worker_that_dies_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = train(root)
    monkeypatch.setattr(reader, "Part", lambda *_: os._exit(3))
    with pytest.raises(DataError, match=r"has died .*lower workers") as caught:
        next(StreamBatches(replace(split, workers=1), 4, seed=0).epoch(0))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="workers = -1"):
        replace(split, workers=-1)


def test_links_and_pipes(own: Path, tmp_path: Path) -> None:
    os.rename(own / "train" / "cat" / "000.jpg", tmp_path / "000.jpg")
    (own / "train" / "cat" / "000.jpg").symlink_to(tmp_path / "000.jpg")
    with pytest.raises(DataError, match="leads out of"):
        load(own)
    (own / "train" / "cat" / "000.jpg").unlink()
    os.mkfifo(own / "train" / "cat" / "000.jpg")
    with pytest.raises(DataError, match="no regular file"):
        load(own)


# ---- shards


@pytest.mark.parametrize(
    ("form", "long"),
    [
        (tarfile.PAX_FORMAT, ""), (tarfile.USTAR_FORMAT, ""), (tarfile.GNU_FORMAT, "x" * 150 + "/"),
        (tarfile.PAX_FORMAT, "é" * 120 + "/"),
    ],
)  # fmt: skip
def test_shards_hold_the_same_as_folders(root: Path, tmp_path: Path, form: int, long: str) -> None:
    packed = pictures.shards(tmp_path / "packed", root, form=form, long=long)
    assert len(list(packed.glob("train-*.tar"))) == 3
    a, b = load(root), load(packed)
    assert b.classes == ("0", "1") and torch.equal(a.test.x, b.test.x) and torch.equal(a.test.y, b.test.y)
    batches = [list(StreamBatches(s.train, 5, seed=0).epoch(1)) for s in (a, b)]
    assert same(*batches)
    (packed / "classes.txt").write_text("cat\ndog\n")
    assert load(packed).classes == ("cat", "dog")
    (packed / "classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match="names 1 classes, but the labels need 2"):
        load(packed)


def test_a_bad_image_in_a_shard_has_a_name(own: Path, tmp_path: Path) -> None:
    (own / "train" / "dog" / "005.jpg").write_bytes(b"nothing")
    told: list[str] = []
    split = train(pictures.shards(tmp_path / "packed", own), max_bad="10%", tell=told.append)
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
    yield "empty", "holds no images"
    with tarfile.open(path, "w:gz") as tar:
        pictures.add(tar, "a.jpg", whole)
    yield "compressed", "is damaged at byte 0"
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
    yield "a class that val has and train lacks", "class 1 of val-.* is missing in train"
    path.unlink()
    yield "no shard", "needs train-000000.tar"


def test_spoiled_shards_are_one_line(root: Path, tmp_path: Path) -> None:
    for name, message in spoiled(pictures.shards(tmp_path / "packed", root)):
        with pytest.raises(DataError, match=message) as caught:
            load(tmp_path / "packed")
        assert "\n" not in str(caught.value), name


def test_members_cannot_name_a_place(root: Path, tmp_path: Path) -> None:
    packed = pictures.shards(tmp_path / "packed", root)
    content = next((root / "train" / "cat").iterdir()).read_bytes()
    write(packed / "train-000000.tar", ("../../../escape.jpg", content), ("../../../escape.cls", b"0"))
    train(packed)
    assert not list(tmp_path.parent.rglob("escape*"))
    (tmp_path / "elsewhere.tar").write_bytes(b"")
    (packed / "train-000009.tar").symlink_to(tmp_path / "elsewhere.tar")
    with pytest.raises(DataError, match="leads out of"):
        load(packed)


def test_an_image_that_cannot_be_one_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = train(root)
    monkeypatch.setattr("dllp.data.sources.LARGEST", 10)
    with pytest.raises(Unreadable, match="more than the 10"):
        split.sources.read(0)
