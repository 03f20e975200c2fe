"""`dllp compare`: one table of several methods and seeds, resumed, spread over processes, failures and mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dllp.baselines.magnitude import L1Filters
from dllp.baselines.protocol import Scene
from dllp.cli import compare, prune
from dllp.cli.main import main
from dllp.deploy import speed
from dllp.errors import StructureError
from dllp.runs.tensors import read_tensors
from tests.support.commands import ENVIRONMENT, npy, once, one_line, plots, settle
from tests.support.interrupted import signalled, stop_at

pytest.importorskip("plotly", reason="needs plotly: pip install -e '.[report]'")
pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[onnx]'")

METHODS = ("dllp", "l1-filters", "fpgm")
SHORT = ("--model", "mlp", "--epochs", "2", "--dense-epochs", "1", "--batch-size", "256", "--keep-flops", "0.5",
         "--device", "cpu", "--threads", "1")  # fmt: skip
RUNS = [f"{method}-seed-{seed}" for method in ("dense", *(f"{m}-flops-0.5" for m in METHODS)) for seed in (0, 1)]


def command(out: Path, *words: str, methods: tuple[str, ...] = METHODS, seeds: int = 2) -> list[str]:
    return ["compare", *SHORT, "--methods", *methods, "--seeds", str(seeds), "--out", str(out), *words]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison; nobody may change it."""
    return once(tmp_path_factory, "compared", lambda p: print(main(command(p / "out", "--quiet")))) / "out"


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are not what the test is about, and an export of every network takes seconds."""

    def instant(found: list[speed.Subject], shape: tuple[int, ...]) -> list[speed.Row]:
        sample = [(1e-3, 1e-3)] * 3
        rows = [speed._row(s, speed.ONNX, sample, 1, None, device="cpu", threads=1, batch=1) for s in found]
        return speed.compared(rows)

    monkeypatch.setattr(speed, "measure_onnx", instant)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def row_of(folder: Path, name: str = "particle 1") -> dict[str, Any]:
    return next(row for row in read(folder / "evaluation.json")["rows"] if row["name"] == name)


def networks(out: Path) -> dict[str, bytes]:
    """The networks of all runs."""
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in sorted(out.glob("*/particle-*"))}


# ---- the table and the page


def test_means_and_deviations_are_those_of_the_runs(whole: Path) -> None:
    found = read(whole / "compare.json")
    assert sorted(path.name for path in whole.iterdir() if path.is_dir()) == sorted(RUNS)
    assert [row["row"] for row in found["rows"]] == ["dense", *(f"{method}, 50% of FLOPs" for method in METHODS)]
    for row, name in zip(found["rows"], RUNS[::2], strict=True):
        folders = [whole / f"{name[:-1]}{seed}" for seed in (0, 1)]
        accuracy = np.array([row_of(folder)["metrics"]["accuracy"] for folder in folders])
        assert row["accuracy"] == pytest.approx({"mean": accuracy.mean(), "std": accuracy.std(ddof=1)})
        stored = [read(folder / "run.json") for folder in folders]
        removed = [1 - run["sizes"][0]["macs"] / run["dense"]["macs"] for run in stored]
        assert row["flops_removed"]["mean"] == pytest.approx(np.mean(removed))
        assert (np.mean(removed) >= 0.5) == (row["row"] != "dense") and row["seeds"] == 2 and not row["failed"]
        seconds = [sum(record["seconds"] for record in run["history"]) for run in stored]
        assert row["seconds"]["mean"] == pytest.approx(np.mean(seconds))
        if row["row"] == "dense":
            continue
        dense = np.array([row_of(whole / f"dense-seed-{seed}")["metrics"]["accuracy"] for seed in (0, 1)])
        drops = dense - accuracy
        assert row["drop"] == pytest.approx({"mean": drops.mean(), "std": drops.std(ddof=1)})
        ms = [1e3 * read(folder / "speed.json")["rows"][1]["cpu"] for folder in folders]
        assert row["ms"]["mean"] == pytest.approx(np.mean(ms)) and row["speedup"]["mean"] > 0
        line = next(line for line in (whole / "compare.md").read_text().splitlines() if row["row"] in line)
        assert f"| {100 * accuracy.mean():.2f} ± {100 * accuracy.std(ddof=1):.2f} |" in line


def test_all_start_from_one_dense_network_and_have_as_many_epochs(whole: Path) -> None:
    for name in RUNS[2:]:
        dense = read_tensors(whole / f"dense-seed-{name[-1]}" / "particle-0.safetensors")
        start = read_tensors(whole / name / "dense.safetensors")
        assert dense.keys() == start.keys() and all(torch.equal(dense[key], start[key]) for key in dense), name
        assert len(read(whole / name / "run.json")["history"]) == 2, name
    assert row_of(whole / RUNS[2], "dense")["metrics"] == row_of(whole / RUNS[4], "dense")["metrics"]


def test_the_page_shows_every_run(whole: Path) -> None:
    page = (whole / "report.html").read_text(encoding="utf-8")
    assert all(page.count(name) for name in RUNS) and all(f"{method}, 50% of FLOPs" in page for method in METHODS)
    drawn = plots(page)
    for plot, networks in (("pareto", ("dense", "particle 1")), ("times", ("particle 1",))):
        traces = {trace["name"]: trace for trace in drawn[plot]["data"]}
        for method in METHODS:
            trace = traces[f"{method}, 50% of FLOPs"]
            for seed in (0, 1):
                wanted = [f"{method}-flops-0.5-seed-{seed}, {network}" for network in networks]
                assert set(wanted) <= set(trace["text"]), trace["text"]
            assert len(trace["x"]) == len(trace["y"]) == 4


def test_commands_read_a_run_of_it(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(whole / "dense-seed-1")]) == 0
    assert f"{row_of(whole / 'dense-seed-1')['metrics']['accuracy']:.2%}" in capsys.readouterr().out


# ---- called again


def test_finished_runs_are_not_repeated(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untimed: None
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "moved"))
    before = networks(out)
    begun: list[str] = []
    real = prune.run
    monkeypatch.setattr(prune, "run", lambda args: (begun.append(Path(args.out).name), real(args)))
    assert main(command(out)) == 0
    assert begun == [] and networks(out) == before
    shown = capsys.readouterr().out
    assert (out / "compare.md").read_text() in shown and "next: dllp export" in shown
    assert main(command(out, "--keep-params", "0.4", methods=("l1-filters",), seeds=1)) == 0
    assert begun == ["l1-filters-parameters-0.4-seed-0"]
    rows = [row["row"] for row in read(out / "compare.json")["rows"]]
    assert rows == ["dense", "l1-filters, 50% of FLOPs", "l1-filters, 40% of parameters"]
    capsys.readouterr()
    assert main(command(out, "--epochs", "4")) == 2
    one_line(capsys, "dllp-flops-0.5-seed-0: epochs = 4 contradicts the run, which has 2", "or give another --out")


def test_a_run_that_was_stopped_goes_on_to_the_same_networks(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untimed: None
) -> None:
    out, words = tmp_path / "out", {"methods": ("dllp",), "seeds": 1}
    with monkeypatch.context() as patch:
        stop_at(patch, 8, signalled(signal.SIGTERM))  # in its second epoch
        assert main(command(out, "--quiet", **words)) == 143
    one_line(capsys, "interrupted, finished jobs are kept, the same command goes on")
    assert (out / "dense-seed-0/run.json").exists() and not (out / "dllp-flops-0.5-seed-0/run.json").exists()
    assert list((out / "dllp-flops-0.5-seed-0/checkpoints/pruned").iterdir()) and not list(out.glob("*.md"))
    assert main(command(out, **words)) == 0
    assert "pruned: going on after step 8 of 10" in capsys.readouterr().out
    assert networks(out).items() <= networks(whole).items()


def test_a_killed_comparison_goes_on_to_the_same_networks(whole: Path, tmp_path: Path, untimed: None) -> None:
    out, words = tmp_path / "out", {"methods": ("l1-filters",), "seeds": 1}
    code = "import sys; from tests.support import faulty; from dllp.cli.main import main; faulty.install('kill', 8)"
    line = [sys.executable, "-c", f"{code}; sys.exit(main(sys.argv[1:]))", *command(out, **words)]
    died = subprocess.run(line, env=ENVIRONMENT, cwd=ENVIRONMENT["PYTHONPATH"], capture_output=True, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert [path.parent.name for path in out.glob("*/run.json")] == ["dense-seed-0"], "and fine-tuning was begun"
    assert main(command(out, "--quiet", **words)) == 0
    assert networks(out).items() <= networks(whole).items()


# ---- failures


def test_a_run_that_fails_does_not_take_the_others_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untimed: None
) -> None:
    out, name = tmp_path / "out", "l1-filters-flops-0.5-seed-1"
    real = L1Filters.scores

    def scores(self: L1Filters, scene: Scene) -> torch.Tensor:
        if scene.config.seed == 1:
            raise StructureError("it will | not do")
        return real(self, scene)

    words: dict[str, Any] = {"methods": ("l1-filters", "random")}
    with monkeypatch.context() as patch:
        patch.setattr(L1Filters, "scores", scores)
        assert main(command(out, "--quiet", **words)) == 2
    one_line(capsys, f"error: {name}: it will | not do")
    assert "1 (seed 1 failed: it will / not do) |" in (out / "compare.md").read_text()
    found = read(out / "compare.json")
    assert [row["seeds"] for row in found["rows"]] == [2, 1, 2] and found["rows"][1]["accuracy"]["std"] is None
    assert {run["folder"]: run["error"] for run in found["runs"] if "error" in run} == {name: "it will | not do"}
    assert "it will" in (out / "report.html").read_text() and len(list(out.glob("*/run.json"))) == 5
    assert main(command(out, "--quiet", **words)) == 0, "the cause is gone"
    assert not read(out / "compare.json")["rows"][1]["failed"]


def test_without_its_dense_network_a_seed_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untimed: None
) -> None:
    real = prune.run

    def run(args: Any) -> None:
        if args.out.endswith("dense-seed-0"):
            raise StructureError("no")
        real(args)

    monkeypatch.setattr(prune, "run", run)
    out = tmp_path / "out"
    assert main(command(out, "--quiet", methods=("l1-filters",))) == 2
    one_line(capsys, "dense-seed-0: no (1 more failed)")
    rows = {row["row"]: row for row in read(out / "compare.json")["rows"]}
    assert rows["dense"]["failed"] == {"0": "no"}
    assert rows["l1-filters, 50% of FLOPs"]["failed"] == {"0": "the dense network to start from is missing"}
    assert rows["l1-filters, 50% of FLOPs"]["seeds"] == 1


@pytest.mark.parametrize(("words", "text"), [
    (["--methods", "dllp", "nothing"], "there is no method 'nothing'"),
    (["--methods", "dllp", "dllp"], "each method and budget once"),
    (["--methods", "sfp:begin=x"], "begin = 'x': a number is needed"),
    (["--methods", "dense"], "dense"),
    (["--keep-flops", "0.00001"], "cannot be reached"),
    (["--keep-flops", "1.5"], "keep_flops = 1.5"),
    (["--granularity", "weight"], "method l1-filters has granularity = channel"),
    (["--seeds", "0"], "seeds = 0"),
    (["--jobs", "0"], "jobs = 0: at least 1"),
    (["--cpus", "2"], "--cpus needs --launcher ray"),
    (["--data", "nowhere"], "nowhere"),
    (["--model", "package:net", "--data", "package:data"], "no test set to compare on"),
    (["--init", "nowhere.safetensors"], "nowhere.safetensors is no file"),
    (["--device", "cuda:99"], "cuda:99"),
])  # fmt: skip
def test_mistakes_are_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main([*command(tmp_path / "out", methods=("dllp", "l1-filters")), *words]) == 2
    one_line(capsys, text)
    assert not (tmp_path / "out").exists()


def test_a_network_or_folder_that_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nets = settle(tmp_path, monkeypatch)
    assert main([*command(tmp_path / "out"), "--model", f"{nets}:linear"]) == 2
    one_line(capsys, "no channels that can be pruned")
    assert main([*command(tmp_path / "out", methods=("sfp",)), "--model", f"{nets}:broken"]) == 2
    one_line(capsys, "cannot be made (ValueError: first line)")
    assert not (tmp_path / "out").exists()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").touch()
    assert main(command(tmp_path / "letters")) == 2
    one_line(capsys, "letters holds other files")
    assert main(command(tmp_path / "letters" / "mine.txt")) == 2
    one_line(capsys, "mine.txt is a file")
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["mine.txt"]


# ---- starts and kinds of data


def test_a_network_that_has_learned_serves_as_it_is(tmp_path: Path, untimed: None) -> None:
    out, given = tmp_path / "out", tmp_path / "given"
    assert main(["prune", "--method", "dense", "--model", "mlp", "--epochs", "3", "--quiet", "--out", str(given)]) == 0
    weights = given / "particle-0.safetensors"
    words = ["--model", "mlp", "--init", str(weights), "--methods", "dllp", "fpgm", "--epochs", "2", "--seeds", "1"]
    assert main(["compare", *words, "--keep-flops", "0.5", "--quiet", "--out", str(out)]) == 0
    dense = read(out / "dense-seed-0" / "run.json")
    assert dense["history"] == [] and dense["config"]["epochs"] == 0
    before, after = read_tensors(weights), read_tensors(out / "dense-seed-0" / "particle-0.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert row_of(out / "dense-seed-0")["metrics"] == row_of(given)["metrics"]
    for name in ("dllp", "fpgm"):
        assert read(out / f"{name}-flops-0.5-seed-0" / "run.json")["config"]["teacher"] == "given"


def test_a_regression_of_your_own_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untimed: None
) -> None:
    nets = settle(tmp_path, monkeypatch)
    x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    data = npy(tmp_path / "data", x, x @ np.ones((4, 7), np.float32))
    words = ["--data", str(data), "--model", f"{nets}:wide", "--keep-flops", "0.5", "--epochs", "2", "--lr", "0.01"]
    words += ["--dense-epochs", "2", "--seeds", "2", "--methods", "dllp", "l1-filters", "--validation", "0.25"]
    assert main(["compare", *words, "--out", "out"]) == 0
    found = read(tmp_path / "out" / "compare.json")
    dense, *pruned = found["rows"]
    assert found["split"] == "validation" and "choice on the test set" not in capsys.readouterr().out
    for row in pruned:
        assert row["drop"]["mean"] == pytest.approx(row["rmse"]["mean"] - dense["rmse"]["mean"])
    runs = {name: read(tmp_path / "out" / f"{name}-seed-0" / "run.json")["config"] for name in (
        "dense", "dllp-flops-0.5", "l1-filters-flops-0.5")}  # fmt: skip
    assert [config["lr"] for config in runs.values()] == [0.01, 0.0025, 0.01], "and a quarter of it to fine-tune"


# ---- several at once


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_workers_make_the_same_networks(
    whole: Path, tmp_path: Path, launcher: str, capsys: pytest.CaptureFixture[str], untimed: None
) -> None:
    words = {"local": ["--jobs", "2"], "ray": ["--launcher", "ray", "--address", "local", "--jobs", "2"]}[launcher]
    if launcher == "ray":
        pytest.importorskip("ray", reason="needs Ray: pip install -e '.[dev]'")
    out = tmp_path / "out"
    assert main([*command(out), *words]) == 0
    assert networks(out) == networks(whole)
    assert set(re.findall(r"^([\w.-]+): accuracy", capsys.readouterr().out, re.MULTILINE)) == set(RUNS)


@pytest.mark.slow
def test_workers_that_end_leave_runs_that_go_on(whole: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "out" / "dense-seed-0"
    line = [sys.executable, "-m", "dllp", *command(out, "--jobs", "2"), "--dense-epochs", "3000"]
    with subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(folder.glob("checkpoints/dense/*.safetensors")):
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 143, error
    assert error == "dllp: interrupted, finished jobs are kept, the same command goes on\n"
    assert not compare.RunFolder(folder).finished and compare.RunFolder(folder).unfinished
