"""Figures 2 and 5 and the tables' baseline rows: tiny benches end to end, and the verdicts by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from dllp.data import load
from dllp.evaluation import weight_analysis
from dllp.method import weight_laws
from paper import __main__ as bench
from paper import summary, tables
from paper.jobs import Job, Runner
from paper.store import Store
from paper.summaries import figures_2_5
from paper.tables import Row, Table, Variant
from tests.support.commands import one_line

DIGITS = load("digits")
KINDS = ("l1", "l2", "dllp")


def small(row: Row) -> Row:
    """A row of the paper's figure as one epoch of a small network."""
    changes = {**row.job.changes, "batch_size": 256}
    return replace(row, job=replace(row.job, network="small_cnn", epochs=1, changes=changes))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("figure2", "figure5"):
        table = tables.TABLES[name]
        rows = tuple(small(row) for row in table.rows if "80" not in row.name)
        monkeypatch.setitem(tables.TABLES, name, replace(table, rows=rows, data="digits"))


def test_the_figures_are_those_of_the_paper() -> None:
    two, five = tables.TABLES["figure2"], tables.TABLES["figure5"]
    names = ["reference", *(f"{name}-{percent}" for percent in (80, 90) for name in KINDS), "paper-weight-80"]
    assert [row.name for row in two.rows] == names and [row.name for row in five.rows] == ["l1-90", "dllp-90"]
    assert {row.job.network for row in two.rows} == {"vgg11_bn"} and all(row.job.finetune == 0 for row in two.rows)
    digests = {row.job.digest for row in two.rows}
    assert {row.job.digest for row in five.rows} <= digests and len(digests) == 8, "figure 5 trains nothing of its own"
    config = two.rows[-2].job.config
    assert (config.keep_params, config.keep_flops, config.beta) == (0.1, None, 0.1)


@pytest.mark.usefixtures("figures")
def test_both_figures_from_one_set_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path), "--device", "cpu"]
    assert bench.main(["figure2", *words]) == 0
    assert bench.main(["figure5", *words, "--quiet"]) == 0
    found = json.loads((tmp_path / "figure2" / "summary.json").read_text())
    assert list(found["rows"]) == ["reference", "l1-90", "l2-90", "dllp-90"]
    for name in ("l1-90", "l2-90"):
        shape = found["rows"][name]["shape"]
        assert shape["near_zero"] == 0 and shape["dip_p"] < 0.05, "cut by magnitude: nothing near zero, two modes"
    distances = {name: row["shape"]["wasserstein"] for name, row in found["rows"].items()}
    samples = {line["row"]: line["distribution"]["sample"] for line in Store(tmp_path / "figure2").lines()}
    for name, distance in distances.items():
        assert distance == weight_laws.wasserstein(samples[name], samples["reference"]), "to the reference's weights"
    assert distances["reference"] == 0 < min(distances["l1-90"], distances["l2-90"])
    assert found["rows"]["reference"]["removed"] == 0 and found["rows"]["reference"]["part"] == "before"
    assert found["rows"]["dllp-90"]["removed"] == pytest.approx(0.9, abs=0.01)
    assert set(found["rows"]["dllp-90"]["reached"]) == {"near_zero", "dip_p", "ks"}
    text = (tmp_path / "figure2" / "table.md").read_text()
    assert text.count("\n| ") == 6 + 5 + 5 and "dip_p" in text and text in capsys.readouterr().out
    both = found["rows"]["l2-90"]["moments"]
    assert both["after"] == both["end"] and both["end"]["near_zero"] == 0, "it was not fine-tuned"
    shape = found["rows"]["dllp-90"]["shape"]
    assert found["rows"]["dllp-90"]["moments"]["end"]["ks"] == pytest.approx(shape["ks"], abs=0.05)
    tail = found["rows"]["l2-90"]["tail"]["layers"]
    assert set(tail) == {"conv1", "conv2", "conv3"} and "tail" not in found["rows"]["reference"]
    cells = " | ".join(f"{layer['k']:.2g} / {layer['predicted']:.2g}" for layer in tail.values())
    assert f" | {cells} |\n" in text
    picture = (tmp_path / "figure2" / "picture.svg").read_text()
    assert picture.lstrip().startswith("<?xml") and "dllp-90" in picture
    again = json.loads((tmp_path / "figure5" / "summary.json").read_text())
    assert list(again["rows"]) == ["l1-90", "dllp-90"] and (tmp_path / "figure5" / "picture.svg").exists()
    assert set(again["rows"]["dllp-90"]["layers"]) == {"conv1", "conv2", "conv3"}
    for row in again["rows"].values():
        counts = [row["shape"]["count"], sum(shape["count"] for shape in row["layers"].values())]
        assert row["part"] == "before" and counts == [9 * (32 + 32 * 64 + 64 * 64)] * 2, "figure 5 is not yet cut"
        assert "reached" not in row, "what is wanted is wanted of what is kept"
    layers = (tmp_path / "figure5" / "table.md").read_text()
    assert "Wanted" in text and "Wanted" not in layers
    assert "Magnitudes of l1-90 by layer" in layers and "Magnitudes of" not in text
    assert "; dllp is one run, 1 of 1 epochs train the cut network." in text
    assert "wasserstein" in text and "wasserstein" not in layers and "removed later" in layers
    lines = Store(tmp_path / "figure5").lines()
    assert [line["from"] for line in lines] == ["figure2", "figure2"], "the same runs, not trained again"
    looked = {line["row"]: len(figures_2_5.kept_of_run(line)) for line in lines}
    assert looked == {"l1-90": 1, "dllp-90": 2}, "every particle was looked at"


