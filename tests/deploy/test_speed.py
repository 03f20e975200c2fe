"""What `dllp speed` measures and how it compares; no test asserts a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import dllp
from dllp.cli import commands, progress
from dllp.cli.main import main
from dllp.cli.open_run import Info, StoredRun
from dllp.data import ArrayData, load
from dllp.deploy import memory, quantise, runtimes, speed
from dllp.deploy.export import INPUT, inputs, write
from dllp.deploy.layers import CONVOLUTIONS, _calls, _kernel_places, _kernel_times, _plain_name, _profile
from dllp.errors import ArtifactError, ConfigError, DataError
from dllp.runs.result import read_run
from dllp.runs.settings import Task
from dllp.structure.groups import discover
from dllp.zoo import build
from tests.support.commands import one_line

SHAPE = (1, 8, 8)


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three single calls for each network: what they take does not matter here."""
    monkeypatch.setattr(runtimes, "SAMPLE", 0.0)
    monkeypatch.setattr(runtimes, "FEWEST", 3)


def memory_is_read() -> bool:
    return Path("/proc/self/clear_refs").exists()


def row(network: str, median: float, macs: float, runtime: str = speed.ONNX, batch: int = 64) -> speed.Row:
    return speed.Row(network, runtime, "cpu", 1, batch, median, median, median, 7, median, macs, 100)


def rows_of(x: torch.Tensor) -> set[bytes]:
    return {example.numpy().tobytes() for example in x}


