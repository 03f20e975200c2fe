"""Exported files give PyTorch's answers in their own runtime, for any batch; mistakes are one line."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import dllp
from dllp import artifacts, export
from dllp.baselines import find
from dllp.baselines import run as baseline
from dllp.cli import main
from dllp.errors import ConfigError, ExportError, StructureError
from dllp.structure import discover
from dllp.widths import kept_units, padded, rounded
from dllp.zoo import build
from tests.commands import ENVIRONMENT, one_line

SHAPE = (1, 8, 8)
CHOOSING = """
from torch import nn

class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 10)

    def forward(self, x):
        y = self.second(self.first(x).relu())
        return self.last((y if y.sum() > 0 else 2 * y).mean((2, 3)))
"""


@pytest.fixture
def result(run: Path) -> dllp.Result:
    return dllp.load(run, build("small_cnn", num_classes=10, in_channels=1, image_size=8))


def answers(path: Path, x: torch.Tensor) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {export.INPUT: x.numpy()})]


# ---- one particle


@pytest.mark.parametrize("batch", [1, 7])
def test_onnx_particle_answers_as_pytorch(run: Path, result: dllp.Result, tmp_path: Path, batch: int) -> None:
    path = tmp_path / "a" / "model.onnx"
    assert main(["export", str(run), "--particle", "2", "--out", str(path)]) == 0
    x = torch.randn(batch, *SHAPE)
    (logits,) = answers(path, x)
    torch.testing.assert_close(logits, result.slabs[1].network(x).detach(), atol=1e-5, rtol=1e-4)


def test_pt2_particle_answers_as_pytorch(run: Path, result: dllp.Result, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    assert main(["export", str(run), "--format", "pt2", "--out", str(path)]) == 0
    network = torch.export.load(path).module()
    for batch in (1, 3):
        x = torch.randn(batch, *SHAPE)
        torch.testing.assert_close(network(x), result.model(x), atol=1e-5, rtol=1e-4)


def test_difference_is_stated(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "model.onnx")]) == 0
    text = capsys.readouterr()
    assert "largest difference from PyTorch" in text.out and "onnxruntime" in text.out and not text.err


@pytest.mark.parametrize("particle", [1, None])
def test_modes_stay_as_they_were(result: dllp.Result, tmp_path: Path, particle: int | None) -> None:
    for slab in result.slabs:
        slab.network.train()
        next(slab.network.children()).eval()  # as one freezes a part of a network
    modes = [module.training for slab in result.slabs for module in slab.network.modules()]
    for pad_to in (1, 8):
        export.export(result, tmp_path / "a.pt2", SHAPE, particle=particle, pad_to=pad_to)
    with pytest.raises(ExportError):
        export.export(result, tmp_path / "b.pt2", (3, 8, 8), particle=particle)
    assert modes == [module.training for slab in result.slabs for module in slab.network.modules()]


# ---- the posterior


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_posterior_is_one_graph(result: dllp.Result, tmp_path: Path, format: export.Format) -> None:
    path = tmp_path / f"all.{format}"
    done = export.export(result, path, SHAPE, format=format, particle=None)
    assert done.outputs == ("prediction", "aleatoric", "epistemic") and done.difference < 1e-5
    assert done.bytes == path.stat().st_size
    x = torch.randn(5, *SHAPE)
    expected = result.posterior.predict(x)
    found = answers(path, x) if format == "onnx" else torch.export.load(path).module()(x)
    for a, b in zip(found, (expected.mean, expected.aleatoric, expected.epistemic), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    if format == "onnx":
        model = onnx.load(path)
        assert [output.name for output in model.graph.output] == list(done.outputs)
        assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param


def test_posterior_of_a_regression() -> None:
    networks: list[nn.Module] = [nn.Linear(3, 2), nn.Linear(3, 2)]
    noise = torch.tensor([0.5, 0.3])
    x = torch.randn(4, 3)
    mean, aleatoric, epistemic = export.Together(networks, noise, "regression")(x)
    expected = dllp.posterior.Posterior(networks, noise, "regression").predict(x)
    torch.testing.assert_close(mean, expected.mean)
    torch.testing.assert_close(aleatoric, expected.aleatoric)
    torch.testing.assert_close(epistemic, expected.epistemic)


# ---- raw images


def test_uint8_images_are_normalised_inside(run: Path, result: dllp.Result, tmp_path: Path) -> None:
    path = tmp_path / "raw.onnx"
    assert main(["export", str(run), "--uint8", "--posterior", "--out", str(path)]) == 0
    data = dllp.data.load("digits").test
    prediction, _, _ = answers(path, data.x[:32])
    expected = result.posterior.predict(data.inputs(slice(0, 32))).mean
    torch.testing.assert_close(prediction, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("known", "reason"), [({}, "does not say"), ({"dtype": "float32"}, "not trained on uint8")])
def test_uint8_needs_images(result: dllp.Result, tmp_path: Path, known: dict[str, str], reason: str) -> None:
    result.info["data"] = known
    with pytest.raises(ConfigError, match=reason):
        export.export(result, tmp_path / "a.onnx", SHAPE, uint8=True)


# ---- widths


def test_padding_changes_nothing_but_widths(result: dllp.Result, tmp_path: Path) -> None:
    slab = result.slabs[0]
    structure = discover(slab.reference, torch.randn(2, *SHAPE))
    keep = kept_units(slab.reference, structure, slab.recipe)
    assert slab.keep is not None and torch.equal(keep, slab.keep)
    network, macs = padded(slab.reference, structure, keep, 8)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.out_channels % 8 == 0 for m in convolutions) and macs >= result.sizes[0].macs
    x = torch.randn(4, *SHAPE)
    torch.testing.assert_close(network.eval()(x), slab.network(x), atol=1e-5, rtol=1e-4)
    done = export.export(result, tmp_path / "wide.onnx", SHAPE, pad_to=8)
    assert done.difference < 1e-5


@pytest.mark.parametrize("method", ["fpgm", "thinet"])  # which trains, or mends, what it has cut
def test_padding_knows_what_other_methods_did_after_the_cut(method: str, tmp_path: Path) -> None:
    network = build("small_cnn", num_classes=10, in_channels=1, image_size=8)
    config = dllp.Config(keep_flops=0.4, epochs=1, batch_size=128, init="fresh")
    data = dllp.data.load("digits").train.subset(range(256))
    result = baseline.prune(find(method), network, data, config, finetune_epochs=int(method == "fpgm")).result
    done = export.export(result, tmp_path / "wide.pt2", SHAPE, format="pt2", pad_to=8)
    assert done.difference < 1e-5


def test_rounding_keeps_the_budget(result: dllp.Result) -> None:
    slab = result.slabs[0]
    structure = discover(slab.reference, torch.randn(2, *SHAPE))
    keep = kept_units(slab.reference, structure, slab.recipe)
    network, macs = rounded(slab.reference, structure, keep, 8)
    assert macs <= result.sizes[0].macs
    assert all(m.out_channels % 8 == 0 for m in network.modules() if isinstance(m, nn.Conv2d))
    assert network(torch.randn(3, *SHAPE)).shape == (3, 10)


def test_foreign_recipe_is_refused(result: dllp.Result) -> None:
    reference = result.slabs[0].reference
    structure = discover(reference, torch.randn(2, *SHAPE))
    name = structure.groups[0].name
    with pytest.raises(StructureError, match="do not fit"):
        kept_units(reference, structure, {name: {"out": [0]}})


# ---- mistakes


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
        ({"particle": "1"}, "particle = '1': a whole number from 0"),
        ({"particle": 1.0}, "particle = 1.0: a whole number from 0"),
        ({"particle": True}, "particle = True: a whole number from 0"),
        ({"particle": -1}, "there is no particle 0"),
        ({"pad_to": "8"}, "pad_to = '8': a whole number is needed"),
        ({"pad_to": 1.5}, "pad_to = 1.5: a whole number is needed"),
        ({"shape": "3"}, "shape = '3': positive whole numbers are needed, such as (3, 32, 32)"),
        ({"shape": 3}, "shape = 3: positive"),
        ({"shape": (0, 3)}, "shape = (0, 3): positive"),
        ({"shape": ("1", "8", "8")}, "shape = ('1', '8', '8'): positive"),
        ({"shape": torch.zeros(99, 3)}, "shape = tensor([["),
        ({"shape": (10**12, 10**12)}, "is too large"),
        ({"path": 3}, "3 is no name of a file"),
        ({"path": "a\0b"}, r"the name a\x00b has a NUL byte"),
        ({"path": 300 * "a"}, "is too long"),
    ],
)
def test_mistakes_in_python_are_one_line(
    result: dllp.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dllp.DllpError) as caught:
        export.export(result, **({"path": "a.pt2", "shape": SHAPE, "format": "pt2"} | arguments))
    assert reason in str(caught.value) and len(str(caught.value)) < 250 and not list(tmp_path.iterdir())


def test_shapes_of_any_kind_are_understood(result: dllp.Result, tmp_path: Path) -> None:
    one: Any = np.int64(1)
    for shape in (list(SHAPE), torch.Size(SHAPE), tuple(np.array(SHAPE))):
        assert export.export(result, tmp_path / "a.pt2", cast(Any, shape), particle=one).difference < 1e-5


def test_file_is_asked_for(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run)]) == 2
    one_line(capsys, "--out FILE")
    assert main(["export", str(run), "--out", str(tmp_path)]) == 2
    one_line(capsys, "is a folder")


def test_network_that_fixes_its_batch_is_refused(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(2, 4) if x.sum() > 0 else x

    with pytest.raises(ExportError, match="cannot be traced"):
        export.write(Fixed(), tmp_path / "a.pt2", torch.ones(2, 4), ("output",), "pt2")


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
    export.write(Recurrent().eval(), tmp_path / "a", torch.ones(2, 5, 4), ("output",), format)
    with pytest.raises(ExportError, match="cannot be traced with a dynamic batch"):
        export.write(Choosing(), tmp_path / "b", torch.ones(2, 4), ("output",), format)
    assert capfd.readouterr() == ("", "") and logging.root.manager.disable == level


def test_the_command_says_one_line_of_what_cannot_be_exported(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(CHOOSING)
    words = ["--model", "nets:Choosing", "--keep-flops", "0.9", "--epochs", "1", "--no-dense", "--out", "run"]
    for command in (["prune", *words, "--quiet"], ["export", "run", "--model", "nets:Choosing", "--out", "a.onnx"]):
        call = [sys.executable, "-m", "dllp", *command]
        done = subprocess.run(call, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith("dllp: error: the network cannot be traced with a dynamic batch")


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
        export.packed(program, ("output",), "onnx")


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
    assert artifacts.read_run(folder)["info"].get("data") is None


def test_inputs_repeat() -> None:
    assert torch.equal(export.inputs(3, SHAPE), export.inputs(3, SHAPE))
    raw = export.inputs(3, SHAPE, uint8=True)
    assert raw.dtype == torch.uint8 and len(np.unique(raw.numpy())) > 50


def test_a_name_says_its_format() -> None:
    for name, wanted, found in (
        ("a.onnx", None, "onnx"), ("a.pt2", None, "pt2"), ("a", None, "onnx"), ("a.bin", "pt2", "pt2"),
        ("a.pt2", "pt2", "pt2"),
    ):  # fmt: skip
        assert export.format_of(Path(name), wanted) == found
    with pytest.raises(ConfigError, match=r"a.pt2 ends in .pt2, but format = onnx"):
        export.format_of(Path("a.pt2"), "onnx")
    with pytest.raises(ConfigError, match="format = 'tflite' is unknown: choose onnx or pt2"):
        export.format_of(Path("a.onnx"), "tflite")


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


@pytest.mark.parametrize("name", ["a.onnx", "a.pt2"])
def test_a_file_does_not_say_where_it_was_made(tmp_path: Path, name: str) -> None:
    data = (torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    config = dllp.Config(keep_flops=0.6, epochs=1, batch_size=32)
    result = dllp.prune(build("small_cnn", num_classes=10, in_channels=1, image_size=8), data, config)
    export.export(result, tmp_path / name, (1, 8, 8), particle=None)
    content = (tmp_path / name).read_bytes()
    for place in {Path(dllp.__file__).parent, Path(torch.__file__).parent, Path(__file__).parent}:
        assert str(place).encode() not in content
