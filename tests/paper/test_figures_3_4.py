"""Figures 3 and 4 and the comparison of reliability: on predictions that can be worked out, and end to end."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dllp.data import load
from dllp.errors import ArtifactError
from dllp.evaluation import metrics
from paper import tables
from paper.__main__ import main
from paper.jobs import Job, Runner
from paper.store import LABELS, Store
from paper.summaries import figures_3_4, reliability
from paper.summaries.prediction_metrics import stored_metrics
from paper.summary import open_store, write_summary
from paper.tables import Row, Table, Variant
from tests.support.commands import one_line

Capture = pytest.CaptureFixture[str]
NETWORK, CLASSES = "small_cnn", 4
LEVELS = dict(zip(figures_3_4.QUALITIES, (0.30, 0.25, 0.35, 0.40, 0.45, 0.50), strict=True))
"""How far a made-up network is from being sure, on each version of the data; far enough to be stored exactly."""


def predictions(level: float, spread: float, labels: np.ndarray) -> np.ndarray:
    """(2, B, C): the label has 1 - level, give or take the spread; the rest is shared out evenly."""
    truth = np.eye(CLASSES)[labels]
    wrong = np.array([level - spread, level + spread])[:, None, None]
    return (1 - wrong) * truth + wrong / (CLASSES - 1) * (1 - truth)


def line(job: Job, **more: Any) -> dict[str, Any]:
    """A finished run of two particles as a summary reads it."""
    figures = {"accuracy": 1.0, "nll": 0.1, "ece": 0.0}
    return {
        "digest": job.digest, "seed": job.seed, "epochs": 1, "hardware": "made up", "date": "2026-01-01", "dllp": "0",
        "torch": "0", "python": "0", "flops_of": "nothing", "params": [5, 5], "dense_params": 10, "macs": [45.0, 45.0],
        "dense_macs": 100.0, "flops_removed": [0.5, 0.5], "train_seconds": 1.0, "config": {"precision": "float32"},
        "ensemble": figures, "particles": [figures] * 2, "log_prior": [30.0, 50.0], "num_data": 10, **more,
    }  # fmt: skip


def fill(store: Store, job: Job, levels: dict[str, float], spread: float) -> None:
    """A run whose predictions are :func:`predictions`, and undecided on out-of-distribution inputs."""
    labels = np.arange(200) % CLASSES
    kept = {name: predictions(level, spread, labels) for name, level in levels.items()}
    kept["ood:noise"] = np.full((2, 30, CLASSES), 1 / CLASSES)
    store.add(line(job), {**kept, LABELS: labels})


def made_up(name: str, tmp_path: Path) -> tuple[Table, Store, dict[str, Any]]:
    table = tables.TABLES[name]
    store = open_store(tmp_path, table, Variant())
    for row in table.rows:
        for seed in (0, 1) if row.job.network in ("resnet56", "vgg11_bn") and not row.job.without else ():
            spread = 0.01 * (6 - 5 * row.job.fraction) * (1 + 0.1 * seed)
            fill(store, replace(row.job, seed=seed), LEVELS, spread)
    summary = write_summary(table, store, Variant())
    assert summary is not None and (store.folder / "picture.svg").read_bytes().startswith(b"<?xml")
    assert json.loads((store.folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    return table, store, summary


def test_figure_3_on_made_up_predictions(tmp_path: Path) -> None:
    _, store, summary = made_up("figure3", tmp_path)
    a, b = summary["panels"]
    assert a["places"] == list(LEVELS) and b["places"] == ["20%", "40%", "60%", "80%", "100%"]
    noise = a["series"]["fitted noise 1/d²"]
    spread = 0.01
    for i, level in enumerate(LEVELS.values()):
        # error `wrong` on the label and wrong/3 on each of the three others, squared, over four classes, two particles
        squares = [w * w * (1 + 1 / 3) / 4 for w in (level - spread, level + spread)]
        assert noise["seeds"]["0"][i] == pytest.approx(sum(squares) / 2, rel=0.01)
    assert noise["reached"] and noise["seeds_that_break_it"] == [] and noise["std"][0] is not None
    epistemic = b["series"]["Σ Var p"]["seeds"]["0"]
    # both particles lie `spread` from their mean on the label, spread/3 on the others
    expected = [(0.01 * (6 - 5 * f)) ** 2 * (1 + 1 / 3) for f in (0.2, 0.4, 0.6, 0.8, 1.0)]
    assert epistemic == pytest.approx(expected, rel=0.02) and b["series"]["Σ Var p"]["reached"]
    assert "every seed keeps it" in (store.folder / "table.md").read_text()


def test_figure_4_adds_the_prior_to_the_likelihood(tmp_path: Path) -> None:
    _, _, summary = made_up("figure4", tmp_path)
    likelihood, posterior, noise, epistemic = (next(iter(panel["series"].values())) for panel in summary["panels"])
    for i in range(len(LEVELS)):
        assert posterior["mean"][i] == pytest.approx(likelihood["mean"][i] + 40 / 10), "mean of 30 and 50, over N = 10"
        d = noise["seeds"]["0"][i] ** -0.5
        gaussian = CLASSES * (math.log(d) - 0.5 * math.log(2 * math.pi)) - CLASSES / 2
        assert likelihood["seeds"]["0"][i] == pytest.approx(gaussian, abs=0.02), "but for the mean of logs"
    assert likelihood["mean"][1] == max(likelihood["mean"]), "clean data fit best"
    assert "(4.0000, 4.0000 for seeds 0, 1)" in summary["panels"][1]["verdict"]
    assert all(value > 0 for value in epistemic["mean"])


@pytest.mark.parametrize(
    ("seeds", "order"),
    [
        ([[4, 3, 2, 1], [8, 7, 6, 5]], "falls strictly, in the mean and in every seed"),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], "rises strictly, in the mean and in every seed"),
        ([[4, 3, 2, 1], [8, 8, 6, 5]], "has no order that every seed keeps"),
    ],
)
def test_the_order_over_the_blur_is_told(seeds: list[list[float]], order: str) -> None:
    by_seed = {str(seed): [9.0, 9.0, *values] for seed, values in enumerate(seeds)}
    mean = np.mean(list(by_seed.values()), axis=0).tolist()
    text = figures_3_4._blur_verdict({"mean": mean, "seeds": by_seed})
    assert text == f"From gaussian-blur:1 to 5 (d) {order}: {mean[2]:.4f} to {mean[-1]:.4f} in the mean."


def test_orders_that_break() -> None:
    rising = [0.1, 0.05, 0.2, 0.3, 0.4, 0.5]
    assert figures_3_4.rises_with_blur(rising) and figures_3_4.falls(rising[:2])
    assert not figures_3_4.rises_with_blur([*rising[:3], 0.2, 0.4, 0.5]), "strictly"
    assert not figures_3_4.rises_with_blur([0.3, 0.25, *rising[2:]]), "lowest on clean or sharpened data"
    assert not figures_3_4.falls([3, 2, 2])


def test_reliability_on_made_up_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "forget", lambda store, digest: None)  # they are looked at below
    _, store, summary = made_up("reliability", tmp_path)
    resnet = summary["contests"][0]
    rows = {row["name"]: row for row in resnet["rows"]}
    assert list(rows)[:2] == ["dense", "two dense networks"] and rows["DLLP, n = 2"]["flops"] == pytest.approx(0.9)
    alone, both = rows["one DLLP particle"]["data"]["clean"], rows["DLLP, n = 2"]["data"]["clean"]
    stored, labels = store.probabilities(Job("resnet56", "dllp", keep=0.45).digest)
    p, y = torch.from_numpy(stored["clean"]), torch.from_numpy(labels).long()
    others = [store.probabilities(replace(Job("resnet56", "dllp", keep=0.45), seed=1).digest)[0]["clean"]]
    means = [metrics.nll(q.mean(0), y) for q in (p, *map(torch.from_numpy, others))]
    assert both["nll"]["mean"] == pytest.approx(sum(means) / 2)
    assert both["nll"]["std"] == pytest.approx(np.std(means, ddof=1))
    each = [metrics.nll(q, y) for q in (*p, *torch.from_numpy(others[0]))]
    assert alone["nll"]["mean"] == pytest.approx(sum(each) / 4)
    assert "mutual_information" not in alone and both["mutual_information"]["mean"] > 0
    assert both["efficiency"]["mean"] < 1
    assert rows["dense"]["data"]["ood:noise"]["auroc"]["mean"] == 1.0
    pair = rows["two dense networks"]
    assert pair["networks"] == 2 and pair["data"]["clean"]["nll"]["std"] is None, "two runs are one pair"
    assert {aim["figure"]: aim["reached"] for aim in resnet["wanted"]}["nll"] in (True, False)
    assert len(resnet["wanted"]) == 5
    assert resnet["efficiency"]["verdict"] == "not improved" and summary["contests"][1:] == []
    text = (store.folder / "table.md").read_text()
    assert "`dllp bench reliability --rows resnet56-dense`" in text and "AUROC" in text and "gaussian-blur:5" in text
    assert "Estimation efficiency of two particles against two dense networks: " in text


@pytest.mark.parametrize(("ours", "verdict"), [(0.80, "improved"), (0.781, "not improved"), (0.70, "not improved")])
def test_efficiency_is_compared_with_that_of_two_dense_networks(ours: float, verdict: str) -> None:
    def row(how: str, networks: int, mean: float, std: float | None) -> dict[str, Any]:
        data = {"clean": {"efficiency": {"mean": mean, "std": std}}}
        return {"how": how, "networks": networks, "data": data, "seeds": [0, 1, 2, 3]}

    rows = [row("alone", 1, 0, 0), row("pairs", 2, 0.78, 0.006), row("together", 2, ours, 0.008)]
    found = reliability._efficiency([*rows, row("together", 4, 0.9, 0.01)])
    assert found is not None and found["verdict"] == verdict
    assert found["difference"] == pytest.approx(ours - 0.78) and found["standard_error"] == pytest.approx(0.005)
    assert reliability._efficiency(rows[1:2]) is None
    one = reliability._efficiency([rows[1], row("together", 2, 0.9, None)])
    assert one is not None and (one["standard_error"], one["verdict"]) == (None, "not improved"), (
        "one run shows nothing"
    )


def test_ensembles_of_two_use_every_dense_network_twice(tmp_path: Path) -> None:
    store, jobs = Store(tmp_path), [Job("resnet56", "dense", seed=seed) for seed in range(3)]
    for job in jobs:
        fill(store, job, {"clean": 0.1 * (job.seed + 2)}, 0.0)
    lines = store.lines()
    sums = [float(versions["clean"].mean(0)[0, 0]) for versions, _ in reliability.pairs(lines, store)]
    assert sums == pytest.approx([0.75, 0.65, 0.7], abs=1e-3)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("figure4", "log_prior"), ("figure4", "versions"), ("figure3", "particles"), ("reliability", "macs"),
        ("reliability", "versions"),
    ],
)  # fmt: skip
def test_runs_that_are_not_of_the_bench_are_named(name: str, damage: str, tmp_path: Path) -> None:
    table = tables.TABLES[name]
    store, job = open_store(tmp_path, table, Variant()), table.rows[-1 if name == "figure3" else 0].job
    labels = np.arange(40) % CLASSES
    kept = {quality: predictions(level, 0.01, labels) for quality, level in LEVELS.items()}
    if damage == "versions":
        kept = {"gaussian-blur:5": kept["gaussian-blur:5"]}
    if damage == "particles":
        kept = {quality: p[:1] for quality, p in kept.items()}
    store.add({key: value for key, value in line(job).items() if key != damage or damage == "particles"},
              {**kept, LABELS: labels})  # fmt: skip
    with pytest.raises(ArtifactError, match="append a line"):
        write_summary(table, store, Variant())
    assert not (store.folder / "summary.json").exists()


def test_one_dense_run_is_no_ensemble(tmp_path: Path) -> None:
    table = tables.TABLES["reliability"]
    store = open_store(tmp_path, table, Variant())
    fill(store, table.rows[0].job, LEVELS, 0.0)
    summary = write_summary(table, store, Variant())
    assert summary is not None and [row["name"] for row in summary["contests"][0]["rows"]] == ["dense"]
    assert summary["contests"][0]["wanted"] == []


# ---- finished runs of other tables


def test_runs_of_other_tables_are_taken_over(tmp_path: Path) -> None:
    source, job = Store(tmp_path / "table1"), Job("resnet56", "dense")
    fill(source, job, {"clean": 0.1}, 0.01)
    source.add(line(replace(job, seed=1)))  # kept no probabilities
    store = Store(tmp_path / "reliability", [source])
    store.adopt(dict.fromkeys([job.digest, replace(job, seed=1).digest, "unknown"], True))
    assert [(found["digest"], found["from"]) for found in store.lines()] == [(job.digest, "table1")]
    store.adopt({job.digest: True})
    assert len(store.lines()) == 1, "once"
    assert set(store.probabilities(job.digest)[0]) == {"clean", "ood:noise"}
    assert not (tmp_path / "reliability" / "probabilities").exists(), "they stay where they are"
    store.adopt({replace(job, seed=1).digest: False})
    assert len(store.lines()) == 2, "where they are not needed"


def test_figures_outlive_probabilities(tmp_path: Path) -> None:
    """Figure 3's are computed once; what they were computed from can go, and Figure 4 takes them over."""
    _, store, summary = made_up("figure3", tmp_path)
    assert not list((store.folder / "probabilities").iterdir())
    assert write_summary(tables.TABLES["figure3"], store, Variant()) == summary
    table = tables.TABLES["figure4"]
    other = open_store(tmp_path, table, Variant())
    other.adopt({planned.job.digest: True for planned in table.plan()})
    assert write_summary(table, other, Variant()) is not None and not (other.folder / "figures.jsonl").exists()