def test_command_measures_every_setting(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated, tested = list[torch.Tensor](), list[torch.Tensor]()
    quantised, accuracy = quantise.quantised, quantise.accuracy

    def watched_quantised(path: Path, batches: Sequence[torch.Tensor]) -> Path:
        calibrated.extend(batches)
        return quantised(path, batches)

    def watched_accuracy(path: Path, data: ArrayData) -> float:
        tested.append(data.inputs(slice(None)))
        return accuracy(path, data)

    monkeypatch.setattr(quantise, "quantised", watched_quantised)
    monkeypatch.setattr(quantise, "accuracy", watched_accuracy)
    path = tmp_path / "speed.json"
    words = ["--batch", "1", "2", "--seconds", "0", "--json", str(path)]
    assert main(["speed", str(run), *words]) == 0
    shown = capsys.readouterr().out
    assert "onnxruntime" in shown and "rounded to 8" in shown
    report = json.loads(path.read_text())
    assert json.loads((run / "speed.json").read_text()) == report  # for the report of the run
    rows = report["rows"]
    networks = ["dense", "pruned", "pruned, padded to 8", "pruned, rounded to 8"]
    for runtime in (speed.TORCH, speed.ONNX):
        for batch in (1, 2):
            found = [r for r in rows if (r["runtime"], r["batch"], r["threads"]) == (runtime, batch, 1)]
            cpu = [r for r in found if r["device"] == "cpu"]
            assert [r["network"] for r in cpu] == networks
            assert all(r["speedup"] is not None and r["share"] is not None for r in cpu[1:])
            assert cpu[0]["speedup"] is None and cpu[1]["bytes"] < cpu[0]["bytes"]
    eight = {r["network"] for r in rows if r["runtime"] == speed.INT8}
    assert eight == {"dense", "pruned", "pruned, padded to 8"}
    measured = {(r["network"], r["runtime"]): r["accuracy"] for r in rows if r["accuracy"] is not None}
    both = (speed.DENSE, speed.PRUNED)
    assert measured.keys() == {(name, runtime) for name in both for runtime in (speed.ONNX, speed.INT8)}
    evaluated = {r["name"]: r["metrics"]["accuracy"] for r in json.loads((run / "evaluation.json").read_text())["rows"]}
    for name, stored in zip(both, ("dense", "particle 1"), strict=True):
        assert measured[name, speed.ONNX] == pytest.approx(evaluated[stored], abs=0.003)  # one of 360 examples
        assert measured[name, speed.INT8] == pytest.approx(measured[name, speed.ONNX], abs=0.05)
    data = load("digits")
    train, test = (rows_of(part.inputs(slice(None))) for part in (data.train, data.test))
    assert len(train & test) == 0 and rows_of(torch.cat(tested)) == test
    seen = rows_of(torch.cat(calibrated))
    assert seen <= train and len(seen) == quantise.CALIBRATION
    assert "calibrated with 256 training examples; accuracy on 360 of 360 test examples" in shown
    peaks = {(r["network"], r["runtime"]): r["memory"] for r in rows if r["device"] == "cpu"}
    assert len(peaks) == 11 and all(peak is not None and peak > 0 for peak in peaks.values() if memory_is_read())
    assert all(0 < r["low"] <= r["median"] <= r["high"] and r["samples"] >= runtimes.FEWEST for r in rows)
    assert all(r["throughput"] == pytest.approx(r["batch"] / r["median"]) for r in rows)
    assert report["environment"]["onnxruntime"] and [layer["layer"] for layer in report["layers"]]


def test_share_of_the_flops_that_became_time() -> None:
    rows = speed.compared([
        row("dense", 4.0, 100.0), row("pruned", 2.0, 25.0), row("pruned", 1.0, 25.0, speed.INT8),
        row("dense", 1.0, 100.0, batch=1), row("pruned", 1.25, 25.0, batch=1), row("pruned", 1.0, 25.0, speed.TORCH),
        row("dense", 2.0, 100.0, speed.INT8),
    ])  # fmt: skip
    assert [r.speedup for r in rows] == [None, 2.0, 4.0, None, 0.8, None, 2.0]
    assert rows[1].share == pytest.approx(0.5 / 0.75)  # half of the time for three quarters of the FLOPs
    assert rows[4].share == pytest.approx(-0.25 / 0.75)  # slower than before
    assert rows[0].share is None and rows[2].share is None and rows[5].share is None and rows[6].share is None
    same = speed.compared([row("dense", 4.0, 100.0), row("pruned", 2.0, 100.0)])
    assert same[1].speedup == 2.0 and same[1].share is None


def test_data_that_cannot_be_opened_is_one_line(run: Path) -> None:
    known = StoredRun(run, read_run(run), {"data": "digits"}, Task(), Info())
    found, line = commands._images(known, SHAPE, 1.0)
    assert found is not None and line.endswith("accuracy on 360 of 360 test examples")
    for stored, shape, why in (
        (replace(known, settings={}), SHAPE, "does not name its data"),
        (replace(known, task=Task(data=str(run / "nowhere"))), SHAPE, "nowhere"),
        (known, (1, 16, 16), "inputs of shape (1, 8, 8), not (1, 16, 16)"),
    ):
        found, line = commands._images(stored, shape, 1.0)
        assert found is None and "random inputs, accuracy not measured: " in line and why in line and "\n" not in line
    record = replace(known.record, config={"task": "binary"})
    found, line = commands._images(replace(known, record=record), SHAPE, 1.0)
    assert found is not None and found.test is None and "accuracy" not in line


def test_calls_take_turns() -> None:
    order: list[str] = []
    samples = runtimes.interleaved([lambda: order.append("a"), lambda: order.append("b")], 0)
    assert [len(part) for part in samples] == [runtimes.FEWEST] * 2
    assert "".join(order) == "aabb" + "abbaab"  # two calls of each to warm up, then rounds there and back


def test_single_weights_have_no_widths() -> None:
    x, y = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    config = dllp.Config(keep_flops=0.5, epochs=1, batch_size=32, particles=1, granularity="weight", init="fresh")
    result = dllp.prune(build("small_cnn", num_classes=10, in_channels=1), (x, y), config)
    found = speed.subjects(result, SHAPE)
    assert [subject.name for subject in found] == ["dense", "pruned"] and found[0].macs == found[1].macs


def test_round_to_one_adds_nothing(result: dllp.Result) -> None:
    assert [s.name for s in speed.subjects(result, SHAPE, round_to=1)] == ["dense", "pruned"]
    with pytest.raises(ConfigError, match="round_to = 0"):
        speed.subjects(result, SHAPE, round_to=0)


def test_flops_are_those_of_the_shape(result: dllp.Result) -> None:
    """Those of the run for its own inputs; four times a convolution's for twice the sides, the head's once."""
    dense, pruned = speed.subjects(result, SHAPE, round_to=1)
    assert (dense.macs, pruned.macs) == (result.dense.macs, result.sizes[0].macs)
    larger = speed.subjects(result, (1, 16, 16), round_to=1)
    for before, after in zip((dense, pruned), larger, strict=True):
        head = sum(m.weight.numel() for m in before.network.modules() if isinstance(m, torch.nn.Linear))
        assert after.macs - head == 4 * (before.macs - head)


def test_threads_come_back(result: dllp.Result) -> None:
    before = torch.get_num_threads()
    dense = speed.subjects(result, SHAPE, round_to=1)[:1]
    rows = speed.measure(dense, SHAPE, batches=[1], threads=[2], seconds=0)
    rows = [row for row in rows if row.device == "cpu"]
    assert torch.get_num_threads() == before and {r.threads for r in rows} == {2}
    assert {r.runtime for r in rows} == {speed.TORCH, speed.ONNX, speed.INT8}
    assert all(r.accuracy is None for r in rows)  # no images were given
    assert all(r.memory is not None and r.memory > 0 for r in rows if memory_is_read())


def test_a_full_disk_is_one_line(
    run: Path, result: dllp.Result, tmp_path: Path, capfd: pytest.CaptureFixture[str], limited: Callable[[int], None]
) -> None:
    path = tmp_path / "model.onnx"
    write(result.model, path, inputs(2, SHAPE), "onnx")
    limited(1000)
    with pytest.raises(ArtifactError, match=r"cannot write .*model.*json: it is cut off"):
        _kernel_times(path, inputs(2, SHAPE), 10)
    assert main(["speed", str(run), "--quiet"]) == 2
    one_line(capfd, "cannot write", "File too large")


def test_layers_are_named_with_their_widths(result: dllp.Result) -> None:
    dense, pruned = speed.subjects(result, SHAPE, round_to=1)
    found = speed.layers(dense, pruned, SHAPE, batch=2, runs=2)
    convolutions = [name for name, m in dense.network.named_modules() if isinstance(m, nn.Conv2d)]
    assert [layer.layer for layer in found] == convolutions
    kept = [m.out_channels for m in pruned.network.modules() if isinstance(m, nn.Conv2d)]
    assert [layer.pruned_width for layer in found] == kept
    assert all(0 < layer.kept_macs <= 1 for layer in found)


class Branches(nn.Module):
    """A block with a shortcut of its own: onnxruntime runs it before the last convolution of the other branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.conv3, self.norm3 = nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.shortcut, self.norm4 = nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.conv1(x)).relu()
        y = self.norm3(self.conv3(self.norm2(self.conv2(x)).relu()))
        return (y + self.norm4(self.shortcut(x))).relu().mean((2, 3))


def test_times_go_to_the_layer_whose_kernel_took_them(tmp_path: Path) -> None:
    network, path = Branches().eval(), tmp_path / "model.onnx"
    write(network, path, inputs(2, SHAPE), "onnx")
    names, places = [name for name, _ in _calls(network, inputs(1, SHAPE), (nn.Conv2d,))], _kernel_places(path)
    found = {}
    for event in _profile(path, {INPUT: inputs(2, SHAPE).numpy()}, 1):
        if event["args"].get("op_name") in CONVOLUTIONS and event["name"].endswith("_kernel_time"):
            (weight,) = event["args"]["input_type_shape"][1].values()
            found[names[places[_plain_name(event["name"])]]] = weight[1]  # its inputs
    assert found == {"conv1": 1, "conv2": 16, "conv3": 32, "shortcut": 16}
    assert len(_kernel_times(path, inputs(2, SHAPE), 1)) == 4


def test_widths_of_linear_layers_are_not_positions() -> None:
    subject = speed.Subject("dense", nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 3)), 1.0)
    found = speed.torch_layers(subject, subject, (7, 4), batch=2, runs=1)
    assert [layer.dense_width for layer in found] == [12, 3]


def test_what_is_spoken_of_was_measured_as_the_layers_were() -> None:
    rows = [row(name, median, macs, runtime) for runtime in (speed.TORCH, speed.ONNX)
            for name, median, macs in (("dense", 2.0, 100.0), ("pruned", 1.0, 25.0))]  # fmt: skip
    spoken = speed.headline(speed.compared(rows))
    assert spoken is not None and spoken.runtime == speed.ONNX
    spoken = speed.headline(speed.compared(rows[:2]))
    assert spoken is not None and spoken.runtime == speed.TORCH


def test_a_brief_look_needs_no_export(result: dllp.Result) -> None:
    dense, pruned = speed.subjects(result, SHAPE, round_to=1)
    rows = speed.measure_torch([dense, pruned], SHAPE, batches=[1, 2], seconds=0)
    assert [(r.network, r.batch) for r in rows] == [("dense", 1), ("pruned", 1), ("dense", 2), ("pruned", 2)]
    assert rows[1].bytes < rows[0].bytes and rows[1].share is not None
    found = speed.torch_layers(dense, pruned, SHAPE, batch=2, runs=2)
    kept = {name: m for name, m in pruned.network.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    assert [layer.layer for layer in found] == list(kept)
    total = sum(layer.kept_macs * macs for layer, macs in zip(found, _macs(dense.network), strict=True))
    assert total == pytest.approx(pruned.macs)  # so the layers' shares are those of the whole
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in dense.network.modules())


def _macs(network: nn.Module) -> list[float]:
    """Multiply-accumulates of each layer for one example, as the run counts them."""
    return [layer.macs for layer in discover(network, inputs(2, SHAPE)).layers]


def test_lost_time_is_what_the_flops_do_not_explain() -> None:
    assert speed.LayerTime("a", 10.0, 6.0, 64, 16, 0.25).lost_ms == pytest.approx(3.5)


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_peak_memory_grows_with_the_batch(tmp_path: Path, format: str) -> None:
    if not memory_is_read():
        pytest.skip("peak memory is read from Linux's /proc")
    network = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    path = tmp_path / f"a.{format}"
    write(network, path, inputs(2, (3, 32, 32)), format)  # type: ignore[arg-type]
    small, large = (memory.peak_bytes(path, (batch, 3, 32, 32)) for batch in (1, 256))
    activations = 255 * 64 * 32 * 32 * 4
    assert small is not None and large is not None and large - small >= 0.9 * activations


def test_table_and_slow_layers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = speed.compared([row("dense", 4e-3, 1e6), row("pruned", 2e-3, 2.5e5), row("pruned", 1e-3, 2.5e5, speed.INT8)])
    slow = [speed.LayerTime("[red]conv", 10.0, 6.0, 64, 17, 0.25), speed.LayerTime("fine", 10.0, 2.0, 64, 16, 0.25)]
    progress.show_speed([*rows, replace(rows[0], device="cuda")], slow, "a [title]")
    shown = capsys.readouterr().out
    for text in (
        "a [title]",
        "2.00x",
        "67%",
        "pruned int8",
        "[red]conv (64 -> 17 channels): 10.00 -> 6.00 (2.50)",
        "67% of the saved FLOPs became time: onnxruntime, cpu, 1 thread, batch 64",
    ):
        assert text in shown
    assert "fine" not in shown and "cuda" in shown
    ideal = speed.compared([row("dense", 4e-3, 1e6), row("pruned", 0.9e-3, 2.5e5)])
    progress.show_speed(ideal, slow, "")
    shown = capsys.readouterr().out
    assert "103% of the saved FLOPs became time" in shown and "conv" not in shown  # nothing holds it back


@pytest.mark.parametrize(("words", "reason"), [(["--batch", "0"], "batch sizes"), (["--particle", "9"], "particle 9")])
def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str) -> None:
    assert main(["speed", str(run), *words]) == 2
    one_line(capsys, reason)


@pytest.mark.cuda
def test_on_cuda_networks_stay_as_they_were_and_memory_is_their_own() -> None:
    """Weights can still be trained and exported, and no library's working memory is counted."""
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)).eval()
    found = [speed.Subject(name, network, 1.0) for name in (speed.DENSE, speed.PRUNED)]
    disk = dict.fromkeys((speed.DENSE, speed.PRUNED), 1)
    rows = speed.torch_rows(found, disk, {}, inputs(4, SHAPE).cuda(), seconds=0.01)
    assert all(parameter.device.type == "cpu" and not parameter.is_inference() for parameter in network.parameters())
    weights = sum(parameter.nbytes for parameter in network.parameters())
    assert all(row.memory is not None and weights <= row.memory < 2**20 for row in rows)
    assert rows[0].memory == rows[1].memory, "the first call costs no more than the second"


