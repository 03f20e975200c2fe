"""Checkpoints on disk: when they are written, what is kept, and which one is used."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dllp import files
from dllp.errors import ArtifactError, Interrupted
from dllp.runs import checkpoints
from dllp.runs.checkpoints import Checkpoints, State, Take, read


def state(step: int = 0) -> State:
    tensors = {"rows": torch.full((2, 3), float(step)), "half": torch.ones(3, dtype=torch.bfloat16)}
    tensors |= {"step": torch.tensor(float(step)), "none": torch.zeros(2, 0), "flags": torch.tensor([True, False])}
    return tensors, {"step": step, "best": float("inf"), "history": [{"loss": [0.1 + 0.2]}]}


def take(step: int = 0) -> Take:
    return lambda: lambda: state(step)


def save(held: Checkpoints, *steps: int) -> None:
    for step in steps:
        held.save(step, take(step), wait=True)


def names(held: Checkpoints) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in held.files()]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    held = Checkpoints(tmp_path / "new" / "folder")
    assert held.latest() is None
    save(held, 7)
    found = held.latest()
    assert found is not None
    assert found[1] == state(7)[1]
    assert found[0].keys() == state(7)[0].keys()
    for name, value in state(7)[0].items():
        assert found[0][name].dtype == value.dtype and torch.equal(found[0][name], value)


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    held = Checkpoints(tmp_path)
    save(held, 1, 2, 30, 100_000)
    assert names(held) == [30, 100_000]
    other = Checkpoints(tmp_path, kept=1)
    save(other, 200_000)
    assert names(other) == [200_000]


def test_due_at_the_end_of_an_epoch_and_after_steps_or_minutes(tmp_path: Path) -> None:
    held = Checkpoints(tmp_path, every_steps=3, every_minutes=0, kept=99)
    for step in range(1, 11):
        held.after_step(step, step == 5, take(step))
        held.flush()
    assert names(held) == [3, 5, 8]
    late = Checkpoints(tmp_path / "late", every_minutes=1e-9, kept=99)
    for step in (1, 2):
        late.after_step(step, False, take(step))
        late.flush()
    assert names(late) == [1, 2]
    never = Checkpoints(tmp_path / "never", every_minutes=0)
    never.after_step(1, False, take())
    never.flush()
    assert not (tmp_path / "never").exists()


def test_a_busy_writer_is_not_overtaken_but_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), files.write_bytes

    def slow(path: Path, content: bytes) -> None:
        assert go.wait(30)
        write(path, content)

    monkeypatch.setattr(files, "write_bytes", slow)
    held, taken = Checkpoints(tmp_path), list[int]()

    def note(step: int) -> Callable[[], State]:
        taken.append(step)
        return lambda: state(step)

    held.after_step(1, True, lambda: note(1))
    began = time.monotonic()
    held.after_step(2, True, lambda: note(2))
    assert time.monotonic() - began < 10 and taken == [1], "training does not wait"
    go.set()
    held.after_step(3, True, lambda: note(3), last=True)
    assert taken == [1, 3] and names(held) == [1, 3]


def test_what_is_written_is_what_was_taken(tmp_path: Path) -> None:
    """A snapshot is taken before the run goes on; the file is written while it does."""
    held, value = Checkpoints(tmp_path), torch.zeros(1000)

    def copy() -> Callable[[], State]:
        tensors = {"rows": value.clone()}
        return lambda: (tensors, {})

    held.save(1, copy)
    value += 1
    held.flush()
    found = held.latest()
    assert found is not None and not found[0]["rows"].any()


def test_an_error_of_the_writer_surfaces(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    held = Checkpoints(tmp_path / "file")
    held.save(1, take())
    with pytest.raises(ArtifactError, match="cannot write"):
        held.flush()
    held.flush()  # reported once
    held.save(2, take())
    while held._pending is not None and not held._pending.done():
        time.sleep(0.01)
    with pytest.raises(ArtifactError, match="Not a directory"):
        held.after_step(3, True, take())
    held.save(4, take())
    held.settle()
    held.close()


@pytest.mark.parametrize("harm", ["empty", "torn", "flipped", "text", "swapped", "values", "header"])
def test_a_damaged_newest_one_is_named_and_the_one_before_is_used(tmp_path: Path, harm: str) -> None:
    held = Checkpoints(tmp_path)
    save(held, 1, 2)
    newest = held.files()[-1]
    content = newest.read_bytes()
    flipped = bytearray(content)
    flipped[-3] ^= 1
    harmed = {
        "empty": b"",
        "torn": content[:-1],
        "flipped": bytes(flipped),
        "text": b"not a checkpoint at all",
        "swapped": held.files()[0].read_bytes().replace(b"dllp-checkpoint", b"else-checkpoint"),
        "values": content.replace(rb"\"step\": 2", rb"\"step\": 3"),
        "header": content.replace(b"dllp-checkpoint-3", b"dllp-checkpoint-9"),
    }
    assert harmed[harm] != content
    newest.write_bytes(harmed[harm])
    for _ in range(2):
        found = held.latest()
        assert found is not None and found[1]["step"] == 1
        assert len(held.damaged) == 1 and str(newest) in held.damaged[0]
    save(held, 3)
    assert names(held) == [1, 3], "the damaged one is gone, and does not count"


def test_all_damaged_is_none(tmp_path: Path) -> None:
    held = Checkpoints(tmp_path)
    save(held, 1, 2)
    for path in held.files():
        path.write_bytes(b"")
    assert held.latest() is None and len(held.damaged) == 2
    save(held, 2)
    assert names(held) == [2] and held.latest() is not None


def test_leftovers_of_a_killed_writer_go(tmp_path: Path) -> None:
    (tmp_path / ".step-000000004.safetensors.123.tmp").write_bytes(b"half")
    held = Checkpoints(tmp_path)
    assert held.latest() is None
    save(held, 5)
    assert os.listdir(tmp_path) == ["step-000000005.safetensors"]


def test_stop_writes_and_raises(tmp_path: Path) -> None:
    held = Checkpoints(tmp_path, every_minutes=0)
    held.stop(15)
    with pytest.raises(Interrupted) as end:
        held.after_step(4, False, take(4))
    assert end.value.signal == 15 and names(held) == [4]


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"gone\.safetensors"):
        read(tmp_path / "gone.safetensors")
    assert checkpoints.FORMAT == "dllp-checkpoint-3", "another format needs another number"
