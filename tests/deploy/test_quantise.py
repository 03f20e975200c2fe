"""Static int8: what is written is what `dllp speed` times, and answers as floats do; mistakes are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import dllp
from dllp.cli.main import main
from dllp.data import Dataset, load
from dllp.deploy import quantise, runtimes, speed
from dllp.deploy.export import INPUT, export, inputs, write
from dllp.errors import ConfigError, DataError, ExportError
from dllp.zoo import build
from tests.support import pictures
from tests.support.commands import one_line

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


@pytest.fixture(scope="module")
def pruned(digits: Dataset) -> dllp.Result:
    """A trained network: of one that has learned nothing, classes are not worth comparing."""
    options = dict(keep_flops=0.4, epochs=6, batch_size=64, particles=2, init="fresh", device="cpu", progress=False)
    return dllp.prune(build("small_cnn", num_classes=10, in_channels=1), digits, **options)  # pyright: ignore[reportArgumentType]


def answers(path: Path, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {INPUT: x.numpy()})[0])


def test_int8_answers_as_floats_do(pruned: dllp.Result, digits: Dataset, tmp_path: Path) -> None:
    """Quantised in QDQ form with a scale for each output channel; a few test images are answered otherwise at most."""
    trained = pruned.model
    path, example = tmp_path / "a.onnx", inputs(2, SHAPE)
    write(trained, path, example, "onnx")
    found = quantise.images(digits, SHAPE, macs=1.0)
    assert found.test is not None and len(found.test) == len(digits.test)
    small = quantise.quantised(path, quantise.batches(found.calibration))
    floats, int8 = quantise.accuracy(path, found.test), quantise.accuracy(small, found.test)
    with torch.no_grad():
        answers = trained(found.test.inputs(slice(None))).argmax(1)
    assert floats == pytest.approx((answers == found.test.y).float().mean().item(), abs=0.003) and floats > 0.9
    assert int8 == pytest.approx(floats, abs=0.03)
    graph = onnx.load(small).graph
    kinds = [node.op_type for node in graph.node]
    assert "QuantizeLinear" in kinds and "DequantizeLinear" in kinds and "Conv" in kinds
    stored = {tensor.name: tensor for tensor in graph.initializer}
    scales = {tuple(stored[node.input[0]].dims): tuple(stored[node.input[1]].dims) for node in graph.node
              if node.op_type == "DequantizeLinear" and stored.get(node.input[0], onnx.TensorProto()).data_type
              == onnx.TensorProto.INT8}  # fmt: skip
    widths = {tuple(m.weight.shape): (len(m.weight),) for m in trained.modules() if isinstance(m, nn.Conv2d)}
    assert widths.items() <= scales.items()


def test_images_of_a_large_network_and_from_disk(tmp_path: Path) -> None:
    """A costly network's accuracy is measured on fewer test images; streamed images are decoded for calibration."""
    found = quantise.images(load("digits"), SHAPE, macs=quantise.WORK / 50)
    assert found.test is not None and len(found.test) == 50 and found.test.y.bincount().min() >= 4
    data = pictures.load(pictures.folder(tmp_path / "data"))
    found = quantise.images(data, (3, 16, 16), macs=1.0)
    seen = torch.cat(list(quantise.batches(found.calibration)))
    assert seen.shape == (24, 3, 16, 16) and seen.dtype == torch.float32


def test_an_int8_file_runs_is_small_and_agrees_with_the_network(
    pruned: dllp.Result, digits: Dataset, tmp_path: Path
) -> None:
    floats = pruned.export(tmp_path / "float.onnx")
    done = pruned.export(tmp_path / "int8.onnx", int8=True, data=digits)
    assert floats.agreement is None and floats.accuracy is None
    assert done.bytes == done.path.stat().st_size < floats.bytes / 2 and done.outputs == ("logits",)
    kinds = {tensor.data_type for tensor in onnx.load(done.path).graph.initializer if len(tensor.dims) > 1}
    assert kinds == {onnx.TensorProto.INT8}  # all that is no bias and no scale
    x, y = digits.test.inputs(slice(None)), digits.test.y.numpy()
    found, wanted = answers(done.path, x).argmax(1), answers(floats.path, x).argmax(1)
    assert (found == wanted).mean() > 0.97
    assert done.accuracy == pytest.approx(((wanted == y).mean(), (found == y).mean()))
    seen = torch.cat(list(quantise.batches(quantise.images(digits, SHAPE, 1.0).calibration)))
    a, b = answers(floats.path, seen), answers(done.path, seen)
    same = (a.argmax(1) == b.argmax(1)).mean()
    assert done.agreement == pytest.approx(same) and same > 0.97
    assert done.difference == pytest.approx(abs(a - b).max()) and done.difference > 0


