"""Rows of the table: who is measured, on what, and what it costs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import dllp
from dllp.data import ArrayData, ood
from dllp.data.corruptions import parse
from dllp.evaluation import evaluate, metrics
from dllp.method import efficiency, likelihood
from dllp.posterior import Posterior
from dllp.records import Size
from paper.summaries.prediction_metrics import from_probabilities

DISK = {"dense": 1000, "particle 1": 100, "particle 2": 200}


def images(n: int = 60, side: int = 8) -> ArrayData:
    y = torch.arange(n) % 3
    x = torch.randint(0, 120, (n, 1, side, side), dtype=torch.uint8) + (60 * y[:, None, None, None]).to(torch.uint8)
    return ArrayData(x, y, (0.4,), (0.2,))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


@pytest.fixture(scope="module")
def run() -> dllp.Result:
    torch.manual_seed(0)
    return dllp.prune(
        convolutions(), images(), dllp.Config(keep_flops=0.6, epochs=2, batch_size=20, particles=2, device="cpu")
    )


def test_rows_are_dense_each_particle_and_the_ensemble(run: dllp.Result) -> None:
    data = images()
    dense = Posterior([convolutions().eval()], torch.tensor([torch.nan]))
    rows = evaluate.measure(run, data, dense, disk=DISK).rows
    assert [row.name for row in rows] == ["dense", "particle 1", "particle 2", "all particles"]
    assert {row.data for row in rows} == {"clean"}
    first, second, both = rows[1:]
    assert rows[0].macs == run.dense.macs and first.params == run.sizes[0].params
    assert first.macs is not None and second.macs is not None
    assert both.macs == first.macs + second.macs and both.bytes == 300
    members = run.posterior.members(data.inputs(slice(None)))
    assert first.metrics["accuracy"] == metrics.accuracy(members[0], data.y)
    assert both.metrics["nll"] == pytest.approx(metrics.nll(members.mean(0), data.y), rel=1e-6)
    prediction = run.posterior.predict(data.inputs(slice(None)))
    assert prediction.mutual_information is not None
    mutual = float(prediction.mutual_information.mean())
    assert both.metrics["mutual_information"] == pytest.approx(mutual, abs=1e-6)
    json.dumps([asdict(row) for row in rows], allow_nan=False)


def test_chunks_do_not_change_the_result(run: dllp.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    data = images()
    whole = evaluate.measure(run, data).rows
    monkeypatch.setattr("dllp.data.arrays.PART", 7)
    for a, b in zip(whole, evaluate.measure(run, data).rows, strict=True):
        assert a.metrics == pytest.approx(b.metrics, abs=1e-6)


def test_unknown_sizes_stay_unknown(run: dllp.Result) -> None:
    rows = evaluate.measure(run, images(), disk={"particle 1": 5}).rows
    assert [row.bytes for row in rows] == [5, None, None]


def test_corruptions_follow_the_clean_rows(run: dllp.Result) -> None:
    rows = evaluate.measure(run, images(), corruptions=parse("gaussian-blur:1,2") + parse("sharpen")).rows
    assert [row.data for row in rows[::3]] == ["clean", "gaussian-blur:1", "gaussian-blur:2", "sharpen"]
    assert rows[0].metrics["nll"] != rows[3].metrics["nll"]


def test_one_particle_has_no_row_for_all() -> None:
    config = dllp.Config(keep_flops=0.6, epochs=1, batch_size=20, particles=1, device="cpu")
    result = dllp.prune(convolutions(), images(), config)
    assert [row.name for row in evaluate.measure(result, images()).rows] == ["particle 1"]


def test_regression_has_rmse_and_likelihood(tmp_path: Path) -> None:
    x = torch.randn(64, 4)
    y = x[:, :1] - x[:, 1:2]
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    config = dllp.Config(keep_flops=0.5, epochs=3, batch_size=16, particles=2, task="regression", lr=0.02, device="cpu")
    result = dllp.prune(network, (x, y), config)
    unknown = Posterior([network.eval()], torch.tensor([torch.nan]), "regression")
    rows = evaluate.measure(result, ArrayData(x, y), unknown).rows
    members, noise = result.posterior.members(x), result.posterior.noise
    assert set(rows[0].metrics) == {"rmse", "fitted_noise", "log_likelihood"}
    assert rows[1].metrics["rmse"] == pytest.approx(math.sqrt(float((members[0] - y).square().mean())), rel=1e-6)
    variance = members.var(0, correction=0) + noise.mean()
    expected = metrics.gaussian_nll(members.mean(0), variance, y)
    assert rows[-1].metrics["nll"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (ArrayData(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)), "cannot take inputs of shape"),
        (ArrayData(torch.zeros(4, 1, 8, 8), torch.zeros(4, 1)), "labels are not"),
        (ArrayData(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])), "outside 0..2"),
        (ArrayData(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long)), "empty"),
    ],
)
def test_data_that_does_not_fit(run: dllp.Result, data: ArrayData, words: str) -> None:
    with pytest.raises(dllp.DataError, match=words):
        evaluate.measure(run, data)
    assert {p.device.type for p in run.model.parameters()} == {"cpu"}


def test_estimation_efficiency_of_every_version(run: dllp.Result) -> None:
    data = images()
    found = evaluate.measure(run, data, corruptions=parse("noise:0.1,0.3"))
    assert [entry.data for entry in found.efficiency] == ["clean", "noise:0.1", "noise:0.3"]
    clean, _, noisy = found.efficiency
    assert clean.b2 == 0 and noisy.s2 == clean.s2 and clean.particles == 2
    members = run.posterior.members(data.inputs(slice(None))).double()
    truth = torch.nn.functional.one_hot(data.y, 3)
    assert clean.a2 == pytest.approx(float((members[0] - members[1]).square().mean() / 2), rel=1e-6)
    assert clean.s2 == pytest.approx(float((truth - members.mean(0)).square().mean()) - clean.a2 / 2, rel=1e-6)
    for entry in found.efficiency:
        assert entry.one == pytest.approx(entry.s2 / (entry.s2 + entry.a2 + entry.b2), rel=1e-9)
        assert entry.together == pytest.approx(entry.s2 / (entry.s2 + entry.a2 / 2 + entry.b2), rel=1e-9)
    worse = parse("noise:0.3")[0].apply_to(data)
    here = efficiency.estimate_components(run.posterior.members(worse.inputs(slice(None))).double(), data.y)
    assert noisy.a2 == pytest.approx(float(here.a2), rel=1e-6)
    assert noisy.b2 > 0 and noisy.b2 == pytest.approx(float(here.s2) - clean.s2, rel=1e-6), "s2's, not the residual's"
    alone = replace(run, posterior=Posterior(run.posterior.networks[:1], torch.ones(1)), sizes=run.sizes[:1])
    assert evaluate.measure(alone, data).efficiency == []


def test_certain_networks_that_are_always_right_are_fully_efficient() -> None:
    """One rule for a run and for a table's figures: without any variance the bound is met."""
    sure = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        sure.weight.copy_(200 * torch.eye(3))
    y = torch.tensor([0, 1, 2, 1])
    x = torch.nn.functional.one_hot(y, 3).float()
    posterior = Posterior([sure, sure], torch.ones(2))
    run = dllp.Result(dllp.Config(), [], posterior, [], Size(1.0, 1), [Size(1.0, 1)] * 2, {}, {})
    (found,) = evaluate.measure(run, dllp.data.from_pair(x, y)).efficiency
    assert (found.s2, found.a2, found.b2, found.one, found.together) == (0, 0, 0, 1, 1)
    figures = from_probabilities({"clean": posterior.members(x).double()}, y).ensemble["clean"]
    assert [figures[name] for name in ("s2", "a2", "b2", "efficiency")] == [0, 0, 0, 1]


