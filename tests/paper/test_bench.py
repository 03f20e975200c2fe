"""A tiny table, end to end: finished jobs, kills, shards and mistakes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dllp.cli.main import main
from dllp.errors import StructureError
from dllp.evaluation import metrics
from paper import tables
from paper.jobs import Job, Runner
from paper.provenance import source
from paper.store import Store
from paper.tables import Quoted, Row, Table
from tests.support.commands import ENVIRONMENT, UNTRACED, one_line

# ---- a tiny table, end to end

NETWORK, KEEP = "small_cnn", 0.5


def tiny(data: Path) -> Table:
    """Every kind of job, one epoch on 64 images."""
    dense, channel = Job(NETWORK, "dense", epochs=1), Job(NETWORK, "dllp", keep=KEEP, epochs=1)
    rows = (
        Row("dense", dense, (0, 1), (("acc", 101.0),), predictions="kept"),
        Row("dllp-channel", channel, (0, 1), predictions="kept"),
        Row(
            "dllp-weight",
            replace(channel, granularity="weight", changes={"keep_flops": None, "keep_params": 0.3}),
            (0,),
        ),
        *(Row(method, replace(channel, method=method), (0,)) for method in ("thin", "magnitude", "random")),
    )
    return Table("tiny", "Tiny", rows, (Quoted("DLLP", NETWORK, 90, 50, 0.5),), data=str(data))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 64), ("test", 40)):
        np.save(folder / f"{part}_x.npy", random.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8))
        np.save(folder / f"{part}_y.npy", np.arange(count) % 10)
    return folder


@pytest.fixture
def table(data: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    made = tiny(data)
    monkeypatch.setitem(tables.TABLES, "tiny", made)
    return made


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tables.TABLES, "tiny", tiny(data))
        assert main(["bench", "tiny", "--out", str(out), "--device", "cpu", "--quiet"]) == 0
    return out


def test_every_job_has_its_line_and_its_files(results: Path, table: Table) -> None:
    store = Store(results / "tiny")
    lines = {(found["row"], found["seed"]): found for found in store.lines()}
    assert set(lines) == {(row.name, seed) for row in table.rows for seed in row.seeds}
    for (name, _), found in lines.items():
        count = 2 if name.startswith("dllp") else 1
        assert len(found["particles"]) == len(found["macs"]) == len(found["flops_removed"]) == count
        assert found["command"] == f"dllp bench tiny --out {results.name} --device cpu --quiet"
        assert found["processes"] == 1 and found["deterministic"] is True and found["threads"] == 1
        assert {name: found[name] for name in ("commit", "dirty")} == source()
        assert found["config"]["precision"] == "float32" and found["evaluated_on"] == "test"
        if name not in ("dense", "dllp-weight"):
            assert min(found["flops_removed"]) >= 1 - KEEP, name
        if name != "dense":
            assert all(0 <= kept <= total for *each, total in found["widths"].values() for kept in each), name
            assert any(kept < total for *each, total in found["widths"].values() for kept in each), name
    weight, thin = lines["dllp-weight", 0], lines["thin", 0]
    assert max(weight["params"]) <= 0.3 * weight["dense_params"] and weight["flops_of"] == "its non-zero weights"
    assert thin["dense_macs"] == lines["dense", 0]["macs"][0] > thin["macs"][0]
    assert lines["magnitude", 0]["train_seconds"] == lines["dense", 0]["train_seconds"], "cut from the dense network"
    kept = {path.stem for path in (results / "tiny" / "probabilities").iterdir()}
    assert kept == {found["digest"] for (name, _), found in lines.items() if name in ("dense", "dllp-channel")}
    for digest in kept:
        versions, labels = store.probabilities(digest)
        corrupted = {"clean", *(f"gaussian-blur:{r}" for r in (1, 2, 3, 5)), "sharpen"}
        assert set(versions) == corrupted | {"ood:noise", "ood:digits"} and versions["ood:digits"].shape[1] == 360
        assert (labels == np.arange(40) % 10).all()
        found = next(found for found in lines.values() if found["digest"] == digest)
        for p, figures in zip(versions["clean"], found["particles"], strict=True):
            assert metrics.accuracy(torch.from_numpy(p), torch.from_numpy(labels)) == figures["accuracy"]


def test_the_summary_is_that_of_the_lines(results: Path, table: Table) -> None:
    made = json.loads((results / "tiny" / "summary.json").read_text())
    assert [row["name"] for row in made["rows"]] == [row.name for row in table.rows]
    channel = made["rows"][1]
    lines = [found for found in Store(results / "tiny").lines() if found["row"] == "dllp-channel"]
    values = [100 * particle["accuracy"] for found in lines for particle in found["particles"]]
    assert len(values) == 4 and channel["acc_mean"] == pytest.approx(np.mean(values))
    assert channel["acc_std"] == pytest.approx(np.std(values, ddof=1))
    assert made["rows"][0]["wanted"][0]["verdict"] == "missed"
    assert "quoted from the paper" in (results / "tiny" / "table.md").read_text()


def test_finished_jobs_are_never_run_again(
    results: Path, table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Runner, "run", lambda self, job: pytest.fail("run again"))
    before = (results / "tiny" / "runs.jsonl").read_bytes()
    text = (results / "tiny" / "table.md").read_text()
    assert main(["bench", "tiny", "--out", str(results)]) == 0
    assert (results / "tiny" / "runs.jsonl").read_bytes() == before
    assert capsys.readouterr().out == f"{text}\nresults: {results / 'tiny'}\n"
    assert main(["bench", "tiny", "--out", str(results), "--list", "--seeds", "0", "5"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 13 and listed[-1] == "6 of 12 jobs are finished"
    assert sum(entry.startswith("done") for entry in listed) == 6


def test_finished_jobs_run_again_for_a_reason(
    results: Path, table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    store = Store(tmp_path / "tiny")
    before, first = store.runs.read_bytes(), {found["digest"]: found for found in store.lines()}
    words = ["bench", "tiny", "--out", str(tmp_path), "--device", "cpu", "--rows", "thin", "--quiet"]
    assert main([*words, "--again", "its layers were rounded", "--set", "lr=x"]) == 2
    assert main([*words, "--again", "its layers were rounded", "--summary-only"]) == 0
    assert store.runs.read_bytes() == before, "nothing is marked that does not run"
    assert main([*words, "--again", "its layers were rounded"]) == 0
    content = store.runs.read_bytes()
    assert content.startswith(before)
    mark, again = map(json.loads, content[len(before) :].splitlines())
    assert (mark["superseded"], mark["why"]) == (again["digest"], "its layers were rounded")
    assert {"commit", "dirty", "command", "python", "torch", "dllp"} <= mark.keys()
    assert "--again 'its layers were rounded'" in again["command"]
    latest = {found["digest"]: found for found in store.lines()}
    assert latest.keys() == first.keys() and latest[again["digest"]] == again
    assert again["particles"] == first[again["digest"]]["particles"], "deterministic, and the same code"


def test_runs_that_depart_never_enter_the_table(
    results: Path, table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "tiny", "--out", str(tmp_path), "--device", "cpu", "--rows", "dense", "--seeds", "0"]
    assert main([*words, "--validation", "20"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("dense seed 0: accuracy ") and "evaluated on the validation set" in shown
    assert "missed" not in shown, "targets are for the table alone"
    folder = tmp_path / "tiny-validation20"
    (found,) = Store(folder).lines()
    assert found["evaluated_on"] == "validation" and not (folder / "probabilities").exists()
    assert main([*words, "--epochs", "2", "--quiet"]) == 0
    assert main([*words, "--set", "lr=0.07", "--quiet"]) == 0
    (other,) = Store(tmp_path / "tiny-lr-0.07").lines()
    assert other["config"]["lr"] == 0.07
    made = json.loads((tmp_path / "tiny-lr-0.07" / "summary.json").read_text())
    assert made["command"].endswith("--set lr=0.07") and made["rows"][0]["wanted"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-epochs2", "tiny-lr-0.07", "tiny-validation20"]
    capsys.readouterr()
    assert main(["bench", "tiny", "--out", str(tmp_path), "--summary-only", "--quiet"]) == 2
    one_line(capsys, "tiny has no finished job to sum up")
    assert not (tmp_path / "tiny").exists(), "nothing is finished, nothing is written"


@pytest.mark.parametrize("error", [StructureError("it will not do"), KeyError("a fault in the code")])
def test_a_job_that_fails_does_not_stop_the_others(
    error: Exception, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Runner.run

    def partly(self: Runner, job: Job) -> Any:
        if job.method == "dense":
            raise error
        return real(self, job)

    monkeypatch.setattr(Runner, "run", partly)
    words = ["--rows", "dense", "thin", "--out", str(tmp_path), "--device", "cpu", "--quiet"]
    assert main(["bench", "tiny", *words]) == 2
    told = capsys.readouterr().err
    assert "dense seed 0: " in told.splitlines()[-1] and str(error) in told and "1 more failed" in told
    assert ("Traceback" in told) == isinstance(error, KeyError), "whoever mends the code needs the place"
    assert [row["name"] for row in json.loads((tmp_path / "tiny" / "summary.json").read_text())["rows"]] == ["thin"]


def test_shards_fill_one_folder(table: Table, tmp_path: Path) -> None:
    words = ["bench", "tiny", "--out", str(tmp_path), "--device", "cpu", "--rows", "dense", "magnitude", "--quiet"]
    store = Store(tmp_path / "tiny")
    assert main([*words, "--shard", "1/2"]) == 0
    first = {(found["row"], found["seed"]) for found in store.lines()}
    assert first == {("dense", 0), ("magnitude", 0)}
    assert main([*words, "--shard", "2/2"]) == 0
    lines = store.lines()
    assert {(found["row"], found["seed"]) for found in lines} - first == {("dense", 1)}
    assert all(found["processes"] == 2 for found in lines)
    assert "2 processes shared the device" in (tmp_path / "tiny" / "table.md").read_text()


def start(data: Path, out: Path) -> subprocess.Popen[str]:
    script = f"""
