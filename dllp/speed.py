"""Dense against extracted, measured: time, peak memory and bytes on disk, and what became of the saved FLOPs."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dllp import artifacts
from dllp.api import Result
from dllp.errors import ConfigError
from dllp.export import INPUT, inputs, require_onnx, save, trace, write
from dllp.memory import peak_bytes
from dllp.structure import discover
from dllp.widths import kept_units, padded, rounded

DENSE, PRUNED = "dense", "pruned"
TORCH, ONNX, INT8 = "PyTorch", "onnxruntime", "onnxruntime int8"
SAMPLE, FEWEST, MOST = 0.005, 7, 400
"""Seconds that one sample lasts at least, and the number of samples of each network."""
CALIBRATION = 4
"""Batches that the int8 ranges are taken from: enough for timing, not for accuracy."""
CONVOLUTIONS = ("Conv", "FusedConv", "NhwcFusedConv")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Subject:
    """A network to be measured, and its multiply-accumulates for one example."""

    name: str
    network: nn.Module
    macs: float


@dataclass(frozen=True)
class Row:
    """One network in one setting.

    Attributes:
        network, runtime, device, threads, batch: The setting; int8 is a runtime of its own.
        median, low, high: Seconds of one batch: median and quartiles of `samples` interleaved samples.
        cpu: Median CPU seconds of one batch, all threads of the process: on a busy machine the steadier figure.
        macs, bytes, memory: Multiply-accumulates of one example, bytes on disk, peak bytes of the inference.
        speedup: The dense network's median over this one's, same setting (int8: against onnxruntime's floats).
        share: Fraction of the time saved over fraction of the FLOPs saved: 1 where every FLOP became time.
    """

    network: str
    runtime: str
    device: str
    threads: int
    batch: int
    median: float
    low: float
    high: float
    samples: int
    cpu: float
    macs: float
    bytes: int
    memory: int | None = None
    speedup: float | None = None
    share: float | None = None

    @property
    def throughput(self) -> float:
        """Examples in a second."""
        return self.batch / self.median


@dataclass(frozen=True)
class LayerTime:
    """A convolution in onnxruntime, dense and pruned: milliseconds of one batch, channels out, and saved FLOPs."""

    layer: str
    dense_ms: float
    pruned_ms: float
    dense_width: int
    pruned_width: int
    kept_macs: float

    @property
    def lost_ms(self) -> float:
        """Time above the dense one scaled by the kept FLOPs: what holds the network back."""
        return self.pruned_ms - self.dense_ms * self.kept_macs


def subjects(result: Result, shape: tuple[int, ...], *, particle: int = 0, round_to: int = 8) -> list[Subject]:
    """Dense and pruned network of a run; with lost channels also both ways to multiples of `round_to`."""
    if not 0 <= particle < len(result.slabs):
        raise ConfigError(f"there is no particle {particle + 1}: the run has {len(result.slabs)}")
    slab = result.slabs[particle]
    found = [Subject(DENSE, slab.reference, result.dense.macs)]
    if not slab.recipe:
        return [*found, Subject(PRUNED, slab.network, result.dense.macs)]
    return [
        *found,
        Subject(PRUNED, slab.network, result.sizes[particle].macs),
        *multiples(slab.reference, slab.recipe, shape, round_to),
    ]


def multiples(reference: nn.Module, recipe: Any, shape: tuple[int, ...], round_to: int) -> list[Subject]:
    """The pruned network with dead channels added, and with the widths that `round_to` would have chosen."""
    if round_to < 1:
        raise ConfigError(f"round_to = {round_to}: a positive number of channels is needed")
    if round_to == 1:
        return []
    structure = discover(reference, inputs(2, shape))
    keep = kept_units(reference, structure, recipe)
    ways = {f"padded to {round_to}": padded, f"rounded to {round_to}": rounded}
    return [Subject(f"{PRUNED}, {name}", *way(reference, structure, keep, round_to)) for name, way in ways.items()]


def measure(
    found: Sequence[Subject],
    shape: tuple[int, ...],
    *,
    batches: Sequence[int] = (1, 64),
    threads: Sequence[int] | None = None,
    seconds: float = 5.0,
    cuda: bool | None = None,
    int8: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Time every network in every setting; the networks of one setting take turns, so that all see the same machine.

    Args:
        found: The networks, the dense one first.
        shape: Of one input, without the batch.
        batches: Batch sizes.
        threads: Numbers of CPU threads; by default 1 and all.
        seconds: How long one setting is measured for.
        cuda: Measure on CUDA too; by default where there is one.
        int8: Add onnxruntime's static quantisation of the pruned network.
        progress: Called with the name of each setting before it is measured.
    """
    require_onnx()
    if not batches or min(batches) < 1:
        raise ConfigError("batch sizes must be positive: for example --batch 1 64")
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cuda = torch.cuda.is_available() if cuda is None else cuda
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        progress("exporting")
        files = {subject.name: _files(subject, shape, Path(folder), i) for i, subject in enumerate(found)}
        quantised = _quantise(files[PRUNED][ONNX], shape) if int8 and PRUNED in files else None
        memory = {path: peak_bytes(path, (max(batches), *shape)) for f in files.values() for path in f.values()}
        if quantised:
            memory[quantised] = peak_bytes(quantised, (max(batches), *shape))
        for device in ("cpu", "cuda") if cuda else ("cpu",):
            for count in sorted(set(threads or (1, every))) if device == "cpu" else (1,):
                for batch in batches:
                    progress(f"{device}, {count} threads, batch {batch}")
                    x = inputs(batch, shape)
                    setting: dict[str, Any] = dict(device=device, threads=count, batch=batch, seconds=seconds)
                    rows += _torch_rows(found, files, memory, x, **setting)
                    rows += _onnx_rows(found, files, quantised, memory, x, **setting)
    return compared(rows)


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with what each gained over the dense network of its setting."""
    dense = {(r.runtime, r.device, r.threads, r.batch): r for r in rows if r.network == DENSE}
    result = []
    for row in rows:
        base = dense.get((ONNX if row.runtime == INT8 else row.runtime, row.device, row.threads, row.batch))
        if base is not None and row.network != DENSE:
            saved = 1 - row.macs / base.macs
            share = (1 - row.median / base.median) / saved if saved > 0 and row.runtime != INT8 else None
            row = replace(row, speedup=base.median / row.median, share=share)
        result.append(row)
    return result


def as_dict(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values, ready for JSON."""
    return [asdict(row) | {"throughput": row.throughput} for row in rows]


def layers(
    dense: Subject, other: Subject, shape: tuple[int, ...], *, batch: int = 64, runs: int = 10
) -> list[LayerTime]:
    """Time of every convolution in onnxruntime on one thread; empty where the two graphs run differently."""
    require_onnx()
    times, widths, macs = [], [], []
    for subject in (dense, other):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            write(subject.network, path, inputs(2, shape), ("output",), "onnx")
            times.append(_kernel_times(path, inputs(batch, shape), runs))
        widths.append(_convolutions(subject.network, shape))
        macs.append({layer.name: layer.macs for layer in discover(subject.network, inputs(2, shape)).layers})
    if len({len(part) for part in (*times, *widths)}) != 1:
        return []
    parts = zip(*times, *widths, strict=True)
    return [
        LayerTime(name, 1e3 * a, 1e3 * b, width, kept, macs[1][name] / macs[0][name])
        for a, b, (name, width), (_, kept) in parts
    ]


# ---- files


def _files(subject: Subject, shape: tuple[int, ...], folder: Path, index: int) -> dict[str, Path]:
    """A network as ONNX and as pt2."""
    subject.network.eval()
    paths = {ONNX: folder / f"{index}.onnx", TORCH: folder / f"{index}.pt2"}
    program = trace(subject.network, inputs(2, shape))
    save(program, paths[ONNX], ("output",), "onnx")
    save(program, paths[TORCH], ("output",), "pt2")
    artifacts.write_network(folder / f"{index}.safetensors", subject.network)
    return paths


def _quantise(path: Path, shape: tuple[int, ...]) -> Path:
    """Static int8 with ranges from random inputs: its time is right, its accuracy is not looked at."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.parts: Iterator[Tensor] = iter([inputs(8 + i, shape) for i in range(CALIBRATION)])

        def get_next(self) -> Any:
            part = next(self.parts, None)
            return None if part is None else {INPUT: part.numpy()}

    prepared, result = path.with_suffix(".prepared.onnx"), path.with_suffix(".int8.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    kinds: dict[str, Any] = dict(activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
    quantize_static(prepared, result, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, **kinds)
    return result


# ---- time


def interleaved(calls: Sequence[Call], seconds: float) -> list[list[tuple[float, float]]]:
    """Seconds and CPU seconds of one call, many samples of each; they take turns, every other round backwards."""
    repeats = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        repeats.append(max(1, round(SAMPLE / max(time.perf_counter() - start, 1e-9))))
    samples: list[list[tuple[float, float]]] = [[] for _ in calls]
    order = list(range(len(calls)))
    gc.collect()
    end = time.perf_counter() + seconds
    while len(samples[0]) < FEWEST or (time.perf_counter() < end and len(samples[0]) < MOST):
        for i in order:
            start, work = time.perf_counter(), time.process_time()
            for _ in range(repeats[i]):
                calls[i]()
            passed, worked = time.perf_counter() - start, time.process_time() - work
            samples[i].append((passed / repeats[i], worked / repeats[i]))
        order.reverse()
    return samples


def _row(subject: Subject, runtime: str, samples: list[tuple[float, float]], **rest: Any) -> Row:
    passed, worked = np.asarray(samples).T
    low, median, high = (float(v) for v in np.quantile(passed, (0.25, 0.5, 0.75)))
    times = dict(median=median, low=low, high=high, cpu=float(np.median(worked)))
    return Row(subject.name, runtime, samples=len(samples), macs=subject.macs, **times, **rest)


def _torch_rows(
    found: Sequence[Subject], files: dict[str, dict[str, Path]], memory: dict[Path, int | None], x: Tensor, *,
    device: str, threads: int, batch: int, seconds: float,
) -> list[Row]:  # fmt: skip
    cuda = device == "cuda"
    x = x.to(device)
    paths = [files[subject.name][TORCH] for subject in found]
    peaks = [memory[path] for path in paths]

    def call(network: nn.Module) -> Call:
        def work() -> None:
            network(x)
            if cuda:
                torch.cuda.synchronize()

        return work

    with _threads(threads), torch.inference_mode():
        try:
            if cuda:
                peaks = [_cuda_peak(subject.network, x) for subject in found]
            samples = interleaved([call(subject.network.to(device)) for subject in found], seconds)
        finally:
            for subject in found:
                subject.network.cpu()
    return [
        _row(subject, TORCH, part, device=device, threads=threads, batch=batch,
             bytes=path.with_suffix(".safetensors").stat().st_size, memory=peak)
        for subject, path, part, peak in zip(found, paths, samples, peaks, strict=True)
    ]  # fmt: skip


def _cuda_peak(network: nn.Module, x: Tensor) -> int:
    """Bytes of weights and activations at their highest, the input not counted."""
    network.cpu()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    network.to(x.device)(x)
    peak = torch.cuda.max_memory_allocated() - before
    network.cpu()
    return peak


def _onnx_rows(
    found: Sequence[Subject], files: dict[str, dict[str, Path]], quantised: Path | None,
    memory: dict[Path, int | None], x: Tensor, *, device: str, threads: int, batch: int, seconds: float,
) -> list[Row]:  # fmt: skip
    import onnxruntime

    if device == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return []
    items = [(subject, ONNX, files[subject.name][ONNX]) for subject in found]
    if quantised is not None and device == "cpu":
        items += [(subject, INT8, quantised) for subject in found if subject.name == PRUNED]
    samples = interleaved([_session(path, x, device, threads) for _, _, path in items], seconds)
    return [
        _row(subject, runtime, part, device=device, threads=threads, batch=batch, bytes=path.stat().st_size,
             memory=memory[path] if device == "cpu" else None)
        for (subject, runtime, path), part in zip(items, samples, strict=True)
    ]  # fmt: skip


def _session(path: Path, x: Tensor, device: str, threads: int) -> Call:
    """A call of an ONNX file; on CUDA the input lies there already and the output stays there."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    kind = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
    session = onnxruntime.InferenceSession(str(path), settings, providers=[kind])
    values = x.numpy()
    if device == "cpu":
        return lambda: session.run(None, {INPUT: values})
    binding = session.io_binding()
    binding.bind_ortvalue_input(INPUT, onnxruntime.OrtValue.ortvalue_from_numpy(values, "cuda", 0))
    binding.bind_output(session.get_outputs()[0].name, "cuda")

    def work() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return work


def _kernel_times(path: Path, x: Tensor, runs: int) -> list[float]:
    """Median seconds of every convolution kernel, in the order of execution."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.enable_profiling = True
    settings.profile_file_prefix = str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    for _ in range(runs + 1):
        session.run(None, {INPUT: x.numpy()})
    samples: dict[int, list[float]] = {}
    for event in json.loads(Path(session.end_profiling()).read_bytes()):
        arguments = event.get("args", {})
        if event["name"].endswith("_kernel_time") and arguments.get("op_name") in CONVOLUTIONS:
            samples.setdefault(int(arguments["node_index"]), []).append(event["dur"] * 1e-6)
    return [float(np.median(part[1:])) for part in samples.values()]


def _convolutions(network: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, int]]:
    """Names and output channels of the convolutions, in the order of execution."""
    found: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, output: found.append((name, output.shape[1]))

    modules = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.modules.conv._ConvNd)]
    hooks = [module.register_forward_hook(note(name)) for name, module in modules]
    with torch.no_grad():
        network(inputs(1, shape))
    for hook in hooks:
        hook.remove()
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
