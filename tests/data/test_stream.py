"""Folders of any size: the same batches for any number of workers, from any step on, and the same set as in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dllp import data
from dllp.api import share_reading
from dllp.data import ArrayData, StreamBatches, StreamedData, ood, reader, stream
from dllp.devices.mesh import Axis, Place
from dllp.errors import DataError
from tests.support import pictures

# ---- order and place


def test_batches_do_not_depend_on_workers_and_go_on_from_any_step(photographs: Path) -> None:
    split = pictures.streamed(photographs)
    first, second = (list(StreamBatches(split, 7, seed=3).epoch(e)) for e in (0, 1))
    assert len(first) == 3 and first[0][0].shape == (7, 3, 16, 16) and first[0][0].dtype == torch.float32
    assert not torch.equal(first[0][0], second[0][0])
    several = StreamBatches(replace(split, workers=2), 7, seed=3)
    assert pictures.same(list(several.epoch(0)), first)
    assert pictures.same(list(several.epoch(1)), second), "on into the next epoch"
    assert pictures.same(list(several.epoch(1, 2)), second[2:]) and pictures.same(list(several.epoch(0, 1)), first[1:])
    assert not pictures.same(list(StreamBatches(split, 7, seed=4).epoch(0)), first)
    assert pictures.same([StreamBatches(split, 7, seed=3).first(7)], first[:1])


def test_an_epoch_left_early_is_no_place_to_go_on(photographs: Path) -> None:
    source = StreamBatches(pictures.streamed(photographs), 8, seed=0)
    whole = list(source.epoch(0))
    next(source.epoch(0))
    assert pictures.same(list(source.epoch(0)), whole)
    assert pictures.same(list(source.epoch(0, 1)), whole[1:])


def test_random_numbers_of_the_run_are_left_alone(photographs: Path) -> None:
    source = StreamBatches(pictures.streamed(photographs, workers=1), 8, seed=0)
    torch.manual_seed(5)
    list(source.epoch(0))
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))


def test_an_epoch_shows_every_image_once_and_both_sides(photographs: Path) -> None:
    plain = pictures.streamed(photographs, augment="resized-crop")
    labels = torch.cat([y for _, y in StreamBatches(plain, 4, seed=0).epoch(0)])
    assert labels.bincount().tolist() == [12, 12]
    middle = replace(plain, augment="none")
    one = {x.numpy().tobytes() for x, _ in StreamBatches(middle, 1, seed=0).epoch(0)}
    two = {x.numpy().tobytes() for x, _ in StreamBatches(middle, 1, seed=1).epoch(5)}
    assert one == two and len(one) == 24
    seen = torch.stack([x[0] for x, _ in StreamBatches(middle, 1, seed=0).epoch(0)])
    decoded = middle.decoded().inputs(slice(None))
    assert torch.allclose(seen.mean((2, 3)).sort(0).values, decoded.mean((2, 3)).sort(0).values, atol=1e-2)


# ---- the set


def test_a_set_is_normalised_split_and_left_out_as_in_memory(photographs: Path) -> None:
    whole = pictures.load(photographs)
    assert whole.classes == ("cat", "dog") and (whole.num_classes, whole.in_channels, whole.image_size) == (2, 3, 16)
    assert isinstance(whole.test, ArrayData) and whole.test.x.shape == (8, 3, 16, 16)
    assert whole.test.y.tolist() == [0] * 4 + [1] * 4 and whole.test.mean == whole.train.mean
    x = whole.train.decoded().inputs(slice(None)) if isinstance(whole.train, StreamedData) else torch.zeros(0)
    assert x.mean((0, 2, 3)).abs().max() < 1e-3 and float(x.std()) == pytest.approx(1, abs=0.05)
    held = pictures.load(photographs, validation=6)
    assert len(held.train) == 18 and held.validation is not None and held.validation.y.bincount().tolist() == [3, 3]
    assert x[whole.train.y == 0].mean() < x[whole.train.y == 1].mean()


def test_classes_can_be_left_out(tmp_path: Path) -> None:
    found = ood.without(pictures.load(pictures.folder(tmp_path / "set", 4, 2, ("a", "b", "c"))), ("b",))
    assert found.train.y.tolist() == [0] * 4 + [1] * 4 and found.classes == ("a", "c")
    assert found.left_out is not None and len(found.left_out) == 2
    assert len(next(StreamBatches(found.train, 8, seed=0).epoch(0))[1]) == 8


def test_a_folder_is_streamed_where_it_does_not_fit(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(data.load(photographs, image_size=16).train, ArrayData)
    monkeypatch.setattr(data, "IN_MEMORY", 1000)
    monkeypatch.setattr(stream, "IN_MEMORY", 1000)
    files, mapped = [], np.memmap
    monkeypatch.setattr(np, "memmap", lambda *args, **options: files.append(args) or mapped(*args, **options))
    large = data.load(photographs, image_size=16, workers=0)
    assert isinstance(large.train, StreamedData) and large.train.augment == "resized-crop"
    assert files, "the test images lie in a file"
    assert torch.equal(large.test.x, pictures.load(photographs).test.x)
    with pytest.raises(DataError, match="give their image_size"):
        data.load(photographs)
    with pytest.raises(DataError, match="is for images in memory"):
        data.load(photographs, image_size=16, augment="crop-flip")
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 0}))
    with pytest.raises(DataError, match="no room for"):
        data.load(photographs, image_size=16, workers=0)


# ---- processes that share batches: here they are threads of one process

BATCH = 7


class Line(Axis):
    """One of several threads that talk to each other."""

    def __init__(self, index: int, size: int, said: dict[int, Any], meeting: threading.Barrier) -> None:
        super().__init__(None, index, size)
        self.said, self.meeting = said, meeting

    def all_gather_object(self, value: Any) -> list[Any]:
        self.said[self.index] = value
        self.meeting.wait(60)
        heard = [self.said[k] for k in range(self.size)]
        self.meeting.wait(60)
        return heard


class End:
    """The end of a process: its batches, its reports, its error."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.told: list[str] = []
        self.error: DataError | None = None


