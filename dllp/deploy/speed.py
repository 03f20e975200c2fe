"""Speed of the dense against the extracted network: time, peak memory, bytes on disk, and time saved per FLOP saved."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dllp.api import Result
from dllp.deploy import quantise, runtimes
from dllp.deploy.export import Shape, inputs, one_argument, require_onnx
from dllp.deploy.layers import LayerTime, holding_back, layers, torch_layers
from dllp.deploy.memory import peak_bytes
from dllp.deploy.quantise import Images, images
from dllp.deploy.runtimes import INT8, ONNX, TORCH, Samples, Subject
from dllp.devices import trees
from dllp.errors import ConfigError, check_count
from dllp.structure.groups import Structure, discover, discover_again
from dllp.structure.padding import kept_units, padded, rounded

__all__ = [
    "DENSE", "INT8", "ONNX", "PRUNED", "TORCH", "Images", "LayerTime", "Row", "Subject", "Timed", "advice", "as_dict",
    "compared", "describe", "headline", "holding_back", "images", "layers", "measure", "measure_onnx", "measure_torch",
    "multiples", "subjects", "torch_layers", "torch_rows", "truth",
]  # fmt: skip
DENSE, PRUNED = "dense", "pruned"


def subjects(result: Result, shape: Shape, *, particle: int = 0, round_to: int = 8) -> list[Subject]:
    """Dense and pruned network of a run; with lost channels also both ways to multiples of `round_to`.

    Of a network of several inputs (`shape` is a batch of them by name) dense and pruned alone.
    """
    if not 0 <= particle < len(result.particles):
        raise ConfigError(f"there is no particle {particle + 1}: the run has {len(result.particles)}")
    chosen = result.particles[particle]
    # the reference has the dense widths, but closed gates: it stands for the dense network in time, not in accuracy
    dense = chosen.reference if result.original is None else result.original
    # counted here: inputs of another shape than the run's cost something else
    both = []
    for name, given, trained in ((DENSE, dense, dense is result.original), (PRUNED, chosen.network, True)):
        network = one_argument(given, shape)
        macs = discover(network, (inputs(2, shape),), channels=False).flops.dense
        both.append(Subject(name, network, macs, trained))
    check_count(round_to=round_to)
    if not chosen.recipe or round_to == 1 or isinstance(shape, Mapping):
        return both
    structure = discover_again(chosen.reference, inputs(2, shape), result.whole, result.config)
    return [*both, *multiples(chosen.reference, chosen.recipe, structure, round_to)]


def multiples(reference: nn.Module, recipe: Any, structure: Structure, round_to: int) -> list[Subject]:
    """The pruned network with dead channels added, and with the widths that `round_to` would have chosen."""
    keep = kept_units(reference, structure, recipe)
    ways = {f"padded to {round_to}": padded, f"rounded to {round_to}": rounded}
    return [Subject(f"{PRUNED}, {name}", *way(reference, structure, keep, round_to)) for name, way in ways.items()]


@dataclass(frozen=True)
class Row:
    """One network in one setting: seconds of one batch are median and quartiles of interleaved samples."""

    network: str
    runtime: str  # int8 is one of its own
    device: str
    threads: int
    batch: int
    median: float
    low: float
    high: float
    samples: int
    cpu: float  # median CPU seconds of one batch, all threads of the process: on a busy machine the steadier figure
    macs: float  # of one example
    bytes: int  # on disk
    memory: int | None = None  # peak bytes of the inference
    speedup: float | None = None  # the dense network's median over this one's (int8: against onnxruntime's floats)
    share: float | None = None  # of the time saved over that of the FLOPs saved: 1 where every FLOP became time
    accuracy: float | None = None  # on test examples, in onnxruntime; None where it was not measured

    @property
    def undisturbed(self) -> float:
        """Seconds of one batch on an idle machine: on one thread of a processor other programs do not count."""
        return self.cpu if (self.device, self.threads) == ("cpu", 1) else self.median

    @property
    def throughput(self) -> float:
        """Examples in a second."""
        return self.batch / self.median


@dataclass(frozen=True)
class Timed:
    """The measurements of one network against the dense one; as text a line for each setting and an advice."""

    rows: list[Row]
    layers: list[LayerTime]

    def __repr__(self) -> str:
        lines = [
            f"{describe(row)}: {row.network} {1e3 * row.median:.2f} ms"
            + (f", {row.speedup:.2f}x as fast as dense" if row.speedup else "")
            + (f", accuracy {row.accuracy:.2%}" if row.accuracy is not None else "")
            for row in self.rows
        ]
        return "\n".join([*lines, advice(self.rows)])


NOTICED = 1.1  # gain from which on another way is worth a line of advice


def advice(rows: Sequence[Row]) -> str:
    """One line: the option that would make the pruned network faster in the setting to quote, or that none would."""
    row = headline(rows)
    if row is None:
        return ""
    found, (gains, multiple) = [], _gains(rows, row)
    if gains["padded"] >= NOTICED:
        found.append(f"exported with --pad-to {multiple} it gives the same answers {gains['padded']:.2f}x as fast")
    if gains["rounded"] >= max(NOTICED, NOTICED * gains["padded"]):
        found.append(f"a run with --round-to {multiple} gives a network {gains['rounded']:.2f}x as fast")
    small = next((r for r in rows if r.network == PRUNED and describe(r) == describe(replace(row, runtime=INT8))), None)
    if small is not None:
        gains, multiple = _gains(rows, small)
        if gains["padded"] >= NOTICED:
            found.append(f"int8 is {gains['padded']:.2f}x as fast with --pad-to {multiple} --int8")
    if found:
        return f"odd numbers of channels hold it back: {'; '.join(found)}"
    if row.share is not None and row.share < 0.5:
        return "numbers of channels are not what holds it back, but what is no convolution, and the calls of layers"
    return ""


def _gains(rows: Sequence[Row], row: Row) -> tuple[dict[str, float], str]:
    """How much faster the two ways to multiples are than a row of the pruned network, and the multiple."""
    gains, multiple = {"padded": 0.0, "rounded": 0.0}, ""
    for other in rows:
        if describe(other) == describe(row) and other.network.startswith(f"{PRUNED}, "):
            way, _, multiple = other.network.removeprefix(f"{PRUNED}, ").partition(" to ")
            gains[way] = row.median / other.median
    return gains, multiple


def truth(rows: Sequence[Row], layers: Sequence[LayerTime]) -> str:
    """One line: the speed-up as measured and by FLOPs, what holds it back, and what to try; or nothing."""
    row = headline(rows)
    dense = next((r for r in rows if row is not None and r.network == DENSE and describe(r) == describe(row)), None)
    if row is None or dense is None or row.speedup is None:
        return ""
    text = f"{row.speedup:.2f}x as fast as dense, {dense.macs / row.macs:.2f}x by FLOPs ({describe(row)})"
    if row.share is None or row.share >= 0.9:
        return text
    held = ", ".join(layer.layer for layer in holding_back(layers, 3))
    what = f"layers {held}" if held else "what is no convolution, and the calls of layers"
    keep = min(0.95, row.macs / dense.macs)
    return f"{text}: held back by {what}; try dllp prune --keep-latency {keep:.2g}, --round-to 8 or --units both"


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with their gain over the dense network of the same setting."""
    dense = {describe(row): row for row in rows if row.network == DENSE}
    result = []
    for row in rows:
        base = dense.get(describe(replace(row, runtime=ONNX) if row.runtime == INT8 else row))
        if base is not None and row is not base:
            saved = 1 - row.macs / base.macs
            share = (1 - row.median / base.median) / saved if saved > 0 and row.runtime != INT8 else None
            row = replace(row, speedup=base.median / row.median, share=share)
        result.append(row)
    return result


