"""Rows of the table: who is measured, on what, and what it costs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import dllp
from dllp import evaluate, metrics
from dllp.cli import main
from dllp.data import ArrayData
from dllp.data.corruptions import parse
from dllp.posterior import Posterior
from dllp.zoo import build
from tests.commands import FAST, npy, one_line, settle, short_run

Capture = pytest.CaptureFixture[str]
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
    return dllp.prune(convolutions(), images(), dllp.Config(keep_flops=0.6, epochs=2, batch_size=20, device="cpu"))


def test_rows_are_dense_each_particle_and_all_together(run: dllp.Result) -> None:
    data = images()
    dense = Posterior([convolutions().eval()], torch.tensor([torch.nan]))
    rows = evaluate.table(run, data, dense, disk=DISK)
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
    json.dumps(evaluate.as_dict(rows), allow_nan=False)


def test_chunks_do_not_change_the_result(run: dllp.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    data = images()
    whole = evaluate.table(run, data)
    monkeypatch.setattr(evaluate, "CHUNK", 7)
    for a, b in zip(whole, evaluate.table(run, data), strict=True):
        assert a.metrics == pytest.approx(b.metrics, abs=1e-6)


def test_unknown_sizes_stay_unknown(run: dllp.Result) -> None:
    rows = evaluate.table(run, images(), disk={"particle 1": 5})
    assert [row.bytes for row in rows] == [5, None, None]


def test_corruptions_follow_the_clean_rows(run: dllp.Result) -> None:
    rows = evaluate.table(run, images(), corruptions=parse("gaussian-blur:1,2") + parse("sharpen"))
    assert [row.data for row in rows[::3]] == ["clean", "gaussian-blur:1", "gaussian-blur:2", "sharpen"]
    assert rows[0].metrics["nll"] != rows[3].metrics["nll"]


def test_one_particle_has_no_row_for_all() -> None:
    config = dllp.Config(keep_flops=0.6, epochs=1, batch_size=20, particles=1, device="cpu")
    result = dllp.prune(convolutions(), images(), config)
    assert [row.name for row in evaluate.table(result, images())] == ["particle 1"]


def test_regression_has_rmse_and_likelihood(tmp_path: Path) -> None:
    x = torch.randn(64, 4)
    y = x[:, :1] - x[:, 1:2]
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    config = dllp.Config(keep_flops=0.5, epochs=3, batch_size=16, task="regression", lr=0.02, device="cpu")
    result = dllp.prune(network, (x, y), config)
    unknown = Posterior([network.eval()], torch.tensor([torch.nan]), "regression")
    rows = evaluate.table(result, ArrayData(x, y), unknown)
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
        evaluate.table(run, data)
    assert {p.device.type for p in run.model.parameters()} == {"cpu"}


# ---- the command


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return settle(tmp_path, monkeypatch)


def test_the_command_prints_what_prune_measured(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(finished), "--json", str(tmp_path / "a.json")]) == 0
    assert "all particles" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads((finished / "evaluation.json").read_text())


def test_evaluate_corruptions_on_a_subset(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["--corrupt", "gaussian-blur:1,2", "sharpen", "noise:0.1", "--subset", "0.5", "--json"]
    assert main(["evaluate", str(finished), *words, str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "180 test examples" in out and "gaussian-blur:2" in out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["data"] for row in rows[::4]] == ["clean", "gaussian-blur:1", "gaussian-blur:2", "sharpen", "noise:0.1"]


def test_other_data_is_normalised_as_in_training(finished: Path, nets: str, tmp_path: Path, capsys: Capture) -> None:
    test = dllp.data.load("digits").test
    npy(tmp_path / "same", test.x[:, 0].numpy(), test.y.numpy())
    assert main(["evaluate", str(finished), "--data", "same", "--json", "a.json"]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert rows == json.loads((finished / "evaluation.json").read_text())["rows"]


def test_code_named_by_a_run_is_not_imported_silently(nets: str, tmp_path: Path, capsys: Capture) -> None:
    model = f"{nets}:small"
    assert main(["prune", "--model", model, *FAST, "--particles", "1", "--out", "run", "--quiet"]) == 0
    assert main(["evaluate", "run"]) == 2
    one_line(capsys, model, "--model", "--trust-imports")
    assert main(["evaluate", "run", "--model", model]) == 0
    assert main(["evaluate", "run", "--trust-imports"]) == 0


def test_a_run_saved_from_python_needs_names(tmp_path: Path, capsys: Capture) -> None:
    config = dllp.Config(keep_flops=0.5, epochs=1, particles=1, device="cpu")
    dllp.prune(build("small_cnn", 10, 1), "digits", config).save(tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    one_line(capsys, "--data")
    assert main(["evaluate", str(tmp_path / "run"), "--data", "digits", "--model", "small_cnn"]) == 0
