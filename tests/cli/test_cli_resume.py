"""`dllp prune --resume`: what was stopped goes on to the same end, and one line tells how."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dllp.cli.main import main
from dllp.errors import ArtifactError
from dllp.runs.folder import RunFolder
from tests.robustness.crash.harness import digest
from tests.support.commands import ENVIRONMENT, one_line, settle
from tests.support.interrupted import SHORT, command, examples, killed, signalled, stop_at, unfinished


@pytest.fixture
def data(tmp_path: Path) -> str:
    return examples(tmp_path / "data")


# ---- to the same end


@pytest.mark.parametrize(("training", "step"), [("pruned", 1), ("pruned", 5), ("pruned", 9), ("dense", 2)])
def test_a_signal_finishes_the_step_and_the_run_goes_on(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    training: str, step: int,
) -> None:  # fmt: skip
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(command(data, whole)) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, step, signalled(signal.SIGTERM), training)
        assert main(command(data, out)) == 143
    one_line(capsys, "dllp: interrupted", f"go on with dllp prune --resume --out {out}")
    assert (out / "checkpoints" / training / f"step-{step:09d}.safetensors").is_file()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not (out / "run.json").exists()
    assert main(["prune", "--resume", "--out", str(out)]) == 0
    assert f"{training}: going on after step {step} of 9" in capsys.readouterr().out
    assert digest(out) == digest(whole), "every file, and none besides"


def test_a_log_has_no_epoch_twice(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 8, killed)
        with pytest.raises(SystemError):
            main(command(data, out))
    for file in (out / "checkpoints/pruned").iterdir():
        if "006" in file.name:
            file.unlink()  # as if the machine had died before it was written
    assert len((out / "log.jsonl").read_text().splitlines()) == 2
    assert main(["prune", "--resume", "--quiet", "--out", str(out)]) == 0
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [(line["training"], line["epoch"]) for line in lines] == [
        (training, epoch) for training in ("pruned", "dense") for epoch in (1, 2, 3)
    ]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(command(data, whole)) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 7, signalled(signal.SIGINT))
        assert main(command(data, out)) == 130
    newest = out / "checkpoints/pruned/step-000000007.safetensors"
    newest.write_bytes(newest.read_bytes()[:-50])
    capsys.readouterr()
    assert main(["prune", "--resume", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "dllp: warning:" in shown.err and str(newest) in shown.err and shown.err.count("\n") == 1
    assert "going on after step 6 of 9" in shown.out
    assert digest(out) == digest(whole)


def test_where_no_checkpoint_is_whole_the_run_begins_anew_and_says_so(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(command(data, whole, "--no-dense")) == 0
    unfinished(data, out, monkeypatch)
    files = list((out / "checkpoints/pruned").glob("*"))
    for file in files:
        file.write_bytes(b"")
    capsys.readouterr()
    assert main(["prune", "--resume", "--out", str(out)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(files) == 2 and all(line.endswith("no other is left to go on from") for line in lines)
    assert digest(out) == digest(whole)


def test_a_finished_run_says_so(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(command(data, out, "--no-dense")) == 0
    before = digest(out)
    (out / "checkpoints" / "pruned").mkdir(parents=True)
    (out / ".run.json.7.tmp").touch()  # killed between run.json and the tidying
    assert main(["prune", "--resume", "--out", str(out)]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["prune", "--resume", "--out", str(out), "--epochs", "5"]) == 2
    one_line(capsys, "epochs = 5 contradicts the run, which has 3")
    assert digest(out) == before


def test_where_the_command_is_called_does_not_matter(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 4, signalled(signal.SIGTERM))
        assert main(command("data", Path("out"), "--no-dense")) == 143
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["prune", "--resume", "--out", "../out", "--data", "../data", "--quiet", "--keep-params", "0.3"]) == 0
    assert (tmp_path / "out" / "run.json").is_file()


# ---- what is refused


def test_data_that_was_moved_is_named_anew(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, moved = tmp_path / "out", tmp_path / "elsewhere"
    unfinished(data, out, monkeypatch)
    Path(data).rename(moved)
    capsys.readouterr()
    assert main(["prune", "--resume", "--quiet", "--out", str(out)]) == 2
    one_line(capsys, "no folder is called")
    assert main(["prune", "--resume", "--quiet", "--out", str(out), "--data", str(moved)]) == 0
    assert yaml.safe_load((out / "config.yaml").read_text())["data"] == str(moved)


def test_an_unfinished_run_is_not_replaced_by_mistake(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    unfinished(data, out, monkeypatch)
    capsys.readouterr()
    assert main(command(data, out, "--no-dense")) == 2
    one_line(capsys, "holds an unfinished run", f"dllp prune --resume --out {out}", "--overwrite")
    (out / "thesis.tex").write_text("years of work")
    assert main(command(data, out, "--no-dense", "--overwrite")) == 2
    one_line(capsys, "holds other files")
    (out / "thesis.tex").unlink()
    assert main(command(data, out, "--no-dense", "--overwrite", "--epochs", "1")) == 0
    assert yaml.safe_load((out / "config.yaml").read_text())["epochs"] == 1
    assert not (out / "checkpoints").exists()


def test_a_contradiction_is_one_line(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    unfinished(data, Path("out"), monkeypatch)
    for name in ("empty", "settings"):
        (tmp_path / name).mkdir()
    (tmp_path / "settings" / "config.yaml").write_text("epochs: 3")
    capsys.readouterr()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for words, reported in (
        ("--epochs 9", "epochs = 9 contradicts the run, which has 3"),
        ("--keep-flops 0.5", "keep_flops = 0.5 contradicts"),
        ("--data digits", "data = digits contradicts"),
        ("--overwrite", "leave out --overwrite"),
        ("--config a.yaml", "leave out --overwrite and --config"),
        ("--checkpoint-minutes nan", "checkpoint_minutes = nan"),
        ("--out nowhere", "nowhere holds no unfinished run"),
        ("--out data", "other files"),
        ("--out empty", "holds no unfinished run"),
        ("--out settings", "settings holds other files"),
    ):
        assert main(["prune", "--resume", "--out", "out", *words.split()]) == 2, words
        one_line(capsys, "error: ", reported)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before, words


def test_code_is_named_again_or_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nets = settle(tmp_path, monkeypatch)
    words = ["--model", f"{nets}:small", "--epochs", "1", "--particles", "1", "--keep-flops", "0.5", "--quiet"]
    with monkeypatch.context() as patch:
        stop_at(patch, 2, signalled(signal.SIGINT))
        assert main(["prune", *words, "--out", "out"]) == 130
    one_line(capsys, f"--resume --out out --model {nets}:small")
    assert main(["prune", "--resume", "--out", "out"]) == 2
    one_line(capsys, "the run's network is code", "--trust-imports")
    assert main(["prune", "--resume", "--out", "out", "--model", f"{nets}:linear"]) == 2
    one_line(capsys, "contradicts")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, signalled(signal.SIGINT))
        assert main(["prune", "--resume", "--out", "out", "--model", f"{nets}:small"]) == 130
    assert main(["prune", "--resume", "--out", "out", "--trust-imports", "--quiet"]) == 0


def test_two_processes_do_not_share_a_folder(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    answers: list[int] = []

    def second(_: object) -> None:
        monkeypatch.undo()
        for words in (["--resume"], ["--overwrite", "--data", data, *SHORT], ["--data", data, *SHORT]):
            answers.append(main(["prune", "--out", str(out), *words]))
            one_line(capsys, "another process works in", str(out))

    stop_at(monkeypatch, 4, second)
    assert main(command(data, out, "--no-dense")) == 0
    assert answers == [2, 2, 2] and not (out / ".lock").exists()


def test_a_lock_dies_with_its_process(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    unfinished(data, out, monkeypatch)
    code = "import filelock, sys, time\nwith filelock.FileLock(sys.argv[1]): print(1, flush=True); time.sleep(60)"
    arguments = [sys.executable, "-c", code, str(out / ".lock")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=ENVIRONMENT) as other:
        assert other.stdout is not None and other.stdout.readline()
        capsys.readouterr()
        assert main(["prune", "--resume", "--out", str(out)]) == 2
        one_line(capsys, "another process works in")
        other.kill()
    assert (out / ".lock").exists()
    assert main(["prune", "--resume", "--quiet", "--out", str(out)]) == 0
    assert not (out / ".lock").exists()


def test_a_folder_that_vanishes_before_it_is_held(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no unfinished run"), RunFolder(tmp_path / "a", resume=True):
        pass