def train(root: Path, size: int, work: Callable[[StreamBatches], Any], max_bad: str = "0%") -> list[End]:
    """The ends of so many processes that take `work`'s batches."""
    said, meeting = {}, threading.Barrier(size)

    def one(index: int) -> End:
        end = End()
        split = pictures.training(root, 8, max_bad, lambda image: end.told.append(str(image)), workers=0)
        source = StreamBatches(split, BATCH, seed=1)
        place = Place(1, shards=(line := Line(index, size, said, meeting)), everyone=line)
        share_reading(source, place)
        try:
            for x, y in work(source):
                part, _, share = place.shard(x, y)
                assert part is x and share == len(x) / BATCH, "nothing is cut twice"
                end.batches.append((x, y))
        except DataError as error:
            end.error = error
        return end

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return pictures.folder(tmp_path / "set")


@pytest.mark.parametrize("size", [2, 3, 7])
def test_parts_make_up_the_batches_from_any_step_on(root: Path, size: int) -> None:
    for number in (2, 3, 9):
        (root / "train" / "dog" / f"{number:03d}.jpg").write_bytes(b"nothing")

    def work(source: StreamBatches) -> Any:
        yield from source.epoch(0, 1)
        yield from source.epoch(1)

    (alone,) = train(root, 1, work, max_bad="20%")
    ends = train(root, size, work, max_bad="20%")
    assert len(alone.batches) == 5 and len(alone.told) == 3
    for k, (x, y) in enumerate(alone.batches):
        parts = [end.batches[k] for end in ends]
        assert len(x) == BATCH and max(len(part) for part, _ in parts) == -(-BATCH // size), "each reads its part"
        assert torch.equal(torch.cat([part for part, _ in parts]), x)
        assert torch.equal(torch.cat([labels for _, labels in parts]), y)
    assert all(end.told == alone.told for end in ends), "all count the same, in the same order"


def test_too_many_in_all_end_every_process_at_the_same_step(root: Path) -> None:
    for number in range(12):
        (root / "train" / "cat" / f"{number:03d}.jpg").write_bytes(b"")

    def ended(size: int) -> list[End]:
        return train(root, size, lambda source: source.epoch(0), max_bad="40%")

    (alone,), ends = ended(1), ended(2)
    assert alone.error is not None and "cannot read 11 of 24 images" in str(alone.error)
    assert [str(end.error) for end in ends] == [str(alone.error)] * 2
    assert [len(end.batches) for end in ends] == [len(alone.batches)] * 2
    assert [end.error is not None and end.error.reported_elsewhere for end in ends] == [False, True], (
        "the first speaks for all"
    )


def test_nothing_to_read_in_one_part_ends_every_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TRIES", 2)
    for number in range(4):
        (root / "train" / "cat" / f"{number:03d}.jpg").write_bytes(b"")
    (alone,), ends = (train(root, size, lambda source: source.epoch(0), max_bad="45%") for size in (1, 3))
    assert "2 images in a row cannot be read" in str(alone.error)
    assert {str(end.error) for end in ends} == {str(alone.error)}


def test_more_processes_than_examples_of_a_batch(root: Path) -> None:
    with pytest.raises(DataError, match="a batch of 7 for 8 processes"):
        train(root, 8, lambda source: source.epoch(0))


def test_processes_of_one_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    for local, wanted in ((1, 12), (2, 6), (5, 2), (100, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        assert reader.cores() == wanted
