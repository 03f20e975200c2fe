"""`dllp prune --resume`: what was stopped goes on to the same end, and one line tells how."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from dllp import artifacts
from dllp.api import OnStep
from dllp.checkpoints import Checkpoints
from dllp.cli import main
from dllp.errors import Interrupted
from dllp.runs import RunFolder
from dllp.train import Trainer
from tests.commands import ENVIRONMENT, npy, one_line, settle
from tests.crash.harness import digest

SHORT = ("--model", "mlp", "--granularity", "weight", "--gate-linear", "--keep-params", "0.3", "--epochs", "3")
"""Nine steps of a small network, twice."""


@pytest.fixture
def data(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    y = np.arange(96) % 4
    return str(npy(tmp_path / "data", (rng.normal(size=(96, 6)) + y[:, None]).astype(np.float32), y))


def command(data: str, out: Path, *words: str) -> list[str]:
    return ["prune", "--data", data, "--batch-size", "32", "--quiet", "--out", str(out), *SHORT, *words]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, act: OnStep, training: str = "pruned") -> None:
    """Act after a step of one of the trainings, before its checkpoint is due."""
    after = Checkpoints.after_step

    def faulty(self: Checkpoints, now: int, *rest: Any, **options: Any) -> None:
        if now == step and self.folder.name == training:
            act(self)  # pyright: ignore
        after(self, now, *rest, **options)

    monkeypatch.setattr(Checkpoints, "after_step", faulty)


def signalled(number: int) -> Callable[[object], None]:
    return lambda _: signal.raise_signal(number)


def killed(_: object) -> None:
    raise SystemError("as if killed")


# ---- to the same end


@pytest.mark.parametrize(("training", "step"), [("pruned", 1), ("pruned", 5), ("pruned", 9), ("dense", 2)])
def test_a_signal_finishes_the_step_and_the_run_goes_on(
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    training: str,
    step: int,
) -> None:
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


@pytest.mark.parametrize("harm", ["torn", "flipped", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(command(data, whole)) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 7, signalled(signal.SIGINT))
        assert main(command(data, out)) == 130
    newest = out / "checkpoints/pruned/step-000000007.safetensors"
    content = bytearray(newest.read_bytes())
    content[-100] ^= 4
    newest.write_bytes({"torn": content[:-50], "flipped": content, "empty": b""}[harm])
    capsys.readouterr()
    assert main(["prune", "--resume", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "dllp: warning:" in shown.err and str(newest) in shown.err and shown.err.count("\n") == 1
    assert "going on after step 6 of 9" in shown.out
    assert digest(out) == digest(whole)


def test_a_finished_run_says_so(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(command(data, out, "--no-dense")) == 0
    before = digest(out)
    (out / "checkpoints" / "pruned").mkdir(parents=True)
    (out / ".run.json.7.tmp").touch()  # killed between run.json and the tidying
    assert main(["prune", "--resume", "--out", str(out)]) == 0
    assert "finished" in capsys.readouterr().out
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


def unfinished(data: str, out: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 4, signalled(signal.SIGTERM))
        assert main(command(data, out, "--no-dense", *words)) == 143


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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--epochs", "9"], ["epochs = 9 contradicts the run, which has 3"]),
        (["--keep-flops", "0.5"], ["keep_flops = 0.5 contradicts"]),
        (["--data", "digits"], ["data = digits contradicts"]),
        (["--overwrite"], ["leave out --overwrite"]),
        (["--config", "a.yaml"], ["leave out", "--config"]),
        (["--checkpoint-steps", "-1"], ["-1 steps"]),
        (["--checkpoint-minutes", "nan"], ["checkpoint_minutes = nan"]),
        (["--out", "nowhere"], ["nowhere is not there"]),
        (["--out", "data"], ["other files"]),
        (["--out", "empty"], ["holds no unfinished run"]),
    ],
)
def test_a_contradiction_is_one_line(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], told: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    unfinished(data, Path("out"), monkeypatch)
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    before = digest_below(tmp_path)
    assert main(["prune", "--resume", "--out", "out", *words]) == 2
    one_line(capsys, "error: ", *told)
    assert digest_below(tmp_path) == before


def digest_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


# ---- what fails before and after the first checkpoint


def test_signals_before_training_leave_nothing(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    for place in ("dllp.prepare.discover", "dllp.api.make_gating", "dllp.runs.RunFolder.start_log"):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            if place.endswith("start_log"):
                patch.setattr(
                    "dllp.runs.Signals._handle", lambda self, number, frame: (_ for _ in ()).throw(Interrupted(number))
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
        from dllp.checkpoints import Checkpoints
        from dllp.cli import main
        def slow(self, *rest, **options):
            signal.raise_signal(signal.SIGTERM)
            print("first", flush=True)
            time.sleep(60)
        Checkpoints.after_step = slow
        sys.exit(main(sys.argv[1:]))
    """
    arguments = [
        sys.executable,
        "-c",
        "\n".join(line[8:] for line in code.splitlines()),
        *command(data, tmp_path / "out"),
    ]
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


