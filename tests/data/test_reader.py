"""Worker processes: unreadable images, signals, and the death of a worker."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from dllp.data import StreamBatches, reader
from dllp.data.reader import Reader, Request
from dllp.errors import DataError
from tests.support import pictures
from tests.support.commands import UNTRACED


def request(count: int, *numbers: int) -> Request:
    draws = np.random.default_rng(3).random((count, 5))
    return Request(np.array(numbers or range(count)), draws)


def test_the_next_readable_image_takes_the_place_of_an_unreadable_one(tmp_path: Path) -> None:
    spoiled = pictures.folder(tmp_path / "set")
    for number in (3, 4, 11):
        (spoiled / "train" / "cat" / f"{number:03d}.jpg").write_bytes((b"", b"no image")[number % 2])
    found = Reader(pictures.training(spoiled, 16).sources, 16)[request(24)]
    assert found.numbers.tolist()[2:6] == [2, 5, 5, 5] and found.pixels.shape == (24, 3, 16, 16)
    assert [number for number, _ in found.unreadable] == [3, 4, 4, 11]


# ---- worker processes

BATCH = 4


def batches(folder: Path, workers: int) -> StreamBatches:
    return StreamBatches(replace(pictures.streamed(folder), workers=workers), BATCH, seed=0)


def stick() -> None:
    """Let every process wait for a disk that does not answer, from its second batch on."""
    crop, calls = reader.crop, itertools.count()
    reader.crop = lambda *args: time.sleep(120) if next(calls) >= BATCH else crop(*args)  # type: ignore


def children() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def ended(pid: int) -> bool:
    """Whether a process ends within a while: a child wholly, so that its parent was told."""
    for _ in range(1000):
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
        except ChildProcessError:
            found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
            if found.stdout.strip()[:1] in ("", "Z"):
                return True
        time.sleep(0.01)
    return False


def test_a_killed_worker_is_told_with_the_next_batch_and_not_before(photographs: Path) -> None:
    epoch = batches(photographs, workers=1).epoch(0)
    next(epoch)
    pid = children()[0]
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)  # PyTorch would raise here, wherever that is
    with pytest.raises(DataError, match=r"has died .*is killed by signal: Killed.*lower workers") as caught:
        next(epoch)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_that_dies_while_it_hands_a_batch_over(
    photographs: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(loader: object) -> Iterator[object]:
        raise error
        yield

    monkeypatch.setattr(DataLoader, "__iter__", broken)
    split = pictures.training(photographs, 16)
    with pytest.raises(
        DataError, match=r"has died \(.*(Connection reset by peer|pipe is closed)\): give it more memory"
    ):
        next(StreamBatches(split, BATCH, seed=0).epoch(0))


def test_a_signal_to_the_whole_group_leaves_the_workers_alone(photographs: Path) -> None:
    alone, several = (batches(photographs, workers).epoch(0) for workers in (0, 2))
    found = [next(several)]
    for name in ("TERM", "INT"):
        subprocess.run(["kill", f"-{name}", *map(str, children())], check=True)
    assert pictures.same(list(alone), [*found, *several])


def test_the_training_process_can_end_a_worker_that_is_stuck(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "crop", reader.crop)  # as it was, at the end
    split = batches(photographs, workers=1)
    stick()
    next(split.epoch(0))
    (pid,) = children()
    os.kill(pid, signal.SIGTERM)
    assert ended(pid)


def test_workers_end_with_a_parent_that_is_killed(photographs: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.data.test_reader import *\n"
        "split = batches(Path(sys.argv[1]), workers=3); stick(); next(split.epoch(0)); print(*children(), flush=True)\n"
        "time.sleep(120)"
    )
    words = [sys.executable, "-c", code, str(photographs)]
    with subprocess.Popen(words, env=UNTRACED, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 3 and all(ended(pid) for pid in pids)
