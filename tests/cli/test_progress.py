"""Reports of a run while it goes on: lines, the log, and TensorBoard."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dllp.baselines import METHODS, run
from dllp.cli import progress
from dllp.cli.main import main
from dllp.config import Config
from dllp.evaluation.evaluate import CLEAN, OOD, Efficiency, Evaluation, Row
from dllp.records import EpochRecord
from dllp.zoo import small_cnn
from tests.support.commands import FAST, one_line
from tests.support.short_runs import DIGITS

RUN = ["prune", *FAST, "--epochs", "4", "--no-dense", "--particles", "2"]


def record(epoch: int, seconds: float) -> EpochRecord:
    return EpochRecord(epoch, "open", [1.0], None, 0.1, 1.0, 1.0, [1.0], [0.0], [0.0], [1.0], seconds, "eager")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with every kind of report, and what it printed."""
    folder = tmp_path_factory.mktemp("reported") / "run"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words, **options: lines.append(" ".join(map(str, words))))
        pytest.importorskip("tensorboard", reason="needs tensorboard: pip install -e '.[tensorboard]'")
        assert main([*RUN, "--out", str(folder), "--tensorboard"]) == 0
    return folder, "\n".join(lines)


def test_lines_report_where_the_run_stands(reported: tuple[Path, str]) -> None:
    lines = [line for line in reported[1].splitlines() if line.startswith("pruned epoch")]
    assert len(lines) == 4
    parts = r"epoch \d/4 [\d.]+ steps/s \d:\d\d:\d\d left loss [\d.]+"
    assert all(re.match(f"pruned {parts}", line) for line in lines), lines
    soft = [line for line in lines if "τ" in line]
    assert soft and all(re.search(r"cost [\d.]+ \(target 0.3\) τ [\d.]+ undecided \d+%", line) for line in soft)
    assert " 0:00:00 left" in lines[-1]


def test_the_log_has_every_epoch(reported: tuple[Path, str]) -> None:
    log = [json.loads(line) for line in (reported[0] / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 2, 3, 4]
    widths = json.loads((reported[0] / "run.json").read_text())["widths"]
    for line in log:
        counts = torch.tensor(line["gates"])
        assert counts.sum(1).tolist() == [2 * total for *_, total in widths.values()]  # both particles' gates
    kept = [sum(counts) for *counts, _ in widths.values()]
    assert torch.tensor(log[-1]["gates"])[:, -1].tolist() == kept  # discrete: open gates are what was kept


def test_tensorboard_has_curves_and_histograms(reported: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(reported[0] / "tensorboard" / "pruned"))
    board.Reload()
    log = [json.loads(line) for line in (reported[0] / "log.jsonl").read_text().splitlines()]
    for i in range(2):
        curve = board.Scalars(f"loss/particle {i + 1}")
        assert [point.step for point in curve] == [1, 2, 3, 4]
        assert [point.value for point in curve] == pytest.approx([line["loss"][i] for line in log], rel=1e-6)
    assert [p.value for p in board.Scalars("temperature")] == pytest.approx([line["temperature"] for line in log])
    assert {"gates", "weights/conv1.weight"} <= set(board.Tags()["histograms"])


def test_without_tensorboard_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main([*RUN, "--out", str(tmp_path / "run"), "--tensorboard"]) == 2
    one_line(capsys, "pip install 'dllp[tensorboard]'")
    assert not list(tmp_path.iterdir())


def test_the_first_epoch_does_not_rule_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress.Lines()
    lines.begin("a", 10, None)
    for epoch, seconds in enumerate((100.0, 10.0, 10.0, 10.0), 1):
        lines.epoch(record(epoch, seconds))
    shown = capsys.readouterr().out.splitlines()
    assert "0:15:00 left" in shown[0] and "cost" not in shown[0]
    assert "0:02:08 left" in shown[3]  # a weighted mean of 21.25 s, six epochs to go


def test_fine_tuning_has_its_own_number_of_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress.Lines()
    lines.begin("slimming", 3, None)

    def train(verb: Any, stage: str, model: Any, data: Any, config: Config) -> Any:
        return verb(model, data, config, on_epoch=lines.epoch, on_step=lines.step)

    config = Config(keep_flops=0.5, epochs=3, batch_size=64, init="fresh")
    run.prune(METHODS["slimming"], small_cnn(), DIGITS.train.subset(range(128)), config, finetune_epochs=2, train=train)
    shown = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/3", "2/3", "3/3", "1/2", "2/2"]


def test_lines_with_a_pause_leave_epochs_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of many short runs says nothing of their epochs, and one long run is never silent for much longer."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = progress.Lines(pause=60.0)
    for title, seconds in (("short", 5.0), ("long", 25.0)):
        lines.begin(title, 8, None)
        for epoch in range(1, 9):
            now += seconds
            lines.epoch(record(epoch, seconds))
    shown = [line.split(" steps/s")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[:3] for line in shown] == [["long", "epoch", f"{epoch}/8"] for epoch in (1, 4, 7)]


def test_names_of_folders_are_no_markup_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.status(quiet=False) as show:
        show("reading runs [/b]")
    assert "reading runs [/b]" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["40", "80"])
def test_numbers_are_whole_however_narrow_the_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    metrics = {"accuracy": 0.1235, "ece": 0.2346, "nll": 1.23456, "auroc": 0.5679, "fpr95": 0.6789}
    elsewhere = "folder/" * 12 + "end"
    rows = [Row("particle 1", place, metrics, 123e6, 45_678, 901_234) for place in (CLEAN, OOD + elsewhere)]
    noise = [Efficiency("clean", 0.08667, 0.00036, 0.00012, 0.9955, 0.9977, 2) for _ in range(2)]
    progress.show_evaluation(Evaluation(rows, efficiency=noise), "a run")
    lines = capsys.readouterr().out.splitlines()
    shown = [word for line in lines for word in line.split()]
    assert {"12.35%", "23.46%", "1.2346", "123", "45.7", "901", "56.79%", "67.89%", "0.08667", "99.8%"} <= set(shown)
    assert not any("…" in word for word in shown) and elsewhere in "".join(shown), "long names are folded, not cut"
    assert columns == "40" or max(len(line.rstrip()) for line in lines) <= 80
