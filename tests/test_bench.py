"""Tables: jobs and their names, the results folder, the summary by hand, and a tiny table end to end."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dllp import metrics
from dllp.baselines import METHODS
from dllp.bench import jobs, run, summary, tables
from dllp.bench.jobs import Job, Runner
from dllp.bench.store import LABELS, Store, shortened
from dllp.bench.tables import Quoted, Row, Table, Variant
from dllp.cli import main
from dllp.errors import ArtifactError, ConfigError, StructureError
from tests.commands import ENVIRONMENT, one_line

# ---- jobs


def test_a_digest_names_what_is_computed() -> None:
    job = Job("resnet20", "dllp", keep=0.45)
    others = [
        replace(job, network="resnet56"), replace(job, method="thin"), replace(job, granularity="weight"),
        replace(job, keep=0.44), replace(job, seed=1), replace(job, epochs=59), replace(job, validation=5000),
        replace(job, changes={"beta": 0.2}),
    ]  # fmt: skip
    assert len({job.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert job.digest == Job("resnet20", "dllp", keep=0.45).digest and len(job.digest) == 16
    assert replace(job, changes={"beta": job.config.beta}).digest == job.digest, "a change that changes nothing"
    assert replace(job, changes={"precision": "bfloat16", "device": "cpu"}).digest == job.digest, "not what, but how"
    two = {"beta": 0.2, "lr": 0.3}
    assert replace(job, changes=two).digest == replace(job, changes=dict(reversed(two.items()))).digest


def test_fields_added_later_leave_old_digests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("resnet20", "dllp", keep=0.45)
    old = replace(job, changes={"patience": 3}).digest
    monkeypatch.setattr(jobs, "LATER", jobs.LATER | {"patience": 0})
    new = job.digest
    monkeypatch.setattr(jobs, "LATER", jobs.LATER | {"average_from": -1.0})
    assert job.digest == new, "another value than the neutral one still counts"
    assert replace(job, changes={"patience": 3}).digest == old != new


def test_a_budget_of_weights_replaces_that_of_flops() -> None:
    row = tables.TABLES["table1"].chosen(["resnet20-dllp-weight"])[0]
    config = row.job.config
    assert (config.keep_flops, config.keep_params, config.granularity) == (None, 0.0988, "weight")


# ---- tables


def test_rows_are_those_of_the_issue() -> None:
    one, two = tables.TABLES["table1"], tables.TABLES["table2"]
    seeds = {row.name: len(row.seeds) for row in (*one.rows, *two.rows)}
    assert {name for name, count in seeds.items() if count == 5} == {
        "dense", "dllp-channel-55", "dllp-channel-74.65",
    }  # fmt: skip
    assert {count for name, count in seeds.items() if not name.startswith("tuned-")} == {3, 5}
    keeps = {row.name: row.job.keep for row in (*one.rows, *two.rows)}
    assert keeps["dllp-channel-55"] == keeps["thin-55"] == keeps["magnitude-55"] == keeps["dllp-weight-55"] == 0.45
    assert (keeps["dllp-channel-70"], keeps["dllp-weight-90"], keeps["dllp-channel-74.65"]) == (0.3, 0.1, 0.2535)
    assert (keeps["tuned-fpgm-53"], keeps["tuned-sss-55"], keeps["tuned-cp-50"]) == (0.47, 0.45, 0.5)
    assert {row.job.network for row in one.rows} == {"resnet56", "resnet20"}
    assert {row.job.network for row in two.rows} == {"vgg16_bn"}
    for table in (one, two):
        assert all(row.job.epochs == 60 and row.job.config.batch_size == 512 for row in table.rows)
        tuned = {row.job.baseline: row for row in table.rows if row.name.startswith("tuned-")}
        assert set(tuned) == set(METHODS) and {row.job.finetune for row in tuned.values()} == {30}
        kept = {row.name for row in table.rows if row.keep_probabilities}
        assert kept == {n for n in (r.name for r in table.rows) if n == "dense" or n.startswith("dllp-channel")}


def test_quoted_rows_are_the_papers() -> None:
    one, two = tables.TABLES["table1"].quoted, tables.TABLES["table2"].quoted
    assert (len(one), len(two)) == (9, 6)
    assert one[-1] == Quoted("DLLP", "resnet56", 92.80, 55, 0.04)
    assert two[-1] == Quoted("DLLP", "vgg16_bn", 92.80, 74.65, 1.24)
    assert {row.method: row.drop for row in one}["FPGM"] == 0.1 and {row.method: row.drop for row in two}["RNP"] == 0.85


@pytest.mark.parametrize("name", ["table1", "table2"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_share_the_jobs_and_keep_dense_networks_at_hand(name: str, count: int) -> None:
    table = tables.TABLES[name]
    whole = [planned.job.digest for planned in table.plan()]
    assert len(set(whole)) == len(whole) == sum(len(row.seeds) for row in table.rows)
    shards = [table.plan(shard=(i + 1, count)) for i in range(count)]
    assert sorted(planned.job.digest for shard in shards for planned in shard) == sorted(whole)
    for shard in shards:
        places = [whole.index(planned.job.digest) for planned in shard]
        assert places == sorted(places), "every share keeps the order"
        for i, planned in enumerate(shard):
            if planned.job.derived:
                before = [earlier.job.digest for earlier in shard[:i]]
                assert planned.job.dense.digest in before, "the network it starts from was trained before"
    trained = [sum(p.job.config.particles for p in shard if not p.job.derived) for shard in shards]
    work = [n + sum(p.job.finetune > 0 for p in shard) / 2 for n, shard in zip(trained, shards, strict=True)]
    assert max(work) - min(work) <= 3


def test_plans_follow_the_options() -> None:
    table = tables.TABLES["table1"]
    plan = table.plan(["dense", "dllp-*-55"], [4, 0, 4], Variant(epochs=2, validation=100))
    assert [(p.row.name, p.job.seed) for p in plan] == [
        (name, seed) for seed in (0, 4) for name in ("dense", "dllp-channel-55", "dllp-weight-55")
    ]
    assert all(p.job.epochs == 2 and p.job.validation == 100 for p in plan)
    assert run.folder_of(Path("r"), table, Variant()) == Path("r/table1")
    names = {run.folder_of(Path("r"), table, Variant(e, v)).name for e in (None, 2) for v in (0, 100)}
    assert len(names) == 4
    with pytest.raises(ConfigError, match="no row 'nothing'"):
        table.plan(["nothing"])
    with pytest.raises(ConfigError, match="epochs = 0"):
        Variant(epochs=0)
    with pytest.raises(ConfigError, match="validation = -1"):
        Variant(validation=-1)


# ---- the results folder


def line(digest: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"digest": digest, "seed": seed, **more}


def test_a_torn_last_line_is_ignored_and_repaired(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "table")
    assert store.lines() == [] and store.digests() == set()
    store.add(line("a"))
    store.add(line("b", figures=[1.5, float("nan"), {"x": float("inf")}]))
    whole = store.runs.read_bytes()
    for torn in (b'{"digest": "c", "se', b'{"digest"', b"\x00\x00\x00", b"7"):
        store.runs.write_bytes(whole + torn)
        assert store.digests() == {"a", "b"}
        store.add(line("c"))
        assert store.runs.read_bytes() == whole + b'{"digest":"c","seed":0}\n'
    assert store.lines()[1]["figures"] == [1.5, None, {"x": None}]


def test_a_whole_last_line_without_its_end_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.runs.write_bytes(b'{"digest": "a", "seed": 0}\n\n{"digest": "b", "seed": 1}')
    assert store.digests() == {"a", "b"}
    store.add(line("b", seed=7))
    store.add(line("c"))
    assert [(found["digest"], found["seed"]) for found in store.lines()] == [("a", 0), ("b", 1), ("c", 0)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.runs.write_bytes(b'{"digest": "a", "seed": 0}\n{"dig\n{"digest": "b", "seed": 1}\n')
    with pytest.raises(ArtifactError, match="line 2 is damaged"):
        store.lines()


def test_many_writers(tmp_path: Path) -> None:
    def write(number: int) -> None:
        Store(tmp_path).add(line(f"{number % 40}", text="x" * 5000))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(80)))
    found = Store(tmp_path).lines()
    assert len(found) == 40 == Store(tmp_path).runs.read_bytes().count(b"\n")


def predictions(strength: float) -> tuple[np.ndarray, np.ndarray]:
    """(2, B, C) probabilities of two networks that agree about as much as such pairs do, and labels."""
    labels = torch.arange(4000) % 10
    logits = 2.5 * torch.randn(4000, 10)
    logits[torch.arange(4000), labels] += strength + 5 * torch.randn(4000)
    return torch.stack([logits, logits + torch.randn(4000, 10)]).softmax(-1).numpy(), labels.numpy()


def test_stored_probabilities_give_the_same_metrics_at_half_the_size(tmp_path: Path) -> None:
    store, (clean, labels) = Store(tmp_path), predictions(12)
    blurred, _ = predictions(6)
    store.add(line("a"), {"clean": clean, "gaussian-blur:1": blurred, LABELS: labels})
    stored, found = store.probabilities("a")
    assert set(stored) == {"clean", "gaussian-blur:1"} and (found == labels).all()
    for name, exact in (("clean", clean), ("gaussian-blur:1", blurred)):
        assert np.allclose(stored[name].sum(-1), 1)
        for p, q in zip((*exact, exact.mean(0)), (*stored[name], stored[name].mean(0)), strict=True):
            a, b = (metrics.summary(torch.from_numpy(v), torch.from_numpy(labels)) for v in (p, q))
            assert abs(a["accuracy"] - b["accuracy"]) < 3 / len(labels), "but for ties"
            assert all(abs(a[key] - b[key]) < 2e-3 for key in ("nll", "ece", "aurc", "brier", "entropy")), (a, b)
    path = tmp_path / "probabilities" / "a.npz"
    with np.load(path) as arrays:
        assert arrays["clean"].dtype == np.float16
    assert path.stat().st_size < 0.5 * 2 * (clean.size + blurred.size)


def test_shortening_keeps_order_and_never_gives_zero() -> None:
    values = np.sort(np.concatenate([np.logspace(-40, 0, 3000), [0.0, 1.0]])).astype(np.float32)
    short = shortened(values).astype(np.float64)
    assert (np.diff(short) >= 0).all() and short[-1] == 1 and short[0] == 2.0**-22
    large = values >= 1 / 16
    assert np.abs(short[large] / values[large] - 1).max() <= 2**-11
    for low, high, error in ((1 / 256, 1 / 16, 1 / 8), (2.0**-21, 1 / 256, 1 / 4)):
        part = (values >= low) & (values < high)
        assert np.abs(short[part] / values[part] - 1).max() <= error


def test_probabilities_that_are_missing_or_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ArtifactError, match="is missing"):
        store.probabilities("a")
    store.add(line("a"), {"clean": np.full((1, 4, 2), 0.5), LABELS: np.zeros(4)})
    path = tmp_path / "probabilities" / "a.npz"
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content[:60] + b"xxxx" + content[64:]):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match="is damaged"):
            store.probabilities("a")


# ---- the summary, by hand


def finished(job: Job, particles: list[float], ensemble: float, seconds: float, removed: float) -> dict[str, Any]:
    def figures(accuracy: float) -> dict[str, float]:
        return {"accuracy": accuracy, "nll": 1 - accuracy, "ece": accuracy / 10}

    return {
        "digest": job.digest, "seed": job.seed, "epochs": job.epochs, "particles": [figures(p) for p in particles],
        "ensemble": figures(ensemble), "flops_removed": [removed] * len(particles), "params": [30] * len(particles),
        "dense_params": 100, "flops_of": "the extracted network", "train_seconds": seconds, "hardware": "abacus",
        "config": {"precision": "float32"}, "dllp": "1", "torch": "2", "python": "3",
        "date": f"2030-01-0{job.seed + 1}",
    }  # fmt: skip


def by_hand(**wanted: float) -> tuple[Table, list[dict[str, Any]]]:
    dense, pruned = Job("small_cnn", "dense"), Job("small_cnn", "dllp", keep=0.45)
    rows = (Row("dense", dense, (0, 1)), Row("dllp-55", pruned, (0, 1), tuple(wanted.items())))
    lines = [
        finished(dense, [0.90], 0.90, 10, 0),
        finished(replace(dense, seed=1), [0.92], 0.92, 20, 0),
        finished(pruned, [0.89, 0.91], 0.93, 30, 0.55),
        finished(replace(pruned, seed=1), [0.85, 0.87], 0.95, 50, 0.57),
        finished(replace(pruned, epochs=2), [0.1, 0.1], 0.1, 1, 0.99),  # another job: in no row
    ]
    quoted = (Quoted("DLLP", "small_cnn", 92.8, 55, 0.04),)
    return Table("hand", "By hand", rows, quoted), lines


def test_summary_by_hand() -> None:
    table, lines = by_hand()
    made = summary.summarise(table, lines, Variant())
    dense, pruned = made["rows"]
    expected = {
        "method": "dllp", "granularity": "channel", "network": "small_cnn", "seeds": [0, 1], "epochs": 60,
        "dense_acc_mean": 91, "acc_mean": 88, "acc_std": np.std([89, 91, 85, 87], ddof=1), "drop_mean": 3,
        "drop_se": np.sqrt(1 + 4), "flops_removed_mean": 56, "ensemble_acc_mean": 94, "nll_mean": 0.12,
        "ensemble_nll_mean": 0.06, "ece_mean": 8.8, "ensemble_ece_mean": 9.4, "train_seconds_mean": 40,
        "params_kept_mean": 30, "ensemble_gain_mean": 3, "flops_of": "the extracted network",
    }  # fmt: skip
    for name, value in expected.items():
        assert pruned[name] == (pytest.approx(value) if isinstance(value, (int, float)) else value), name
    assert (dense["drop_mean"], dense["acc_mean"], dense["granularity"]) == (0, 91, "none")
    assert dense["acc_std"] == pytest.approx(np.sqrt(2))
    assert (made["hardware"], made["date"], made["versions"]) == (
        "abacus", "2030-01-02", {"dllp": "1", "torch": "2", "python": "3"},
    )  # fmt: skip
    assert made["command"] == "dllp bench hand --precision float32" and made["evaluated_on"] == "test"
    json.dumps(made, allow_nan=False)


@pytest.mark.parametrize(
    ("wanted", "verdict"),
    [
        ({"drop": 3.0}, "reached"), ({"drop": 1.0}, "reached within its standard error"), ({"drop": 0.5}, "missed"),
        ({"acc": 88.0}, "reached"), ({"acc": 90.0}, "reached within its standard error"), ({"acc": 90.1}, "missed"),
        ({"gain": 3.0}, "reached"), ({"gain": 4.0}, "reached within its standard error"), ({"gain": 5.0}, "missed"),
    ],
)  # fmt: skip
def test_targets_count_within_one_standard_error(wanted: dict[str, float], verdict: str) -> None:
    table, lines = by_hand(**wanted)
    made = summary.summarise(table, lines, Variant())
    assert [found["verdict"] for found in made["rows"][1]["wanted"]] == [verdict]
    assert f": {verdict} |" in summary.markdown(table, made)


def test_one_run_has_no_spread_and_no_dense_row_no_drop() -> None:
    table, lines = by_hand(drop=0.1, acc=80)
    made = summary.summarise(table, lines[:1], Variant())
    assert [row["name"] for row in made["rows"]] == ["dense"] and made["rows"][0]["acc_std"] is None
    assert made["command"] == "dllp bench hand --seeds 0 --precision float32"
    alone = summary.summarise(table, lines[2:3], Variant())
    (row,) = alone["rows"]
    assert (row["dense_acc_mean"], row["drop_mean"], row["drop_se"]) == (None, None, None)
    assert [found["verdict"] for found in row["wanted"]] == ["no dense runs", "reached"]
    assert "| 90.00 ± 1.41 | – | 93.00 |" in summary.markdown(table, alone)
    assert summary.summarise(table, [], Variant())["rows"] == []


def test_markdown_marks_what_is_quoted() -> None:
    table, lines = by_hand()
    text = summary.markdown(table, summary.summarise(table, lines, Variant()))
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1, "every row has every cell"
    quoted = [row for row in rows if "quoted" in row]
    assert len(quoted) == 1 and quoted[0].startswith("| *DLLP, quoted from the paper* | 55% |") and "92.76" in quoted[0]
    assert "| 88.00 ± 2.58 | 3.00 ± 2.24 | 94.00 | 0.120 | 0.060 | 8.80 | 9.40 | 40 | 2 |" in text
    assert "56.00% | the extracted network |" in text and "abacus" in text and "torch 2" in text


# ---- a tiny table, end to end

NETWORK, KEEP = "small_cnn", 0.5


def tiny(data: Path) -> Table:
    """Every kind of job, one epoch on 64 images."""
    dense, channel = Job(NETWORK, "dense", epochs=1), Job(NETWORK, "dllp", keep=KEEP, epochs=1)
    rows = (
        Row("dense", dense, (0, 1), (("acc", 101.0),), keep_probabilities=True),
        Row("dllp-channel", channel, (0, 1), keep_probabilities=True),
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
        assert found["command"] == f"dllp bench tiny --out {results} --device cpu --quiet" and found["processes"] == 1
        assert found["config"]["precision"] == "float32" and found["evaluated_on"] == "test"
        if name not in ("dense", "dllp-weight"):
            assert min(found["flops_removed"]) >= 1 - KEEP, name
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-epochs2", "tiny-validation20"]
    assert main(["bench", "tiny", "--out", str(tmp_path), "--summary-only", "--quiet"]) == 0
    assert not (tmp_path / "tiny").exists(), "nothing is finished, nothing is written"


def test_a_job_that_fails_does_not_stop_the_others(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Runner.run

    def partly(self: Runner, job: Job) -> Any:
        if job.method == "dense":
            raise StructureError("it will not do")
        return real(self, job)

    monkeypatch.setattr(Runner, "run", partly)
    words = ["--rows", "dense", "thin", "--out", str(tmp_path), "--device", "cpu", "--quiet"]
    assert main(["bench", "tiny", *words]) == 2
    one_line(capsys, "dense, seed 0: it will not do", "1 more failed")
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
from dllp.bench import tables
from dllp.cli import main
from tests.test_bench import tiny
tables.TABLES["tiny"] = tiny(Path({str(data)!r}))
sys.exit(main(["bench", "tiny", "--out", {str(out)!r}, "--device", "cpu"]))
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", script], env=ENVIRONMENT, **pipes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_table_goes_on(how: signal.Signals, data: Path, table: Table, results: Path, tmp_path: Path) -> None:
    with start(data, tmp_path) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(how)
        _, error = process.communicate(timeout=60)
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
        (["tiny", "--seeds", "0", "one"], "seeds = one: expected a whole number"),
        (["tiny", "--precision", "int8"], "expected float32, bfloat16"),
        (["tiny", "--sharp", "1/2"], "did you mean --shard?"),
        (["table1", "--data-root", str(tmp_path / "nowhere")], "nowhere is no folder"),
        ([], "the table's name"),
    ]
    for words, text in cases:
        assert main(["bench", *words, "--out", str(tmp_path / "out")]) == 2, words
        one_line(capsys, text)
    assert not (tmp_path / "out").exists()


def test_tables_need_no_packages_of_the_command_line() -> None:
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in ("rich", "jsonargparse", "yaml"))
    script = f"import sys; {hidden}; from dllp.bench.__main__ import main; main(['figure4', '--list'])"
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "of 3 jobs are finished" in done.stdout


def test_no_two_jobs_of_both_tables_are_the_same() -> None:
    own = [table for table in tables.TABLES.values() if not table.sources]
    digests = [planned.job.digest for table in own for planned in table.plan()]
    assert all(a != b for a, b in itertools.combinations(digests, 2))
