"""`dllp prune` on a streamed folder: the same end whatever happened on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dllp.cli.main import main
from tests.robustness.crash.harness import digest
from tests.support import pictures
from tests.support.commands import one_line
from tests.support.interrupted import killed, signalled, stop_at


def command(data: Path, out: Path, *words: str) -> list[str]:
    return [
        "prune", "--data", str(data), "--image-size", "16", "--augment", "resized-crop", "--batch-size", "6",
        "--epochs", "2", "--model", "small_cnn", "--keep-flops", "0.5", "--particles", "2",
        "--no-dense", "--quiet", "--out", str(out), *words,
    ]  # fmt: skip


def group_terminated(_: object) -> None:
    """SIGTERM to every process of the run by another one, as systemd, Slurm and `timeout` do it."""
    workers = [child.pid for child in multiprocessing.active_children()]
    subprocess.run(["kill", "-TERM", *map(str, workers), str(os.getpid())], check=True)


def worker_killed(_: object) -> None:
    """SIGKILL to a worker, as by a system that runs out of memory."""
    worker = multiprocessing.active_children()[0]
    worker.kill()
    os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of 24 training images, four steps an epoch, and a run on it that nothing disturbed."""
    root = tmp_path_factory.mktemp("streamed")
    data = pictures.folder(root / "data")
    assert main(command(data, root / "whole", "--workers", "2")) == 0
    return data, root / "whole"


@pytest.mark.parametrize(
    ("step", "act"), [(2, group_terminated), (7, signalled(signal.SIGINT)), (7, killed), (6, worker_killed)]
)
def test_a_run_stopped_within_an_epoch_ends_bit_for_bit_the_same(
    whole: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, act: object,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data, undisturbed = whole
    words = command(data, tmp_path / "out", "--workers", "2", "--checkpoint-steps", "1")
    with monkeypatch.context() as patch:
        stop_at(patch, step, act)  # type: ignore[arg-type]
        if act is killed:
            with pytest.raises(SystemError):
                main(words)
        else:
            assert main(words) == {group_terminated: 143, worker_killed: 2}.get(act, 130)  # type: ignore
            outcome = "has died" if act is worker_killed else "interrupted"
            one_line(capsys, outcome, f"go on with dllp prune --resume --out {tmp_path / 'out'}")
    assert main(["prune", "--resume", "--quiet", "--out", str(tmp_path / "out")]) == 0
    assert digest(tmp_path / "out") == digest(undisturbed)


def test_workers_and_shards_change_nothing(whole: tuple[Path, Path], tmp_path: Path) -> None:
    data, undisturbed = whole
    assert main(command(pictures.shards(tmp_path / "packed", data), tmp_path / "out", "--workers", "0")) == 0
    for name in ("particle-0.safetensors", "reference-1.safetensors"):
        a, b = (load_file(folder / name) for folder in (undisturbed, tmp_path / "out"))
        assert all(a[key].equal(b[key]) for key in a)


def test_a_run_can_be_evaluated(whole: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(whole[1]), "--workers", "0", "--corrupt", "noise:0.1", "--ood", "noise"]) == 0
    assert "on 8 test examples" in " ".join(capsys.readouterr().out.split())


def test_bad_files_are_told_and_too_many_end_the_run(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(whole[0], tmp_path / "data")
    (data / "train" / "cat" / "003.jpg").write_bytes(b"")
    words = command(data, tmp_path / "out", "--workers", "1")
    assert main([*words, "--max-bad", "5%"]) == 0
    reported = capsys.readouterr().err.splitlines()
    assert all(line.startswith("dllp: warning:") for line in reported)
    assert ["cat/003.jpg is left out" in line for line in reported] == [True] + [False] * (len(reported) - 1)
    assert main([*words, "--overwrite"]) == 2
    one_line(capsys, "cannot read 1 of 24 images, more than max_bad = 0.1% allows", "cat/003.jpg (it is empty)")
    assert main([*words, "--overwrite", "--max-bad", "all"]) == 2
    one_line(capsys, "max_bad = all", "0.1%")


@pytest.mark.parametrize("streamed", [False, True])
def test_bad_files_are_in_the_log_once_after_a_resume_too(
    whole: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    data = shutil.copytree(whole[0], tmp_path / "data")
    bad = [data / "train" / "cat" / "003.jpg", data / "val" / "dog" / "000.jpg"]
    for path in bad:
        path.write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    words = command(Path("data"), tmp_path / "out", "--workers", "0", "--max-bad", "20%")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, signalled(signal.SIGTERM))
        assert main([*words, *(() if streamed else ("--augment", "none"))]) == 143
    assert main(["prune", "--resume", "--quiet", "--out", str(tmp_path / "out")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert lines[:2] == [{"left_out": str(path), "reason": "it is empty"} for path in bad]
    assert [(line["training"], line["epoch"]) for line in lines[2:]] == [("pruned", 1), ("pruned", 2)]
    assert main(["report", str(tmp_path / "out"), "--quiet"]) == 0
