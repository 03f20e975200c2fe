"""What cannot be exported, and what the exporter says of it: one line, and no file."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import dllp
from dllp.cli.main import main
from dllp.deploy import export
from dllp.errors import ExportError, StructureError
from dllp.runs.result import read_run
from dllp.structure.groups import discover
from dllp.structure.padding import kept_units
from dllp.zoo import build
from tests.support.commands import one_line

SHAPE = (1, 8, 8)


def test_a_graph_that_onnx_cannot_run_is_one_line() -> None:
    """As the exporter writes some layers: an LSTM in both directions with projections."""
    unknown = onnx.helper.make_node("NoSuchOperator", ["input"], ["output"])
    given, made = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("input", "output")
    )
    model = onnx.helper.make_model(onnx.helper.make_graph([unknown], "graph", [given], [made]))
    with pytest.raises(ExportError, match=r"^ONNX cannot run the network \(.*\): use format = pt2$"):
        export._loaded(model.SerializeToString(), "onnx")


def test_foreign_recipe_is_refused(result: dllp.Result) -> None:
    reference = result.particles[0].reference
    structure = discover(reference, torch.randn(2, *SHAPE))
    name = structure.groups[0].name
    with pytest.raises(StructureError, match="do not fit"):
        kept_units(reference, structure, {name: {"out": [0]}})


@pytest.mark.parametrize("command", [("export", "--out", "a.onnx"), ("speed",)])
def test_missing_extra_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    assert main([command[0], str(run), *command[1:]]) == 2
    one_line(capsys, "onnxruntime is not installed", "pip install 'dllp[onnx]'")


@pytest.mark.parametrize("command", [("export", "--out", "a.onnx"), ("speed",)])
def test_folder_without_a_finished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main([command[0], str(tmp_path / "nowhere"), *command[1:]]) == 2
    one_line(capsys, "nowhere is not a folder")
    (tmp_path / "log.jsonl").touch()
    assert main([command[0], str(tmp_path), *command[1:]]) == 2
    one_line(capsys, str(tmp_path), "finished run")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--particle", "3"], "no particle 3"),
        (["--particle", "1", "--posterior"], "exclude each other"),
        (["--pad-to", "0"], "pad_to = 0"),
        (["--format", "tflite"], "expected onnx, pt2"),
        (["--shape", "3", "8", "8"], "cannot be traced"),
    ],
)
def test_mistakes_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "a.onnx"), *words]) == 2
    one_line(capsys, reason)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"particle": -1}, "there is no particle 0"),
        ({"pad_to": "8"}, "pad_to = '8': a whole number is needed"),
        ({"pad_to": 1.5}, "pad_to = 1.5: a whole number is needed"),
    ],
)
def test_mistakes_in_python_are_one_line(
    result: dllp.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dllp.DllpError) as caught:
        export.export(result, **({"path": "a.pt2", "shape": SHAPE, "format": "pt2"} | arguments))
    assert reason in str(caught.value) and len(str(caught.value)) < 250 and not list(tmp_path.iterdir())


def test_file_is_asked_for(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run)]) == 2
    one_line(capsys, "required: --out; see dllp export --help")
    assert main(["export", str(run), "--out", str(tmp_path)]) == 2
    one_line(capsys, f"cannot write {tmp_path}: it is a folder; give a file")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x)[0][:, -1])


class Choosing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else x + 1


class Counting(nn.Module):
    def __init__(self, count: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.token, self.count = nn.Parameter(torch.zeros(1, 4)), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.token.expand(self.count(x), -1), x], 1)


def test_a_forward_that_fixes_the_batch_is_told_what_to_use() -> None:
    for count in (len, lambda x: int(x.shape[0]), lambda x: 2):
        with pytest.raises(ExportError, match=r"dynamic batch \(its forward fixes the batch's size.*: use x\.shape"):
            export.trace(Counting(count), torch.ones(2, 4))
    export.trace(Counting(lambda x: x.shape[0]), torch.ones(2, 4))


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_the_exporter_says_nothing_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], format: export.Format
) -> None:
    """Neither of a network that it takes, warnings being errors here, nor of one whose graph it would print."""
    level = logging.root.manager.disable
    export.write(Recurrent().eval(), tmp_path / "a", torch.ones(2, 5, 4), format)
    with pytest.raises(ExportError, match="cannot be traced with a dynamic batch"):
        export.write(Choosing(), tmp_path / "b", torch.ones(2, 4), format)
    assert capfd.readouterr() == ("", "") and logging.root.manager.disable == level


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_a_full_disk_is_one_line(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], format: str, limited: Callable[[int], None]
) -> None:
    limited(1000)
    assert main(["export", str(run), "--format", format, "--out", str(tmp_path / "model")]) == 2
    one_line(capfd, f"cannot write {tmp_path / 'model'}: File too large")
    assert not list(tmp_path.iterdir())


def test_what_the_exporter_cannot_write_is_not_the_networks_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    program = export.trace(nn.Linear(3, 2), torch.ones(2, 3))
    monkeypatch.setattr(torch.onnx, "export", full)
    with pytest.raises(ExportError, match=r"^the exporter cannot write: No space left on device"):
        export.packed(program, "onnx")


def test_wrong_file_is_not_written(result: dllp.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = build("small_cnn", num_classes=10, in_channels=1, image_size=8).eval()
    monkeypatch.setattr(export, "wider", lambda *arguments: other)
    with pytest.raises(ExportError, match="differs from PyTorch"):
        export.export(result, tmp_path / "a.onnx", SHAPE, pad_to=8)
    assert not list(tmp_path.iterdir())


def test_run_from_python_needs_network_and_shape(
    result: dllp.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result.info.pop("data")
    folder = result.save(tmp_path / "run")
    out = str(tmp_path / "a.onnx")
    assert main(["export", str(folder), "--out", out]) == 2
    one_line(capsys, "--model")
    assert main(["export", str(folder), "--out", out, "--model", "small_cnn"]) == 2
    one_line(capsys, "--shape 3 32 32")
    assert main(["export", str(folder), "--out", out, "--model", "small_cnn", "--shape", "1", "8", "8"]) == 2
    one_line(capsys, "factory")
    assert read_run(folder).info.get("data") is None


class Attention(nn.Module):
    """Of tensors with three dimensions, which ONNX's exporter has no form for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 12, 3), nn.Conv2d(12, 8, 3), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).relu()).flatten(2).transpose(1, 2)
        return self.last(nn.functional.scaled_dot_product_attention(y, y, y).mean(1))


def test_what_onnx_cannot_say_is_told_with_its_cause(tmp_path: Path) -> None:
    data = (torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    config = dllp.Config(keep_flops=0.6, epochs=1, batch_size=32, particles=1)
    result = dllp.prune(Attention(), data, config, filter_fn=lambda module, name: name == "first")
    with pytest.raises(ExportError, match=r"ONNX has no form for the network \(.*4D query.*\): use format = pt2"):
        export.export(result, tmp_path / "a.onnx", (1, 8, 8))
    assert export.export(result, tmp_path / "a.pt2", (1, 8, 8)).format == "pt2"
