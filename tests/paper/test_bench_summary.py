"""From finished runs to a table, checked by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dllp.errors import ArtifactError
from dllp.method import weight_laws
from paper import summary
from paper.jobs import Job
from paper.store import Store
from paper.tables import Quoted, Row, Table, Variant


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
        ({"drop": 3.0}, "reached"), ({"drop": 2.9}, "missed"),
        ({"acc": 88.0}, "reached"), ({"acc": 88.1}, "missed"),
        ({"gain": 3.0}, "reached"), ({"gain": 3.1}, "missed"),
    ],
)  # fmt: skip
def test_a_target_is_reached_by_its_mean_alone(wanted: dict[str, float], verdict: str) -> None:
    """Each standard error is above 1."""
    table, lines = by_hand(**wanted)
    made = summary.summarise(table, lines, Variant())
    assert [found["verdict"] for found in made["rows"][1]["wanted"]] == [verdict]
    assert f": {verdict} |" in summary.markdown(table, made)


def test_thin_networks_are_compared_with_one_particle_of_their_cost() -> None:
    table, lines = by_hand()
    assert "thin" not in summary.summarise(table, lines, Variant())
    thin = Job("small_cnn", "thin", keep=0.45)
    rows = (*table.rows, Row("thin-55", thin, (0, 1)), Row("thin-70", replace(thin, keep=0.3)))
    lines += [finished(replace(thin, seed=seed), [0.86 + 0.02 * seed], 0.87, 1, 0.55) for seed in (0, 1)]
    made = summary.summarise(replace(table, rows=rows), lines, Variant())
    ours, theirs = np.array([90, 86]), np.array([86, 88])
    error = np.sqrt((ours.var(ddof=1) + theirs.var(ddof=1)) / 2)
    assert made["thin"] == {"thin-55": {"row": "dllp-55", "points": 1, "standard_error": pytest.approx(error)}}
    text = summary.markdown(table, made)
    assert f"(thin-55) is 1.00 ± {error:.2f} points behind one particle of dllp-55." in text


def test_a_row_says_how_long_the_cut_network_was_trained_and_what_was_noted() -> None:
    table, lines = by_hand()
    phases = ["open"] * 8 + ["soft"] * 13 + ["discrete"] * 39
    lines[2]["history"] = [{"phase": phase} for phase in phases]
    noted = replace(table, rows=(replace(table.rows[0], note="of dense"), replace(table.rows[1], note="of dllp")))
    text = summary.markdown(noted, summary.summarise(noted, lines, Variant()))
    assert "| DLLP channel, one run; 39 of 60 epochs train the cut network |" in text
    assert "of dense\n\nof dllp" in text
    assert "of dllp" not in summary.markdown(noted, summary.summarise(noted, lines[:2], Variant()))


def test_held_out_images_are_said_to_be() -> None:
    table, lines = by_hand()
    data = {"name": "pets", "train": 1200, "classes": 2, "shape": [3, 8, 8]}
    lines = [{**line, "data": data} for line in lines]
    text = "pets: 1,200 training examples of 8x8 in 2 classes"
    assert summary.summarise(table, lines, Variant())["data"] == text
    table = replace(table, rows=tuple(replace(row, job=replace(row.job, validation=200)) for row in table.rows))
    held = [finished(replace(row.job, seed=0), [0.9], 0.9, 1, 0) | {"data": data} for row in table.rows]
    found = summary.summarise(table, held, Variant(validation=200))["data"]
    assert found == text.replace("examples", "examples (200 of them held out)")


def test_one_run_has_no_spread_and_no_dense_row_no_drop() -> None:
    table, lines = by_hand(drop=0.1, acc=80)
    made = summary.summarise(table, lines[:1], Variant())
    assert [row["name"] for row in made["rows"]] == ["dense"] and made["rows"][0]["acc_std"] is None
    assert made["command"] == "dllp bench hand --seeds 0 --rows dense --precision float32"
    unfinished = summary.summarise(table, lines[:3], Variant())
    assert unfinished["command"] == "dllp bench hand --precision float32", "the second row lacks a seed"
    alone = summary.summarise(table, lines[2:3], Variant())
    (row,) = alone["rows"]
    assert (row["dense_acc_mean"], row["drop_mean"], row["drop_se"]) == (None, None, None)
    assert [found["verdict"] for found in row["wanted"]] == ["no dense runs", "reached"]
    assert "| 90.00 ± 1.41 | – | 93.00 |" in summary.markdown(table, alone)
    assert summary.summarise(table, [], Variant())["rows"] == []


def test_a_run_that_says_what_it_started_from_is_compared_with_that() -> None:
    table, lines = by_hand(drop=1.0)
    dense, pruned = lines[:2], lines[2:4]  # particles of 89, 91 and of 85, 87 percent
    for line, accuracy in zip(pruned, (0.92, 0.88), strict=True):
        line["start"] = {"accuracy": accuracy, "nll": 0.1, "ece": 0.1}
    row = summary.summarise(table, [*dense, *pruned], Variant())["rows"][1]
    assert row["dense_acc_mean"] == pytest.approx(90) and row["drop_mean"] == pytest.approx(2)
    assert row["drop_se"] == pytest.approx(0, abs=1e-9), "both seeds lose two points, whatever they started from"
    del pruned[0]["start"]
    row = summary.summarise(table, [*dense, *pruned], Variant())["rows"][1]
    assert row["drop_mean"] == pytest.approx(3), "not every run says it: all are compared with the dense runs"


def test_markdown_marks_what_is_quoted() -> None:
    table, lines = by_hand()
    text = summary.markdown(table, summary.summarise(table, lines, Variant()))
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1, "every row has every cell"
    quoted = [row for row in rows if "quoted" in row]
    assert len(quoted) == 1 and quoted[0].startswith("| *DLLP, quoted from the paper* | 55% |") and "92.76" in quoted[0]
    assert "| 88.00 ± 2.58 | 3.00 ± 2.24 | 94.00 | 0.120 | 0.060 | 8.80 | 9.40 | 40 | 2 |" in text
    assert "56.00% | the extracted network |" in text and "abacus" in text and "torch 2" in text


# ---- kept weights of single-weight rows


def weight_rows(*kept: list[np.ndarray]) -> tuple[Table, list[dict[str, Any]]]:
    """A row of single weights: for every seed the kept weights of its particles."""
    job = Job("small_cnn", "dllp", "weight", 0.1)

    def described(weights: np.ndarray) -> dict[str, Any]:
        shape = weight_laws.describe(weights, fits=False)
        assert shape is not None
        return {"kept": asdict(shape), "sample": weights[:5000].tolist()}

    lines = []
    for seed, particles in enumerate(kept):
        first, *others = map(described, particles)
        found = {"whole": {"kept": first["kept"]}, "sample": first["sample"], "others": others}
        line = finished(replace(job, seed=seed), [0.9] * len(particles), 0.9, 1, 0.9)
        lines.append({**line, "distribution": found})
    return Table("hand", "By hand", (Row("dllp-weight-90", job, (0, 1)),)), lines


def test_weight_rows_tell_how_every_seeds_particles_are_distributed() -> None:
    random = np.random.default_rng(0)
    gaussian = [random.normal(size=6000) for _ in range(3)]
    cut = random.normal(size=20_000)
    table, lines = weight_rows(gaussian[:2], [gaussian[2], cut[np.abs(cut) > 1]])
    del lines[0]["distribution"]["others"]  # as runs were written that looked at the first particle only
    made = summary.summarise(table, lines, Variant())
    (row,) = made["rows"]
    shapes = row["shapes"]
    assert (shapes["seeds"], shapes["particles"]) == ([0, 1, 1], [1, 1, 2])
    assert shapes["near_zero"]["each"][2] == 0 and shapes["dip_p"]["each"][2] < 0.05 < min(shapes["dip_p"]["each"][:2])
    for name in ("near_zero", "ks", "dip_p"):
        assert shapes[name]["mean"] == pytest.approx(np.mean(shapes[name]["each"]))
        assert shapes["reached"][name] == "missed by 1 of 3"
    assert row["shape"]["dip_p"] == shapes["dip_p"]["each"][0] == weight_laws.dip(gaussian[0])[1]
    text = summary.markdown(table, made)
    assert "| dllp-weight-90 | 3 of 4 particles | " in text and text.count(": missed by 1 of 3 |") == 3
    alone = summary.markdown(table, summary.summarise(table, lines[:1], Variant()))
    assert alone.count(": reached |") == 3
    json.dumps(made, allow_nan=False)


@pytest.mark.parametrize(
    "damage",
    [
        {"particles": []}, {"ensemble": {"accuracy": "high"}}, {"dense_params": 0}, {"train_seconds": None},
        {"hardware": 3}, {"distribution": {"sample": "much"}}, {"distribution": {"whole": {"kept": {"ks": 1}}}},
        {"data": {"name": "pets"}},
    ],
)  # fmt: skip
def test_a_line_that_is_no_run_of_the_table_is_one_error(tmp_path: Path, damage: dict[str, Any]) -> None:
    table, lines = by_hand()
    store, line = Store(tmp_path), lines[0]
    store.add(lines[1])
    store.add(line | damage)
    with pytest.raises(
        ArtifactError, match=r"runs\.jsonl or figures\.jsonl: a run is not one of hand .*: append a line"
    ):
        summary.write_summary(table, store, Variant())
    assert not (tmp_path / "summary.json").exists()
