"""Networks in PyTorch and onnxruntime: their files, and the time of calls that take turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dllp import files
from dllp.deploy.export import Shape, inputs, packed, trace
from dllp.deploy.quantise import feed
from dllp.devices import trees
from dllp.runs.tensors import write_network

TORCH, ONNX, INT8 = "PyTorch", "onnxruntime", "onnxruntime int8"
SAMPLE, FEWEST, MOST = 0.005, 7, 400  # least seconds of a sample, and number of samples of each network
Call = Callable[[], Any]
Samples = list[tuple[float, float]]  # seconds and CPU seconds of one call, by sample


@dataclass(frozen=True)
class Subject:
    """A network to be measured, its multiply-accumulates for one example, and whether its accuracy means something."""

    name: str
    network: nn.Module
    macs: float
    trained: bool = False


def interleaved(calls: Sequence[Call], seconds: float, fewest: int | None = None) -> list[Samples]:
    """Samples of each call. The calls take turns, every other round backwards, so that all see the same machine."""
    repeats = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        repeats.append(max(1, round(SAMPLE / max(time.perf_counter() - start, 1e-9))))
    samples: list[Samples] = [[] for _ in calls]
    order = list(range(len(calls)))
    gc.collect()
    end = time.perf_counter() + seconds
    while len(samples[0]) < (fewest or FEWEST) or (time.perf_counter() < end and len(samples[0]) < MOST):
        for i in order:
            start, work = time.perf_counter(), time.process_time()
            for _ in range(repeats[i]):
                calls[i]()
            passed, worked = time.perf_counter() - start, time.process_time() - work
            samples[i].append((passed / repeats[i], worked / repeats[i]))
        order.reverse()
    return samples


@contextmanager
def limited(count: int) -> Iterator[None]:
    """Let PyTorch use `count` threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def torch_samples(
    networks: Sequence[nn.Module], x: Any, threads: int, seconds: float, fewest: int | None = None
) -> list[Samples]:
    """Samples of every network on the device of its inputs, a tensor or a tuple of them."""
    device = trees.tensors(x)[0].device

    def call(network: nn.Module) -> None:
        network(x)
        if device.type == "cuda":
            torch.cuda.synchronize()

    try:
        # moved outside inference mode: weights that are moved inside it can never be exported again
        calls = [partial(call, network.to(device)) for network in networks]
        with limited(threads), torch.inference_mode():
            return interleaved(calls, seconds, fewest)
    finally:
        for network in networks:
            network.cpu()


def cuda_peak(network: nn.Module, x: Any) -> int:
    """Bytes of weights and activations at their highest, the input not counted."""
    peak = 0
    try:
        for _ in range(2):  # libraries keep working memory from their first call on
            network.cpu()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            network.to(trees.tensors(x)[0].device)
            with torch.inference_mode():
                network(x)
            peak = torch.cuda.max_memory_allocated() - before
    finally:
        network.cpu()
    return peak


def written(subject: Subject, shape: Shape, folder: Path, index: int) -> dict[str, Path]:
    """A network as ONNX and as pt2, and beside the latter its weights as safetensors."""
    subject.network.eval()
    paths = {ONNX: folder / f"{index}.onnx", TORCH: folder / f"{index}.pt2"}
    program = trace(subject.network, inputs(2, shape))
    files.write_bytes(paths[ONNX], packed(program, "onnx"))
    files.write_bytes(paths[TORCH], packed(program, "pt2"))
    write_network(folder / f"{index}.safetensors", subject.network)
    return paths


def onnx_samples(paths: Sequence[Path], x: Any, device: str, threads: int, seconds: float) -> list[Samples]:
    """Samples of every ONNX file; none where onnxruntime does not know the device."""
    import onnxruntime

    if device == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return []
    return interleaved([_session(path, x, device, threads) for path in paths], seconds)


def _session(path: Path, x: Any, device: str, threads: int) -> Call:
    """A call of an ONNX file; on CUDA the inputs lie there already and the output stays there."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    # its threads would go on spinning after a call, and take the processors from the next session's
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    kind = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
    session = onnxruntime.InferenceSession(str(path), settings, providers=[kind])
    values = feed(path, x)
    if device == "cpu":
        return lambda: session.run(None, values)
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
    binding.bind_output(session.get_outputs()[0].name, "cuda")

    def work() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return work
