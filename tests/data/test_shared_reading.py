"""Processes that share batches read a part of each: together what one process alone reads, whatever is bad.

Here they are threads of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllp.api import share_reading
from dllp.data import StreamBatches, reader, workers
from dllp.devices.mesh import Axis, Place
from dllp.errors import DataError
from tests.support import pictures

BATCH = 7


class Line(Axis):
    """One of several threads that talk to each other."""

    def __init__(self, index: int, size: int, said: dict[int, bytes], meeting: threading.Barrier) -> None:
        super().__init__(None, index, size)
        self.said, self.meeting = said, meeting

    def payloads(self, content: bytes) -> list[bytes]:
        self.said[self.index] = content
        self.meeting.wait(60)
        heard = [self.said[k] for k in range(self.size)]
        self.meeting.wait(60)
        return heard


class End:
    """What came of a process: its batches, what it has told, its error."""

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
    assert [end.error is not None and end.error.told for end in ends] == [False, True], "the first speaks for all"


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
        assert workers.cores() == wanted
