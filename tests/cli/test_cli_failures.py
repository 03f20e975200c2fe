"""`dllp prune` that fails or is stopped, before and after its first checkpoint, says how to go on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from dllp import files
from dllp.cli.main import main
from dllp.errors import Interrupted
from tests.robustness.crash.harness import digest
from tests.support.commands import ENVIRONMENT, one_line
from tests.support.interrupted import command, examples, stop_at, unfinished


@pytest.fixture
def data(tmp_path: Path) -> str:
    return examples(tmp_path / "data")


def test_signals_before_training_leave_nothing(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    for place in ("dllp.prepare.discover", "dllp.api.make_gating", "dllp.runs.folder.RunFolder.start_log"):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            if place.endswith("start_log"):
                patch.setattr(
                    "dllp.runs.checkpoints.Signals._handle",
                    lambda self, number, frame: (_ for _ in ()).throw(Interrupted(number)),
                )
            assert main(command(data, tmp_path / "new" / "out")) == 143
        one_line(capsys, "interrupted, nothing was written")
        assert sorted(os.listdir(tmp_path)) == ["data"]


def test_a_signal_before_a_resumed_training_says_how_to_go_on(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished(data, tmp_path / "out", monkeypatch)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("dllp.prepare.discover", lambda *rest, **options: signal.raise_signal(signal.SIGINT))
        assert main(["prune", "--resume", "--out", str(tmp_path / "out")]) == 130
    one_line(capsys, "interrupted, go on with dllp prune --resume")
    assert main(["prune", "--resume", "--quiet", "--out", str(tmp_path / "out")]) == 0


def test_a_second_signal_ends_at_once(data: str, tmp_path: Path) -> None:
    code = """
        import os, signal, sys, time
        from dllp.runs.checkpoints import Checkpoints
        from dllp.cli.main import main
        def slow(self, *rest, **options):
            signal.raise_signal(signal.SIGTERM)
            print("first", flush=True)
            time.sleep(60)
        Checkpoints.after_step = slow
        sys.exit(main(sys.argv[1:]))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), *command(data, tmp_path / "out")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None and process.stdout.readline() == b"first\n"
        began = time.monotonic()
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM and time.monotonic() - began < 10


def test_no_space_after_the_first_checkpoint_says_how_to_go_on(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(command(data, whole)) == 0

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        stop_at(patch, 5, lambda _: patch.setattr(os, "fsync", full))
        assert main(command(data, out)) == 2
    one_line(capsys, "No space left on device", f"go on with dllp prune --resume --out {out}")
    assert main(["prune", "--resume", "--quiet", "--out", str(out)]) == 0
    assert digest(out) == digest(whole)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError(),
        OSError(errno.EPIPE, "Broken pipe"),
    ],
)  # fmt: skip
def test_what_is_no_fault_of_the_run_says_how_to_go_on(
    error: Exception, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise error

    stop_at(monkeypatch, 5, fail)
    assert main(command(data, tmp_path / "out", "--no-dense")) == 2
    one_line(capsys, "error: ", f"go on with dllp prune --resume --out {tmp_path / 'out'}")


def test_an_end_that_fails_can_be_made_up_for(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(command(data, whole)) == 0
    write = files.write_bytes
    for name in ("reference-1.safetensors", "dense.safetensors", "evaluation.json", "run.json"):

        def faulty(path: Path, content: bytes, name: str = name) -> None:
            if path.name == name:
                raise KeyboardInterrupt
            write(path, content)

        words = ["prune", "--resume", "--quiet", "--out", str(out)] if out.exists() else command(data, out)
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_bytes", faulty)
            assert main(words) == 130
        assert not (out / "run.json").exists()
    assert main(["prune", "--resume", "--quiet", "--out", str(out)]) == 0
    assert digest(out) == digest(whole)
