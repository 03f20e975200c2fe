"""Runs that the report meets: what it reads of them, what it says is damaged, and kinds other than the ordinary."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dllp
from dllp.cli.main import main
from dllp.errors import ArtifactError
from dllp.records import EpochRecord
from dllp.report import contents, weights
from dllp.runs.folder import EXAMPLES
from dllp.runs.tensors import read_tensors, write_tensors
from dllp.zoo import build
from tests.support.commands import npy, one_line, plots, settle

pytest.importorskip("plotly", reason="needs plotly: pip install -e '.[report]'")


# ---- what is read


@pytest.mark.parametrize(("file", "old", "new"), [
    ("run.json", '"phase": "', '"phase": "<b>'), ("run.json", '"multiplier": [', '"multiplier": ["x", '),
    ("evaluation.json", '"rows": [', '"rows": [3, '), ("evaluation.json", '"rows"', '"columns"'),
    ("evaluation.json", '"name": "dense"', '"name": 5'), ("log.jsonl", '"loss": [', '"loss": ["a", '),
    ("run.json", '"conv1": [\n', '"conv1": [\n 4,\n'), ("run.json", '"keep_flops": 0.3', '"keep_flops": "a"'),
    ("run.json", '"sizes": [', '"sizes": [], "b": ['), ("run.json", '"out": [', '"out": [-1, '),
])  # fmt: skip
def test_damaged_files_are_one_line(
    copied: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str
) -> None:
    content = (copied / file).read_text()
    assert old in content
    (copied / file).write_text(content.replace(old, new))
    assert main(["report", str(copied), "--quiet"]) == 2
    one_line(capsys, file)
    assert not (copied / "report.html").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["particle", "reference"])
def test_weights_that_are_no_numbers_are_one_line(
    copied: Path, capsys: pytest.CaptureFixture[str], kind: str, value: float
) -> None:
    path = copied / f"{kind}-0.safetensors"
    tensors = read_tensors(path)
    tensors["conv1.weight"][:] = value
    write_tensors(path, tensors)
    assert main(["report", str(copied), "--quiet"]) == 2
    one_line(capsys, f"{path.name}: 'conv1.weight' holds numbers that are not finite")
    assert not (copied / "report.html").exists()


def test_single_weights_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    index, value = torch.arange(3, dtype=torch.int32), torch.tensor([1.0, math.nan, 2.0])
    write_tensors(tmp_path / "reference-0.safetensors", {"a.weight": torch.ones(2, 2)})
    write_tensors(tmp_path / "particle-0.safetensors", {"a.weight#index": index, "a.weight#value": value})
    with pytest.raises(ArtifactError, match=r"particle-0\.safetensors: 'a\.weight' holds numbers that are not finite"):
        weights.split(tmp_path, {}, ["a.weight"])


def test_the_largest_weights_are_drawn() -> None:
    largest = np.full(40, 3e38, np.float32)
    traces = weights.histogram(weights.Layer("a", largest * np.resize([1, -1], 40).astype(np.float32), largest))
    assert all(np.isfinite(trace["y"]).all() for trace in traces)


def test_records_know_their_fields(run: Path) -> None:
    found = contents.read(run)
    assert all(isinstance(record, EpochRecord) for record in found.history) and len(found.dense_history) == 2
    assert list(found.clean) == ["dense", "particle 1", "particle 2", "all particles"]


def test_stored_speed_is_shown(copied: Path) -> None:
    row = {"network": "dense", "runtime": "PyTorch", "device": "cpu", "threads": 1, "batch": 64, "median": 4e-3,
           "low": 3e-3, "high": 5e-3, "samples": 9, "cpu": 4e-3, "macs": 1e6, "bytes": 10, "memory": None,
           "speedup": None, "share": None, "throughput": 1.0}  # fmt: skip
    pruned = row | {"network": "pruned", "median": 2e-3, "macs": 2.5e5, "speedup": 2.0, "share": 2 / 3}
    slow = {"layer": "conv9", "dense_ms": 3.0, "pruned_ms": 1.5, "dense_width": 64, "pruned_width": 17,
            "kept_macs": 0.25, "lost_ms": 0.75}  # fmt: skip
    timed = {"runtime": "onnxruntime"}
    int8 = row | {"network": "pruned", "runtime": "onnxruntime int8", "median": 1e-3, "cpu": 1e-3, "accuracy": 0.4321}
    rows = [row | timed, pruned | timed | {"accuracy": 0.5678}, int8, row, pruned]
    stored = {"rows": rows, "layers": [slow], "int8": "calibrated with <b>256</b>"}
    (copied / "speed.json").write_text(json.dumps(stored))
    assert main(["report", str(copied), "--quiet"]) == 0
    text = (copied / "report.html").read_text()
    assert "2.00×" in text and "67% of the saved FLOPs became saved time" in text and "conv9 (0.75 ms)" in text
    assert plots(text)["layers"]["data"][2]["x"] == [0.75]
    assert "43.21%" in text and "calibrated with &lt;b&gt;256" in text
    evaluated = contents.read(copied).clean["dense"].metrics["accuracy"]
    (_, points) = plots(text)["times"]["data"]
    assert points["text"] == ["dense", "particle 1", "particle 1 int8"]
    assert points["x"] == [0.0625, 0.0625, 0.015625] and points["y"] == pytest.approx([evaluated, 0.5678, 0.4321], 1e-4)
    (copied / "speed.json").write_text(json.dumps({"rows": [row | {"median": 0.0}], "layers": []}))
    assert main(["report", str(copied), "--quiet"]) == 2


def test_corruptions_are_kept_and_shown(copied: Path) -> None:
    assert main(["evaluate", str(copied), "--corrupt", "gaussian-blur:1,2"]) == 0
    assert main(["evaluate", str(copied), "--corrupt", "sharpen", "gaussian-blur:2"]) == 0
    assert main(["report", str(copied), "--quiet"]) == 0
    shown = plots((copied / "report.html").read_text())["corrupted-accuracy"]["data"]
    assert [trace["name"] for trace in shown if trace["showlegend"]] == ["dense", "particle 1", "all particles"]
    curves = [["clean"], ["gaussian-blur:1", "gaussian-blur:2"], ["sharpen"]]
    assert [trace["x"] for trace in shown if trace["name"] == "dense"] == curves


# ---- runs of other kinds


def test_single_weights_made_from_python(tmp_path: Path) -> None:
    x, y = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    config = dllp.Config(keep_flops=0.5, epochs=2, batch_size=32, particles=1, granularity="weight", init="fresh")
    dllp.prune(build("small_cnn", num_classes=10, in_channels=1), (x, y), config).save(tmp_path / "a")
    assert main(["report", str(tmp_path / "a"), "--quiet"]) == 0
    text = (tmp_path / "a" / "report.html").read_text()
    assert "histograms" in plots(text) and "dllp evaluate measures its networks" in text
    assert "Latency was not measured" in text and "--data" in text


def test_another_method_that_trains_after_the_cut(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--method", "fpgm", "--keep-params", "0.4", "--epochs", "1", "--finetune-epochs", "2", "--quiet"]
    assert main(["prune", *words, "--out", str(out)]) == 0
    assert main(["report", str(out), "--quiet"]) == 0
    text = (out / "report.html").read_text()
    assert "channels pruned by fpgm after training, and fine-tuned (epochs after the cut: 2)." in text
    assert "loss" in plots(text) and not {"cost", "temperature"} & plots(text).keys()  # it has no gates
    assert "gates and augmentation" not in text and "without gates" not in text
    assert [(mark["x"], mark["text"]) for mark in plots(text)["loss"]["layout"]["annotations"]] == [
        (1.5, "cut, then fine-tuned")
    ]
    network = dllp.load(out, build("small_cnn", num_classes=10, in_channels=1, image_size=8)).model
    found = contents.read(out)
    for layer in weights.split(out, found.recipes[0], found.gated):
        kept = network.get_submodule(layer.name).weight.detach().flatten()  # type: ignore[union-attr]
        np.testing.assert_array_equal(layer.slab, kept.numpy())  # as fine-tuning left them
    assert main(["report", str(out), str(out), "--out", str(tmp_path / "both.html"), "--quiet"]) == 0
    assert "40.0% of parameters" in (tmp_path / "both.html").read_text()


def test_transposed_convolutions_have_their_inputs_first(tmp_path: Path) -> None:
    whole, small = torch.randn(6, 4, 2, 2), torch.randn(3, 2, 2, 2)
    for name, weight in (("reference", whole), ("particle", small)):
        write_tensors(tmp_path / f"{name}-0.safetensors", {"up.weight": weight})
    (layer,) = weights.split(tmp_path, {"up": {"in": [0, 2, 5], "out": [1, 3]}}, [])
    lost = torch.ones(6, 4, dtype=torch.bool)
    lost[torch.tensor([[0], [2], [5]]), torch.tensor([1, 3])] = False
    np.testing.assert_array_equal(layer.spike, whole[lost].flatten().numpy())
    np.testing.assert_array_equal(layer.slab, small.flatten().numpy())


def test_a_regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = settle(tmp_path, monkeypatch)
    x = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    data = npy(tmp_path / "data", x, np.stack([x.sum(1)] * 7, 1))
    words = ["--data", str(data), "--model", f"{name}:wide", "--epochs", "2", "--keep-flops", "0.5", "--init", "fresh"]
    assert main(["prune", *words, "--out", "run", "--quiet"]) == 0
    assert main(["report", "run", "--model", f"{name}:wide", "--quiet"]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert "Error (RMSE)" in text and "accuracy" not in plots(text) and "reliability" not in plots(text)


def test_data_that_is_gone_is_said(copied: Path) -> None:
    settings = copied / "config.yaml"
    settings.write_text(settings.read_text().replace("data: digits", "data: /nowhere/at/all"))
    assert main(["report", str(copied), "--quiet"]) == 0
    text = (copied / "report.html").read_text()
    assert "Test images are not shown: no data set" in text and "reliability" in plots(text)


def test_answers_are_asked_for_where_the_folder_lacks_them(copied: Path, report_page: str) -> None:
    (copied / EXAMPLES).unlink()
    assert main(["report", str(copied), "--quiet"]) == 0
    again = (copied / "report.html").read_text()
    assert plots(again)["reliability"] == plots(report_page)["reliability"]
    assert again.count("<img") == report_page.count("<img")