def test_figures_belong_to_one_run_of_a_job(tmp_path: Path) -> None:
    store, job = Store(tmp_path), Job("resnet56", "dense")
    fill(store, job, {"clean": 0.1}, 0.0)
    (first,) = store.lines()
    before = stored_metrics(store, first).ensemble["clean"]["nll"]
    store.runs.unlink()
    fill(store, job, {"clean": 0.4}, 0.0)
    (again,) = (line | {"date": "later"} for line in store.lines())
    after = stored_metrics(store, again).ensemble["clean"]["nll"]
    assert after > before + 0.1
    store.forget(job.digest)
    assert stored_metrics(store, again).ensemble["clean"]["nll"] == after
    assert stored_metrics(store, first).ensemble["clean"]["nll"] == before, "those of the run before stay its own"
    with pytest.raises(ArtifactError, match="holds no figures of that run either"):
        stored_metrics(store, first | {"date": "never"})


def test_the_comparison_needs_no_dense_run_of_its_own() -> None:
    own = {planned.job.digest for name in ("table1", "table2") for planned in tables.TABLES[name].plan()}
    shared = {row.name for row in tables.TABLES["reliability"].rows if replace(row.job, seed=0).digest in own}
    assert {"resnet56-dense", "resnet56-dllp-55", "vgg16-dense", "vgg16-dllp-74.65"} <= shared
    four = tables.TABLES["figure4"].plan()
    assert {p.job.digest for p in four} <= {p.job.digest for p in tables.TABLES["figure3"].plan()}
    names = {row.name for row in tables.TABLES["reliability"].rows}
    assert {contender.row for contest in reliability.CONTESTS for contender in contest.contenders} <= names