def test_out_of_distribution_inputs_are_told_apart(run: dllp.Result) -> None:
    data = images()
    dark = ood.unlabelled(data, torch.zeros(20, 1, 8, 8, dtype=torch.uint8))
    rows = evaluate.measure(run, data, ood={"dark": dark, "same": data}).rows
    outside = {(row.name, row.data): row.metrics for row in rows if row.data.startswith("ood:")}
    assert set(outside) == {
        (n, d) for n in ("particle 1", "particle 2", "all particles") for d in ("ood:dark", "ood:same")
    }
    for (name, place), values in outside.items():
        several = {"auroc_mutual_information", "fpr95_mutual_information"} if name == "all particles" else set()
        assert set(values) == {"auroc", "fpr95"} | several
        if place == "ood:same":
            assert values["auroc"] == pytest.approx(0.5) and values["fpr95"] == pytest.approx(0.95, abs=0.02)
    inside, away = (run.posterior.predict(d.inputs(slice(None))) for d in (data, dark))
    assert inside.entropy is not None and away.entropy is not None
    wins = (away.entropy[:, None] > inside.entropy).double().mean()
    assert outside["all particles", "ood:dark"]["auroc"] == pytest.approx(float(wins), abs=1e-3)


@pytest.mark.parametrize("task", ["classification", "binary"])
def test_pixels_are_told_apart_one_by_one(task: likelihood.Task) -> None:
    """As many scores as pixels; on clean data those whose label counts."""
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    network = torch.nn.Conv2d(1, 3 if task == "classification" else 1, 1)
    y = torch.zeros(6, 4, 4, dtype=torch.int64) if task == "classification" else torch.zeros(6, 1, 4, 4)
    y[:, 0] = -100 if task == "classification" else 0
    run = dllp.Result(
        dllp.Config(task=task), [], Posterior([network], torch.ones(1), task), [], Size(1.0, 1), [Size(1.0, 1)], {}, {}
    )
    rows = run.evaluate((x, y), ood={"same": x}).rows
    assert [row.data for row in rows] == ["clean", "ood:same"]
    assert rows[1].metrics["auroc"] == pytest.approx(0.5, abs=0.1)