def test_it_is_the_file_that_speed_times(
    pruned: dllp.Result, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "SAMPLE", 0.0)
    monkeypatch.setattr(runtimes, "FEWEST", 1)
    monkeypatch.setattr(speed, "peak_bytes", lambda *arguments: None)
    timed, quantised = list[Path](), quantise.quantised

    def kept(path: Path, batches: Any) -> Path:
        timed.append(quantised(path, batches).rename(tmp_path / f"timed-{len(timed)}.onnx"))
        return timed[-1]

    subjects = speed.subjects(pruned, SHAPE, round_to=1)
    images = speed.images(digits, SHAPE, subjects[0].macs)
    with monkeypatch.context() as patched:
        patched.setattr(quantise, "quantised", kept)
        rows = speed.measure(subjects, SHAPE, batches=[1], threads=[1], seconds=0, images=images)
    done = pruned.export(tmp_path / "int8.onnx", int8=True, data="digits")
    x = digits.test.inputs(slice(None))
    np.testing.assert_array_equal(answers(done.path, x), answers(timed[1], x))
    (row,) = (r for r in rows if r.network == speed.PRUNED and r.runtime == speed.INT8 and r.device == "cpu")
    assert done.accuracy is not None and row.accuracy == done.accuracy[1]


def test_the_command_calibrates_with_the_data_of_the_run(
    run: Path, digits: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raw.onnx"
    assert main(["export", str(run), "--int8", "--uint8", "--pad-to", "8", "--out", str(path)]) == 0
    shown = capsys.readouterr()
    assert "uint8 input" in shown.out and not shown.err
    right = (answers(path, digits.test.x).argmax(1) == digits.test.y.numpy()).mean()
    assert "% of the calibration examples get the class that floats give; test accuracy " in shown.out
    assert f"test accuracy {right:.2%}, " in shown.out
    assert tmp_path.as_posix().encode() not in path.read_bytes()


def test_examples_without_a_test_split_calibrate_too(tmp_path: Path) -> None:
    """Pairs of tensors have no accuracy; a regression has no classes."""
    x = torch.randn(300, 6)
    options = dict(keep_flops=0.6, epochs=1, init="fresh", device="cpu", progress=False)
    for y, outputs in (((x.sum(1) > 0).long(), 2), (x.sum(1, keepdim=True), 1)):
        network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, outputs))
        task = "classification" if outputs == 2 else "regression"
        result = dllp.prune(network, (x, y), task=task, gate_linear=True, **options)  # pyright: ignore[reportArgumentType]
        done = result.export(tmp_path / "a.onnx", int8=True, data=(x, y))
        assert done.accuracy is None and (done.agreement is not None) == (outputs == 2) and done.difference > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--format", "pt2"], "int8 is written as onnx alone, not as pt2"),
        (["--format", "huggingface"], "int8 is written as onnx alone, not as huggingface"),
        (["--posterior"], "int8 is for one particle of a network of one input"),
        (["--data", "nowhere"], "called nowhere: give digits, cifar10 or a folder): name some with --data"),
    ],
)
def test_mistakes_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["export", str(run), "--int8", "--out", str(tmp_path / "a"), *words]) == 2
    one_line(capsys, reason)
    assert not list(tmp_path.iterdir())


def test_a_run_that_does_not_name_its_data_asks_for_them(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "config.yaml").unlink()
    words = ["export", str(copied), "--model", "small_cnn", "--int8", "--out", str(tmp_path / "a.onnx")]
    assert main(words) == 2
    one_line(capsys, "name the run's data with --data")
    assert main([*words, "--data", "digits"]) == 0


def test_mistakes_in_python_leave_no_file(
    result: dllp.Result, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, example = tmp_path / "a.onnx", {"x": torch.randn(2, *SHAPE)}
    with pytest.raises(ConfigError, match=r"give data, as for dllp\.prune"):
        export(result, path, SHAPE, int8=True)
    with pytest.raises(ConfigError, match="a network of one input"):
        result.export(path, int8=True, data=digits, example=example)
    with pytest.raises(DataError, match=r"inputs of shape \(1, 16, 16\), not \(1, 8, 8\): give"):
        export(result, path, SHAPE, int8=True, data=(torch.randn(8, 1, 16, 16), torch.arange(8)))

    def refusing(path: Path, batches: Any) -> Path:
        raise ValueError("no form for it\nTraceback")

    monkeypatch.setattr(quantise, "quantised", refusing)
    with pytest.raises(ExportError, match=r"^onnxruntime cannot quantise it \(no form for it\): leave out int8$"):
        export(result, path, SHAPE, int8=True, data=digits)
    assert not list(tmp_path.iterdir())