# ---- jobs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 80), ("test", 40)):
        np.save(folder / f"{part}_x.npy", random.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8))
        np.save(folder / f"{part}_y.npy", np.arange(count) % CLASSES)
    return folder


def test_a_fraction_of_the_data_gets_as_many_steps(data: Path) -> None:
    runner = Runner(load(data), device="cpu")
    job = Job(NETWORK, "dllp", keep=0.5, epochs=6, changes={"batch_size": 8})
    steps = {}
    for fraction in (0.2, 0.5, 1.0):
        part = replace(job, fraction=fraction)
        train, _ = runner.splits.of(part)
        assert len(train) == round(80 * fraction)
        assert torch.bincount(train.y).tolist() == [len(train) // CLASSES] * CLASSES, "each class in proportion"
        config = runner.config(part)
        steps[fraction] = config.epochs * (len(train) // 8)
        assert config.warmup / config.epochs == pytest.approx(job.config.warmup / 6)
    assert set(steps.values()) == {60}
    assert len({replace(job, fraction=f).digest for f in (0.2, 0.5, 1.0)}) == 3
    small, large = (set(runner.splits.of(replace(job, fraction=f))[0].x.sum((1, 2, 3)).tolist()) for f in (0.2, 0.5))
    assert small < large, "nested"


def shrunk(name: str, data: Path) -> Table:
    """The bench as it is, but with a small network, one epoch, few seeds and the classes of the test's own data."""
    whole = tables.TABLES[name]

    def small(row: Row) -> Row:
        without = ("3",) if row.job.without else ()
        changes = {k: v for k, v in row.job.changes.items() if k != "particles"} | {"batch_size": 8}
        seeds = (0, 1) if row.job.method == "dense" else (0,)
        job = replace(row.job, network=NETWORK, epochs=1, without=without, changes=changes)
        return replace(row, job=job, seeds=seeds)

    rows = [small(row) for row in whole.rows if row.name in ("data-20", "data-100", "animals-dense", "animals-dllp-50")]
    return replace(whole, rows=tuple(rows), data=str(data))


def test_the_benches_end_to_end(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for name in ("figure3", "figure4", "reliability"):
        monkeypatch.setitem(tables.TABLES, name, shrunk(name, data))
    options = ["--out", str(tmp_path), "--device", "cpu"]
    assert main(["figure3", *options, "--shard", "2/2"]) == 0
    assert main(["figure3", *options]) == 0
    lines = Store(tmp_path / "figure3").lines()
    assert len(lines) == 2 and all(len(found["log_prior"]) == 2 for found in lines)
    assert sorted({found["num_data"] for found in lines}) == [16, 80]
    assert "(b) epistemic" in capsys.readouterr().out
    assert main(["figure4", *options, "--list"]) == 0
    assert "1 of 1 jobs are finished" in capsys.readouterr().out
    assert main(["figure4", *options, "--quiet"]) == 0
    assert {found["from"] for found in Store(tmp_path / "figure4").lines()} == {"figure3"}
    assert main(["reliability", *options, "--quiet"]) == 0
    summary = json.loads((tmp_path / "reliability" / "summary.json").read_text())
    (contest,) = summary["contests"]
    assert [row["name"] for row in contest["rows"]] == [
        "dense", "two dense networks", "one DLLP particle", "DLLP, n = 2",
    ]  # fmt: skip
    assert set(contest["rows"][0]["data"]) == {"clean", "ood:left-out", "ood:noise", "ood:digits"}
    assert not (tmp_path / "reliability" / "picture.svg").exists(), "nothing over data quality to draw"


def test_mistakes_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    for words, text in ((["figure9"], "no table 'figure9'"), (["figure3", "--shard", "3/2"], "give I/N")):
        assert main([*words, "--out", str(tmp_path / "out")]) == 2
        one_line(capsys, text)
    assert not (tmp_path / "out").exists()