def test_particles_before_extraction_and_with_drawn_gates(run: dllp.Result) -> None:
    data = images()
    drawn = dllp.sample_gates(run, data.inputs(slice(0, 2)), 3)
    rows = evaluate.measure(run, data, references=True, drawn=drawn).rows
    assert [row.name for row in rows] == [
        "reference 1", "reference 2", "all references", "particle 1", "particle 2", "all particles", "drawn gates",
    ]  # fmt: skip
    first, everything = run.particles[0].reference, {"accuracy", "nll", "nll_after_temperature", "brier", "ece"}
    everything |= {"signed_ece", "aurc", "entropy", "aleatoric", "fitted_noise", "log_likelihood"}
    p = first(data.inputs(slice(None))).softmax(1).detach()
    assert rows[0].metrics["nll"] == pytest.approx(metrics.nll(p, data.y), rel=1e-5) and rows[0].macs == run.dense.macs
    for row in rows:
        more = {"epistemic", "mutual_information", "disagreement"} if row.name.startswith(("all", "drawn")) else set()
        assert set(row.metrics) == everything | more, row.name
        assert row.metrics["fitted_noise"] == pytest.approx(row.metrics["brier"] / 3)
    assert evaluate.measure(run, data, drawn=dllp.sample_gates(run, data.inputs(slice(0, 2)), 1)).rows


def test_plots_have_their_data(run: dllp.Result) -> None:
    found = evaluate.measure(run, images(), corruptions=parse("sharpen"))
    named = [(row.name, row.data) for row in found.rows]
    assert [(curve["name"], curve["data"]) for curve in found.curves] == named
    for curve, row in zip(found.curves, found.rows, strict=True):
        assert curve["risk_coverage"]["risk"][-1] == pytest.approx(1 - row.metrics["accuracy"])
        assert sum(curve["reliability"]["share"]) == pytest.approx(1)


def test_a_regression_is_told_apart_by_its_variance() -> None:
    x = torch.randn(64, 4)
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    config = dllp.Config(
        keep_flops=0.5, epochs=2, batch_size=16, particles=2, task="regression", lr=0.02, init="fresh", device="cpu"
    )
    result, data = dllp.prune(network, (x, x[:, :1]), config), ArrayData(x, x[:, :1])
    found = evaluate.measure(result, data, ood={"far": ood.unlabelled(data, 50 * x)})
    far = [row for row in found.rows if row.data == "ood:far"][-1]
    assert far.metrics["auroc"] > 0.8 and set(far.metrics) == {"auroc", "fpr95"}
    assert len(found.efficiency) == 1 and found.curves == []