def test_an_end_that_fails_can_be_made_up_for(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(command(data, whole)) == 0
    write = artifacts.write_bytes
    for name in ("reference-1.safetensors", "dense.safetensors", "evaluation.json", "run.json"):

        def faulty(path: Path, content: bytes, name: str = name) -> None:
            if path.name == name:
                raise KeyboardInterrupt
            write(path, content)

        words = ["prune", "--resume", "--quiet", "--out", str(out)] if out.exists() else command(data, out)
        with monkeypatch.context() as patch:
            patch.setattr(artifacts, "write_bytes", faulty)
            assert main(words) == 130
        assert not (out / "run.json").exists()
    assert main(["prune", "--resume", "--quiet", "--out", str(out)]) == 0
    assert digest(out) == digest(whole)


# ---- numbers that break


def poison(monkeypatch: pytest.MonkeyPatch, act: Callable[[Trainer], None], step: int, times: int = 1) -> None:
    """Break a number before a step, so many times."""
    knobs, left = Trainer.set_knobs, [times]

    def faulty(self: Trainer) -> None:
        if self.step_index == step and left[0] and self.gating is not None:
            left[0] -= 1
            with torch.no_grad():
                act(self)
        knobs(self)

    monkeypatch.setattr(Trainer, "set_knobs", faulty)


def nan_weight(trainer: Trainer) -> None:
    name = list(trainer.particles.layout.segments)[-2]
    trainer.particles.layout.segments[name].view(trainer.particles.rows[1])[0, 0] = torch.nan


def nan_gate(trainer: Trainer) -> None:
    trainer.belief.logits[0, 5] = torch.nan


def nan_gradient(trainer: Trainer) -> None:
    def broken(i: int, value: torch.Tensor, *others: torch.Tensor, **options: Any) -> Any:
        found = own(i, value, *others, **options)
        if i == 1:
            trainer.particles.gradients[1, 3] = torch.inf
        return found

    own, trainer.particles.differentiate = trainer.particles.differentiate, broken


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (nan_weight, ["the weights of particle 2", "(layer ", ".weight)"]),
        (nan_gate, ["the gate logits of particle 1", "(layer "]),
        (nan_gradient, ["the gradient of particle 2", "(layer "]),
    ],
)
def test_a_broken_number_is_named_and_rollback_is_offered(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    act: Callable[[Trainer], None], told: list[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        poison(patch, act, step=4)
        assert main(command(data, out, "--no-dense")) == 2
    error = capsys.readouterr().err
    for word in [*told, "NaN or infinity", "at step 5 (epoch 2)", f"--resume --out {out} --on-nan rollback"]:
        assert word in error
    assert error.count("\n") == 1
    assert [path.name for path in (out / "checkpoints/pruned").iterdir()] == ["step-000000003.safetensors"]
    with monkeypatch.context() as patch:
        poison(patch, act, step=4)
        assert main(["prune", "--resume", "--quiet", "--on-nan", "rollback", "--out", str(out)]) == 0
    assert "back at step 3 with lr 0.05" in capsys.readouterr().err
    assert yaml.safe_load((out / "config.yaml").read_text())["on_nan"] == "rollback"
    history = json.loads((out / "run.json").read_text())["history"]
    assert [record["epoch"] for record in history] == [1, 2, 3]
    assert all(value.isfinite().all() for value in load_file(out / "particle-0.safetensors").values())


def test_a_learning_rate_that_diverges_stops_or_rolls_back(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    wild = ["--lr", "1e25", "--warmup", "0", "--no-dense", "--checkpoint-steps", "1"]
    assert main(command(data, out, *wild)) == 2
    one_line(capsys, "NaN or infinity in the", "of particle", "at step", "lower lr")
    for file in (out / "checkpoints").rglob("*.safetensors"):
        assert all(value.isfinite().all() for value in load_file(file).values() if value.is_floating_point()), file.name
    assert main(command(data, tmp_path / "again", *wild, "--on-nan", "rollback")) == 2, "four tries are enough"
    assert "back at step" in capsys.readouterr().err


def test_rollbacks_halve_the_rate_each_time(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, nan_weight, step=7, times=3)
    assert main(command(data, tmp_path / "out", "--no-dense", "--on-nan", "rollback", "--checkpoint-steps", "1")) == 0
    rates = [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert rates == ["0.05", "0.025", "0.0125"]
    poison(monkeypatch, nan_weight, step=7, times=9)
    assert main(command(data, tmp_path / "other", "--no-dense", "--on-nan", "rollback")) == 2
    assert "kept in" in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_that_vanishes_before_it_is_held(tmp_path: Path) -> None:
    with pytest.raises(artifacts.ArtifactError, match="is not there"), RunFolder(tmp_path / "a", resume=True):
        pass