def test_one_line_says_what_was_measured_what_was_promised_and_what_to_try() -> None:
    rows = speed.compared([row("dense", 2.0, 100.0, speed.ONNX), row("pruned", 1.6, 40.0, speed.ONNX)])
    slow = speed.LayerTime("conv2", 1.0, 0.9, 16, 4, 0.25)
    line = speed.truth(rows, [slow])
    assert line.startswith("1.25x as fast as dense, 2.50x by FLOPs") and "layers conv2; try" in line
    assert "--keep-latency 0.4" in line
    fast = speed.compared([row("dense", 2.0, 100.0, speed.ONNX), row("pruned", 0.8, 40.0, speed.ONNX)])
    assert "try" not in speed.truth(fast, [slow]) and speed.truth(rows[:1], []) == ""


def test_advice_names_what_was_measured_to_be_faster() -> None:
    rows = [row("dense", 4.0, 100.0), row("pruned", 2.0, 50.0), row("dense", 2.0, 100.0, speed.INT8)]
    padded = [row("pruned, padded to 8", 1.0, 60.0), row("pruned, rounded to 8", 0.5, 50.0)]
    eight = [row("pruned", 1.2, 50.0, speed.INT8), row("pruned, padded to 8", 0.8, 60.0, speed.INT8)]
    line = speed.advice(speed.compared([*rows, *padded, *eight]))
    assert line.startswith("odd numbers of channels hold it back: ")
    assert line.count(";") == 2 and "--pad-to 8 it gives the same answers 2.00x" in line
    assert "--round-to 8 gives a network 4.00x" in line and line.endswith(
        "int8 is 1.50x as fast with --pad-to 8 --int8"
    )
    assert "round" not in speed.advice(speed.compared([*rows, padded[0]]))
    even = [row("pruned", 1.2, 50.0, speed.INT8), row("pruned, padded to 8", 1.2, 60.0, speed.INT8)]
    assert "int8" not in speed.advice(speed.compared([*rows, *padded, *even]))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 16), nn.Linear(4, 16), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.left(x).relu(), self.right(z).relu()], 1))


