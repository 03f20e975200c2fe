"""Exported files give PyTorch's answers in their own runtime, for any batch; mistakes are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dllp
from dllp.baselines import find
from dllp.baselines import run as baseline
from dllp.cli.main import main
from dllp.deploy import export
from dllp.errors import ConfigError, ExportError
from dllp.structure.groups import discover
from dllp.structure.padding import fill, kept_units, padded, rounded
from dllp.structure.slicing import cut, recipe
from dllp.zoo import build

SHAPE = (1, 8, 8)


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
    torch.testing.assert_close(logits, result.particles[1].network(x).detach(), atol=1e-5, rtol=1e-4)


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
    for each in result.particles:
        each.network.train()
        next(each.network.children()).eval()  # as one freezes a part of a network
    modes = [module.training for each in result.particles for module in each.network.modules()]
    for pad_to in (1, 8):
        export.export(result, tmp_path / "a.pt2", SHAPE, particle=particle, pad_to=pad_to)
    with pytest.raises(ExportError):
        export.export(result, tmp_path / "b.pt2", (3, 8, 8), particle=particle)
    assert modes == [module.training for each in result.particles for module in each.network.modules()]


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
    mean, aleatoric, epistemic = export.Ensemble(networks, noise, "regression")(x)
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


@pytest.mark.parametrize("known", [{}, {"dtype": "float32", "mean": [0.5], "std": [0.5]}])
def test_uint8_needs_images(result: dllp.Result, tmp_path: Path, known: dict[str, Any]) -> None:
    result.info["data"] = known
    with pytest.raises(ConfigError, match="does not hold the normalisation of uint8 images"):
        export.export(result, tmp_path / "a.onnx", SHAPE, uint8=True)


# ---- widths


def test_padding_changes_nothing_but_widths(result: dllp.Result, tmp_path: Path) -> None:
    particle = result.particles[0]
    structure = discover(particle.reference, torch.randn(2, *SHAPE))
    keep = kept_units(particle.reference, structure, particle.recipe)
    assert particle.keep is not None and torch.equal(keep, particle.keep)
    network, macs = padded(particle.reference, structure, keep, 8)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.out_channels % 8 == 0 for m in convolutions) and macs >= result.sizes[0].macs
    x = torch.randn(4, *SHAPE)
    torch.testing.assert_close(network.eval()(x), particle.network(x), atol=1e-5, rtol=1e-4)
    done = export.export(result, tmp_path / "wide.onnx", SHAPE, pad_to=8)
    assert done.difference < 1e-5


@pytest.mark.parametrize("method", ["fpgm", "thinet"])  # which trains, or mends, what it has cut
def test_padding_knows_what_other_methods_did_after_the_cut(method: str, tmp_path: Path) -> None:
    network = build("small_cnn", num_classes=10, in_channels=1, image_size=8)
    config = dllp.Config(keep_flops=0.4, epochs=1, batch_size=128, particles=2, init="fresh")
    data = dllp.data.load("digits").train.subset(range(256))
    result = baseline.prune(find(method), network, data, config, finetune_epochs=int(method == "fpgm")).result
    done = export.export(result, tmp_path / "wide.pt2", SHAPE, format="pt2", pad_to=8)
    assert done.difference < 1e-5


def test_padding_of_buffers_in_any_order_of_memory() -> None:
    small, large = nn.BatchNorm1d(3), nn.BatchNorm1d(5)
    large.register_buffer("mix", torch.zeros(2, 3).t())
    small.register_buffer("mix", torch.arange(6.0).view(3, 2))
    places = {name: torch.arange(value.numel()) for name, value in small.state_dict().items()}
    fill(large, small, places)
    assert torch.equal(large.state_dict()["mix"], small.state_dict()["mix"]) and not large.mix.is_contiguous()  # type: ignore[operator]
    assert large.running_var is not None and large.running_var.tolist() == [1.0] * 5


def test_padding_of_channels_last_kernels_of_one_pixel() -> None:
    """Contiguous in both orders of memory, with strides that differ."""
    small, large = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 3, 1).to(memory_format=torch.channels_last)
    fill(large, small, {"weight": torch.arange(8), "bias": torch.arange(2)})
    assert torch.equal(large.weight[:2], small.weight) and large.bias is not None and small.bias is not None
    assert torch.equal(large.bias[:2], small.bias)


def test_rounding_keeps_the_budget(result: dllp.Result) -> None:
    particle = result.particles[0]
    structure = discover(particle.reference, torch.randn(2, *SHAPE))
    keep = kept_units(particle.reference, structure, particle.recipe)
    network, macs = rounded(particle.reference, structure, keep, 8)
    assert macs <= result.sizes[0].macs
    assert all(m.out_channels % 8 == 0 for m in network.modules() if isinstance(m, nn.Conv2d))
    assert network(torch.randn(3, *SHAPE)).shape == (3, 10)


class Heads(nn.Module):
    """Attention in the outermost forward; after a cut its last view has a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.last = nn.Linear(12, 36), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.last(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)).mean(1)


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_a_forward_of_any_arguments_is_traced(format: export.Format) -> None:
    model, x = Heads().eval(), torch.randn(3, 5, 12)
    structure = discover(model, x)
    keep = torch.arange(structure.units) > 0
    small = cut(model, recipe(model, structure.groups, keep)).eval()
    found = export._loaded(export.packed(export.trace(small, x), format), format)(x[:2])
    found = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(found, small(x[:2]), atol=1e-5, rtol=1e-4)


# ---- shapes, inputs and names


def test_shapes_of_any_kind_are_understood(result: dllp.Result, tmp_path: Path) -> None:
    one: Any = np.int64(1)
    for shape in (list(SHAPE), torch.Size(SHAPE), tuple(np.array(SHAPE))):
        assert export.export(result, tmp_path / "a.pt2", cast(Any, shape), particle=one).difference < 1e-5


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


@pytest.mark.parametrize("name", ["a.onnx", "a.pt2"])
def test_a_file_does_not_say_where_it_was_made(tmp_path: Path, name: str) -> None:
    data = (torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    config = dllp.Config(keep_flops=0.6, epochs=1, batch_size=32)
    result = dllp.prune(build("small_cnn", num_classes=10, in_channels=1, image_size=8), data, config)
    export.export(result, tmp_path / name, (1, 8, 8), particle=None)
    content = (tmp_path / name).read_bytes()
    for place in {Path(dllp.__file__).parent, Path(torch.__file__).parent, Path(__file__).parent}:
        assert str(place).encode() not in content
