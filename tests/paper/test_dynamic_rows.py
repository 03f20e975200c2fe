"""Rows of methods that choose channels by image: planned in both tables, run, stored and written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dllp.baselines import DYNAMIC, find_any
from dllp.baselines.dynamic import FLOPS_OF
from dllp.cli.main import main
from paper import tables
from paper.jobs import Job
from paper.summary import markdown, summarise
from paper.tables import BY_IMAGE, Row, Table, Variant


def test_both_tables_plan_every_method_at_its_own_and_at_the_tables_budget() -> None:
    rows = {
        name: [r for r in tables.TABLES[name].rows if r.name.startswith("dynamic-")] for name in ("table1", "table2")
    }
    for found in rows.values():
        assert {row.job.baseline for row in found} == set(BY_IMAGE)
        assert {find_any(text).name for text in BY_IMAGE} == set(DYNAMIC)
        for row in found:
            assert (row.job.epochs, row.job.finetune, row.seeds) == (60, 30, (0, 1, 2)) and row.job.derived
            assert row.job.dense.digest == Job(row.job.network, "dense").digest, "from the tables' own dense network"
    keeps = {row.name: (row.job.keep, row.wanted) for found in rows.values() for row in found}
    assert keeps["dynamic-fbs-55"] == keeps["dynamic-rnp-55"] == (0.45, ())
    assert keeps["dynamic-fbs-50"] == (0.5, (("re-run", 0.47),)) and keeps["dynamic-rnp-50"] == (
        0.5,
        (("re-run", 0.85),),
    )
    assert keeps["dynamic-liws-70.6"] == (0.294, (("published", 0.8),)) == keeps["dynamic-liws-after5-70.6"]
    assert {f"dynamic-{name}-74.65" for name in ("fbs", "liws", "liws-after5", "rnp", "rnp-fixed2")} <= set(keeps)


def test_tables_are_written_without_results_of_these_rows() -> None:
    for name in ("table1", "table2"):
        table = tables.TABLES[name]
        lines = [json.loads(line) for line in Path("results", name, "runs.jsonl").read_text().splitlines()]
        text = markdown(table, summarise(table, [line for line in lines if "digest" in line], Variant()))
        assert "by image" not in text and "| dense |" in text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 64), ("test", 40)):
        np.save(folder / f"{part}_x.npy", random.integers(0, 256, (count, 12, 12, 3), dtype=np.uint8))
        np.save(folder / f"{part}_y.npy", np.arange(count) % 4)
    job = Job("small_cnn", "baseline", keep=0.6, epochs=1, finetune=2, changes={"batch_size": 16})
    rows = [Row("dense", job.dense, (0,))]
    rows += [
        Row(name, Job(**{**vars(job), "baseline": name}), (0,), (("re-run", 0.5),))
        for name in ("fbs", "liws:after=1", "rnp")
    ]
    out = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tables.TABLES, "tiny", Table("tiny", "Tiny", tuple(rows), data=str(folder)))
        assert main(["bench", "tiny", "--out", str(out), "--device", "cpu", "--quiet"]) == 0
    return out / "tiny"


def test_a_line_holds_the_cost_of_its_images(made: Path) -> None:
    lines = {line["row"]: line for line in map(json.loads, (made / "runs.jsonl").read_text().splitlines())}
    for name in ("fbs", "liws:after=1", "rnp"):
        line = lines[name]
        assert line["flops_of"] == FLOPS_OF and "before" not in line and len(line["history"]) == 2
        assert line["dense_macs"] == lines["dense"]["macs"][0] and line["gate_macs"] > 0
        assert line["flops_removed"][0] == 1 - line["macs"][0] / line["dense_macs"]
        assert 0.3 < line["flops_removed"][0] < 0.6 and line["flops_removed_p95"][0] <= line["flops_removed"][0]
        more = line["params"][0] - line["dense_params"]
        assert more == 0 if name.startswith("liws") else more > 0
        assert all(0 < kept <= total for kept, total in line["widths"].values())
        assert 0 <= line["never_open"] < 1 and line["train_seconds"] > lines["dense"]["train_seconds"]


def test_the_table_says_mean_and_percentile_and_whose_figure_it_is(made: Path) -> None:
    rows = {row["name"]: row for row in json.loads((made / "summary.json").read_text())["rows"]}
    assert "flops_removed_p95_mean" not in rows["dense"]
    text, rnp = (made / "table.md").read_text(), rows["rnp"]
    both = f"{rnp['flops_removed_mean']:.2f}% / {rnp['flops_removed_p95_mean']:.2f}%"
    assert f"| runtime neural pruning (RNP), by image, 2 epochs with gates | {both} | {FLOPS_OF} |" in text
    assert text.count("| others' re-run: drop 0.5: ") == 3