def line_of(kept: np.ndarray, digest: str = "d") -> dict[str, Any]:
    parts = {"a": {"before": kept, "kept": kept, "removed": kept[:0]}}
    return {
        "digest": digest, "seed": 0, "params": [10], "dense_params": 100, "particles": [{"accuracy": 0.5}],
        "distribution": {**weight_analysis.study(parts, {}), "sample": weight_laws.pooled([kept])[:5000].tolist()},
    }  # fmt: skip


@pytest.mark.parametrize(("law", "least"), [("laplace", 0.0), ("normal", 0.04)])
def test_laplace_weights_are_told_from_others(law: str, least: float) -> None:
    weights = getattr(np.random.default_rng(0), law)(size=50_000)
    shape = weight_laws.describe(weights)
    assert shape is not None
    found = figures_2_5.laplace(asdict(shape))
    exact = min(
        scipy.stats.kstest(np.abs(weights), scipy.stats.expon(scale=scale).cdf).statistic
        for scale in np.geomspace(0.3, 3, 60) * np.abs(weights).mean()
    )
    assert found["laplace_ks"] <= exact + 1e-4 <= found["laplace_ks"] + 2 * found["amoroso_ks"] + 0.01, "a bound"
    assert found["laplace_ks"] >= least and (found["laplace_ks"] > found["amoroso_ks"]) == (law == "normal")
    if law == "laplace":
        assert (found["alpha"], found["power"]) == pytest.approx((1, 1), abs=0.05)


def test_verdicts_tell_a_gaussian_from_what_is_peaked_or_cut() -> None:
    random = np.random.default_rng(0)
    gaussian = random.normal(size=20_000)
    cases = {
        "gaussian": (gaussian, [True, True, True]),
        "peaked": (random.laplace(size=20_000), [False, True, False]),
        "cut": (gaussian[np.abs(gaussian) > 1], [False, False, False]),
    }
    for kept, expected in cases.values():
        row = figures_2_5.figure_row("dllp-90", line_of(kept), "kept")
        assert list(row["reached"].values()) == expected and row["removed"] == 0.9


# ---- the tables' baseline rows


def test_a_baseline_job_says_what_it_was_before_and_after() -> None:
    runner = Runner(replace(DIGITS, train=DIGITS.train.subset(range(512))), device="cpu")
    changes = {"batch_size": 128}
    job = Job("small_cnn", "baseline", keep=0.4, epochs=2, baseline="l1-filters", finetune=1, changes=changes)
    outcome = runner.run(job)
    line = outcome.line
    assert line["before"]["accuracy"] != line["particles"][0]["accuracy"] and line["flops_removed"][0] >= 0.6
    assert job.derived and list(runner.dense_networks) == [job.dense.digest] and len(line["history"]) == 3
    epochs = sum(record["seconds"] for record in line["history"])
    assert line["choice_seconds"] > 0 and line["train_seconds"] == pytest.approx(epochs + line["choice_seconds"])
    dense = runner.dense_networks[job.dense.digest]
    alone = Runner(runner.data, device="cpu").run(job.dense).line
    assert alone["history"][-1]["loss"] == dense.history[-1]["loss"], "the dense row's own network"
    other = runner.run(replace(job, baseline="random")).line
    assert list(runner.dense_networks) == [job.dense.digest], "trained once for both"
    assert other["digest"] != line["digest"] and replace(job, finetune=2).digest != line["digest"]
    own = replace(job, baseline="slimming")
    assert not own.derived and replace(own, finetune=0).digest != own.digest


def test_published_figures_are_compared_with() -> None:
    def made(name: str, drop: float) -> dict[str, Any]:
        return {"particles": [{"accuracy": 0.93 - drop / 100}], "ensemble": {"accuracy": 0.9}, "seed": 0}

    dense = [made("dense", 0.0)]
    drops = {0.9: "0.37 points worse, within 0.5", 0.33: "0.20 points better, within 0.5",
             1.9: "1.37 points worse", -2.0: "2.53 points better"}  # fmt: skip
    for drop, words in drops.items():
        found = summary._verdict("published", 0.53, [made("ns", drop)], dense)
        assert found["verdict"] == words and found["found"] == pytest.approx(drop)


def test_a_tables_text_names_the_baseline(tmp_path: Path) -> None:
    job = Job("small_cnn", "baseline", keep=0.4, epochs=1, baseline="sfp", finetune=1, changes={"batch_size": 256})
    rows = (Row("dense", job.dense, (0,)), Row("tuned-sfp-60", job, (0,), (("published", 0.24),)))
    table = Table("table1", "A table", rows, data="digits")
    runner, store = Runner(DIGITS, device="cpu"), Store(tmp_path)
    for row in rows:
        store.add({**runner.run(row.job).line, "date": "2000-01-01", "row": row.name})
    lines = store.lines()
    made = summary.summarise(table, lines, Variant())
    text = summary.markdown(table, made)
    assert "soft filter pruning (SFP), 1 epochs of fine-tuning (before it " in text and "published drop 0.24" in text


def test_a_quick_try_fine_tunes_for_half_its_epochs() -> None:
    row = next(row for row in tables.TABLES["table1"].rows if row.name.startswith("tuned-"))
    assert Variant(epochs=3).of(row.job, 0).finetune == 2 and Variant().of(row.job, 0).finetune == 30


def test_a_missing_bench_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["figure9"]) == 2
    one_line(capsys, "figure9")