import sys
from pathlib import Path
from paper import tables
from dllp.cli.main import main
from tests.paper.test_bench import tiny
tables.TABLES["tiny"] = tiny(Path({str(data)!r}))
sys.exit(main(["bench", "tiny", "--out", {str(out)!r}, "--device", "cpu"]))
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", script], env=UNTRACED, **pipes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_table_goes_on(how: signal.Signals, data: Path, table: Table, results: Path, tmp_path: Path) -> None:
    with start(data, tmp_path) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(how)
        try:
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    store = Store(tmp_path / "tiny")
    before, whole = store.runs.read_bytes(), len(store.lines())
    assert first.startswith("dense seed 0: accuracy") and 1 <= whole < 8, error
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert error == "dllp: interrupted, finished jobs are kept, the same command goes on\n"
        assert (tmp_path / "tiny" / "table.md").exists()
    else:
        with store.runs.open("ab") as file:
            file.write(before[: len(before) // 2].replace(b"\n", b" "))
    assert main(["bench", "tiny", "--out", str(tmp_path), "--device", "cpu", "--quiet"]) == 0
    assert store.runs.read_bytes().startswith(before)
    again = {found["digest"]: found for found in store.lines()}
    once = {found["digest"]: found for found in Store(results / "tiny").lines()}
    assert again.keys() == once.keys()
    for digest, found in again.items():
        assert found["particles"] == once[digest]["particles"], "interrupting changes no figure"


def test_mistakes_are_one_line(table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[list[str], str]] = [
        (["table9"], "no table 'table9': choose from table1, table2"),
        (["tiny", "--rows", "nothing"], "no row 'nothing'"),
        (["tiny", "--shard", "0/2"], "shard = '0/2'"),
        (["tiny", "--shard", "3/2"], "for example 1/2"),
        (["tiny", "--shard", "half"], "shard = 'half'"),
        (["tiny", "--epochs", "0"], "epochs = 0"),
        (["tiny", "--validation", "-3"], "validation = -3"),
        (["tiny", "--validation", "64"], "leaves nothing on one side"),
        (["figure4", "--validation", "10"], "figure4 is about predictions on the test set: leave out --validation"),
        (["tiny", "--set", "lr"], "'lr' sets nothing: give NAME=VALUE"),
        (["tiny", "--set", "lr=fast"], "lr = 'fast': a number is needed"),
        (["tiny", "--set", "slab_bounds=3"], "slab_bounds = 3: two numbers"),
        (["tiny", "--set", "seed=3"], "seed is no setting of rows: give --seeds"),
        (["table1", "--set", "epochs=3"], "epochs is no setting of rows: give --epochs"),
        (["table1", "--set", "granularity=weight"], "these rows of table1 have no setting 'granularity'"),
        (["table1", "--rows", "tuned-fpgm*", "--set", "strength=1"], "these rows of table1 have no setting 'strength'"),
        (["table1", "--rows", "dllp-*", "--set", "least=0.2"], "these rows of table1 have no setting 'least'"),
        (["table1", "--rows", "tuned-*", "--set", "particles=4"], "these rows of table1 have no setting 'particles'"),
        (["table1", "--rows", "tuned-*", "--set", "prior=laplace"], "these rows of table1 have no setting 'prior'"),
        (["table1", "--set", "network=resnet21"], "did you mean resnet20"),
        (["table1", "--set", "finetune_lr=often"], "lr = 'often'"),
        (["table1", "--rows", "tuned-sss-55", "--set", "strength=x"], "strength = 'x': a number is needed"),
        (["tiny", "--seeds", "0", "one"], "seeds = one: expected a whole number"),
        (["tiny", "--precision", "int8"], "expected float32, bfloat16"),
        (["tiny", "--sharp", "1/2"], "did you mean --shard?"),
        (["table1", "--data-root", str(tmp_path / "nowhere")], "nowhere is no folder"),
        ([], "required: NAME; see dllp bench --help"),
    ]
    for words, text in cases:
        assert main(["bench", *words, "--out", str(tmp_path / "out")]) == 2, words
        one_line(capsys, text)
    assert not (tmp_path / "out").exists()


def test_a_terminal_without_a_sign_shows_another(results: Path, data: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from paper import tables
from dllp.cli.main import main
from tests.paper.test_bench import tiny
tables.TABLES["tiny"] = tiny(Path({str(data)!r}))
sys.exit(main(["bench", "tiny", "--out", {str(results)!r}, "--summary-only"]))
"""
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "accuracy: mean ? standard deviation" in done.stdout.lower()


def test_tables_need_no_packages_of_the_command_line() -> None:
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in ("rich", "yaml"))
    script = f"import sys; {hidden}; from paper.__main__ import main; main(['figure4', '--list'])"
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "of 3 jobs are finished" in done.stdout


def test_a_wheel_without_the_tables_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "paper", None)
    monkeypatch.delitem(sys.modules, "paper.__main__", raising=False)
    for words in (["table1"], ["--help"]):
        assert main(["bench", *words]) == 2
        one_line(capsys, "in the source repository of dllp and not in its wheel")