def test_networks_of_several_inputs_are_timed_judged_and_shown(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, z = torch.randn(60, 6, generator=generator), torch.randn(60, 4, generator=generator)
    y = torch.arange(60) % 3
    options = dict(epochs=1, keep_flops=0.6, device="cpu", progress=False, init="fresh", particles=2)
    result = dllp.prune(Pair(), (x, z, y), **options)  # pyright: ignore[reportArgumentType]
    for example in ({"z": z[:4], "x": x[:4]}, (x[:4], z[:4])):
        timed = result.speed(batches=[2], seconds=0.0, example=example)
        assert {row.macs for row in timed.rows} == {result.dense.macs, result.sizes[0].macs}
        assert {row.runtime for row in timed.rows} == {speed.TORCH, speed.ONNX, speed.INT8}
    assert result.export(tmp_path / "pair.onnx", example=(x[:4], z[:4])).difference < 1e-5
    right = (result.posterior.members((x, z)).mean(0).argmax(1) == y).float().mean()
    rows = [{"x": a, "z": b, "labels": c} for a, b, c in zip(x, z, y, strict=True)]
    batches = torch.utils.data.DataLoader(rows, 16)  # pyright: ignore[reportArgumentType]
    for data in ((x, z, y), batches):
        found = result.evaluate(data).rows[-1]
        assert found.name == "all particles" and found.metrics["accuracy"] == pytest.approx(float(right))
    page = result.report(tmp_path / "page.html", batches).read_text(encoding="utf-8")
    assert "a brief look in PyTorch" in page and "right" in page
    with pytest.raises(DataError, match="of one input"):
        result.evaluate(batches, ood="noise")
    with pytest.raises(DataError, match="without labels"):
        result.evaluate({"x": x, "z": z})
