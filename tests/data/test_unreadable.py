"""Files that cannot be read: few are named and left out, many are an error, and none is a way out of the folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dllp import data
from dllp.data import StreamBatches, reader
from dllp.data.arrays import Augment
from dllp.data.unreadable import Unreadable, UnreadableImages, parse_fraction
from dllp.errors import ConfigError, DataError
from tests.support import pictures


def test_few_bad_files_are_named_and_left_out(own_photographs: Path) -> None:
    names = pictures.bad(own_photographs / "train" / "dog")
    rng = np.random.default_rng(1)
    (own_photographs / "train" / "dog" / "grey.jpg").write_bytes(pictures.jpeg(rng, (30, 30), "L"))
    (own_photographs / "train" / "dog" / "ink.jpg").write_bytes(pictures.jpeg(rng, (30, 30), "CMYK"))
    (own_photographs / "val" / "cat" / "empty.jpg").touch()
    told: list[str] = []
    split = pictures.load(own_photographs, max_bad="25%", report=lambda image: told.append(str(image)))
    assert len(split.train) == 32 and len(split.test) == 8 and split.test.y.tolist() == [0] * 4 + [1] * 4
    alone, several = (StreamBatches(replace(split.train, workers=w), 8, seed=0) for w in (0, 2))
    assert pictures.same(list(alone.epoch(0)), list(several.epoch(0)))
    assert len(told) == 7 and len(set(told)) == 7
    assert all(any(f"dog/{name} is left out" in line for line in told) for name in names)
    assert "6 of 32 images so far" in " ".join(told)
    for reason in ("it is empty", "it is no image", "1x1", "9000x9000", "runcated"):
        assert any(reason in line for line in told), reason


@pytest.mark.parametrize("augment", ["resized-crop", "none", "crop-flip"])
@pytest.mark.parametrize("max_bad", ["0.1%", 0.15])
def test_many_bad_files_are_an_error_with_their_list(
    own_photographs: Path, augment: Augment, max_bad: str | float
) -> None:
    names = pictures.bad(own_photographs / "train" / "cat")
    told: list[str] = []
    with pytest.raises(DataError, match=f"cannot read 6 of 30 images, more than max_bad = {max_bad} allows") as caught:
        data.load(
            own_photographs,
            image_size=16,
            augment=augment,
            workers=0,
            max_bad=max_bad,
            report=lambda image: told.append(str(image)),
        )
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value) and not told


def test_a_long_list_of_bad_files_is_cut(own_photographs: Path) -> None:
    for path in (own_photographs / "train" / "cat").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read 12 of 24 .*cat/009.jpg \(it is empty\) and 2 more$"):
        data.load(own_photographs, image_size=16)


def test_bad_files_of_one_batch_are_listed_together(own_photographs: Path) -> None:
    split = pictures.training(own_photographs, 16, "0.1%", workers=0)
    for path in (own_photographs / "train" / "dog").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read 12 of 24 images"):
        next(StreamBatches(split, 24, seed=0).epoch(0))


def test_nothing_to_read_ends_too(own_photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = pictures.streamed(own_photographs, max_bad="99%")
    for path in (own_photographs / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    monkeypatch.setattr(reader, "TRIES", 3)
    with pytest.raises(DataError, match="3 images in a row cannot be read"):
        next(StreamBatches(split, 2, seed=0).epoch(0))
    with pytest.raises(DataError, match="cannot read 24 of 24"):
        split.decoded()
    with pytest.raises(DataError, match="no images to decode"):
        split.subset([]).decoded()
    with pytest.raises(DataError, match="none of 24 training images can be read"):
        data.load(own_photographs)
    with pytest.raises(DataError, match="is empty"):
        StreamBatches(split.subset([]), 2, seed=0)


@pytest.mark.parametrize("value", ["-1%", "100%", "1", "x", "%", 1.5, "nan"])
def test_a_share_of_bad_files_is_below_one(value: str | float) -> None:
    with pytest.raises(ConfigError, match="max_bad"):
        parse_fraction(value)
    assert parse_fraction("0.1%") == pytest.approx(0.001) and parse_fraction("0.5") == parse_fraction(0.5) == 0.5
    UnreadableImages(10, 0.5).add([("one", "why")])


def test_fewer_than_no_workers(photographs: Path) -> None:
    with pytest.raises(DataError, match="workers = -1"):
        pictures.load(photographs, workers=-1)


def test_an_image_that_cannot_be_one_is_not_read(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = pictures.streamed(photographs)
    monkeypatch.setattr("dllp.data.sources.MAX_IMAGE_BYTES", 10)
    with pytest.raises(Unreadable, match="more than the 10"):
        split.sources.read(0)