def as_dict(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values, ready for JSON."""
    return [asdict(row) | {"throughput": row.throughput} for row in rows]


def describe(row: Row) -> str:
    """A setting in words."""
    threads = f", {row.threads} thread{'s' * (row.threads > 1)}" if row.device == "cpu" else ""
    return f"{row.runtime}, {row.device}{threads}, batch {row.batch}"


def headline(rows: Sequence[Row]) -> Row | None:
    """The row to quote: the pruned network in the largest batch on the fewest threads, best in onnxruntime."""
    found = [row for row in rows if row.network == PRUNED and row.speedup is not None and row.runtime != INT8]
    return min(found, key=lambda row: (row.device != "cpu", row.threads, -row.batch, row.runtime != ONNX), default=None)


def measure(
    found: Sequence[Subject], shape: Shape, *, batches: Sequence[int] = (1, 64),
    threads: Sequence[int] | None = None, seconds: float = 5.0, images: Images | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:  # fmt: skip
    """Time every network in every setting; the networks of one setting take turns, so that all see the same machine.

    CUDA is a setting where there is one, and onnxruntime's static quantisation of dense, pruned and padded network a
    runtime.

    Args:
        found: The networks, the dense one first.
        threads: Numbers of CPU threads; by default 1 and all.
        seconds: How long one setting is measured for.
        images: For the accuracy of trained networks, and to calibrate int8: by default with random inputs, which gives
            its time only.
        progress: Called with the name of each setting before it is measured.
    """
    require_onnx()
    if not batches or min(batches) < 1:
        raise ConfigError("batch sizes must be positive: for example --batch 1 64")
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        progress("exporting")
        paths = {subject.name: runtimes.written(subject, shape, Path(folder), i) for i, subject in enumerate(found)}
        graphs = [(subject, ONNX, paths[subject.name][ONNX]) for subject in found]
        seen = [inputs(8 + i, shape) for i in range(4)]
        if images is not None:
            seen = list(quantise.batches(images.calibration))
        for subject in found:
            if subject.name in (DENSE, PRUNED) or subject.name.startswith(f"{PRUNED}, padded"):
                progress(f"int8, {subject.name}")
                graphs.append((subject, INT8, quantise.quantised(paths[subject.name][ONNX], seen)))
        accuracy = {}
        if images is not None and images.test is not None:
            for subject, runtime, path in graphs:
                if subject.trained:
                    progress(f"accuracy, {subject.name}, {runtime}")
                    accuracy[path] = quantise.accuracy(path, images.test)
        peaks: dict[str, int | None] = {}
        graph_peaks: dict[Path, int | None] = {}
        if not isinstance(shape, Mapping):  # it is measured for one tensor of zeros
            largest = (max(batches), *shape)
            peaks = {name: peak_bytes(each[TORCH], largest) for name, each in paths.items()}
            graph_peaks = {path: peak_bytes(path, largest) for _, _, path in graphs}
        disk = {name: each[TORCH].with_suffix(".safetensors").stat().st_size for name, each in paths.items()}
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            here = [graph for graph in graphs if device == "cpu" or graph[1] == ONNX]
            for count in sorted(set(threads or (1, every))) if device == "cpu" else (1,):
                for batch in batches:
                    progress(f"{device}, {count} threads, batch {batch}")
                    x = inputs(batch, shape)
                    here_x = trees.moved(x, torch.device(device))
                    rows += torch_rows(found, disk, peaks, here_x, threads=count, seconds=seconds)
                    samples = runtimes.onnx_samples([path for _, _, path in here], x, device, count, seconds)
                    setting: dict[str, Any] = dict(device=device, threads=count, batch=batch)
                    for (subject, runtime, path), part in zip(here, samples, strict=False):
                        peak = graph_peaks.get(path) if device == "cpu" else None
                        row = _row(subject, runtime, part, path.stat().st_size, peak, **setting)
                        rows.append(replace(row, accuracy=accuracy.get(path)))
    return compared(rows)


def measure_torch(
    found: Sequence[Subject], shape: Shape, *, batches: Sequence[int] = (1, 64), seconds: float = 0.3
) -> list[Row]:
    """A brief measurement that needs no extra: PyTorch on one thread, bytes of the weights, no peak memory."""
    disk = {s.name: sum(value.nbytes for value in s.network.state_dict().values()) for s in found}
    parts = [torch_rows(found, disk, {}, inputs(batch, shape), seconds=seconds, fewest=3) for batch in batches]
    return compared([row for part in parts for row in part])


def measure_onnx(found: Sequence[Subject], shape: Shape, seconds: float = 0.5) -> list[Row]:
    """A brief measurement of one example in onnxruntime on one thread, without int8 and peak memory."""
    require_onnx()
    setting: dict[str, Any] = dict(device="cpu", threads=1, batch=1)
    with tempfile.TemporaryDirectory() as folder:
        paths = [runtimes.written(subject, shape, Path(folder), i)[ONNX] for i, subject in enumerate(found)]
        samples = runtimes.onnx_samples(paths, inputs(1, shape), "cpu", 1, seconds)
        parts = zip(found, samples, paths, strict=True)
        return compared([_row(s, ONNX, part, path.stat().st_size, None, **setting) for s, part, path in parts])


def torch_rows(
    found: Sequence[Subject], disk: Mapping[str, int], memory: Mapping[str, int | None], x: Any, *,
    seconds: float, threads: int = 1, fewest: int | None = None,
) -> list[Row]:  # fmt: skip
    """Every network in PyTorch on the inputs' device, given bytes on disk and peak memory on a CPU by name."""
    device = trees.tensors(x)[0].device.type
    peaks = [runtimes.cuda_peak(s.network, x) if device == "cuda" else memory.get(s.name) for s in found]
    samples = runtimes.torch_samples([subject.network for subject in found], x, threads, seconds, fewest)
    setting: dict[str, Any] = dict(device=device, threads=threads, batch=trees.count(x))
    rows = zip(found, samples, peaks, strict=True)
    return [_row(subject, TORCH, part, disk[subject.name], peak, **setting) for subject, part, peak in rows]


def _row(subject: Subject, runtime: str, samples: Samples, disk: int, memory: int | None, **setting: Any) -> Row:
    """Median and quartiles of a network's samples."""
    passed, worked = np.asarray(samples).T
    low, median, high = (float(v) for v in np.quantile(passed, (0.25, 0.5, 0.75)))
    times = dict(median=median, low=low, high=high, cpu=float(np.median(worked)), samples=len(samples))
    return Row(subject.name, runtime, macs=subject.macs, bytes=disk, memory=memory, **times, **setting)
