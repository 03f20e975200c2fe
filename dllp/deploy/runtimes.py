"""PyTorch and onnxruntime, each with its files, its calls and its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dllp.deploy.clock import Call, interleaved, limited, summarise
from dllp.deploy.export import INPUT, inputs, save, trace
from dllp.deploy.rows import INT8, ONNX, PRUNED, TORCH, Row, Subject
from dllp.runs import artifacts

CALIBRATION = 4
"""Batches that the int8 ranges are taken from: enough for timing, not for accuracy."""


def written(subject: Subject, shape: tuple[int, ...], folder: Path, index: int) -> dict[str, Path]:
    """A network as ONNX and as pt2."""
    subject.network.eval()
    paths = {ONNX: folder / f"{index}.onnx", TORCH: folder / f"{index}.pt2"}
    program = trace(subject.network, inputs(2, shape))
    save(program, paths[ONNX], ("output",), "onnx")
    save(program, paths[TORCH], ("output",), "pt2")
    artifacts.write_network(folder / f"{index}.safetensors", subject.network)
    return paths


def quantised(path: Path, shape: tuple[int, ...]) -> Path:
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


def torch_rows(
    found: Sequence[Subject], disk: Mapping[str, int], memory: Mapping[str, int | None], x: Tensor, *,
    device: str, threads: int, batch: int, seconds: float, fewest: int | None = None,
) -> list[Row]:  # fmt: skip
    """Every network in PyTorch, given bytes on disk and peak memory on a CPU by name."""
    cuda = device == "cuda"
    x = x.to(device)
    peaks = [memory.get(subject.name) for subject in found]

    def call(network: nn.Module) -> Call:
        def work() -> None:
            network(x)
            if cuda:
                torch.cuda.synchronize()

        return work

    # moved outside inference mode: weights that are moved inside it can never be exported again
    try:
        if cuda:
            peaks = [_cuda_peak(subject.network, x) for subject in found]
        calls = [call(subject.network.to(device)) for subject in found]
        with limited(threads), torch.inference_mode():
            samples = interleaved(calls, seconds, fewest)
    finally:
        for subject in found:
            subject.network.cpu()
    rest: dict[str, Any] = dict(device=device, threads=threads, batch=batch)
    return [
        summarise(subject, TORCH, part, bytes=disk[subject.name], memory=peak, **rest)
        for subject, part, peak in zip(found, samples, peaks, strict=True)
    ]


def _cuda_peak(network: nn.Module, x: Tensor) -> int:
    """Bytes of weights and activations at their highest, the input not counted."""
    network.to(x.device)
    with torch.inference_mode():
        network(x)  # libraries keep working memory from their first call on
    network.cpu()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    network.to(x.device)
    with torch.inference_mode():
        network(x)
    peak = torch.cuda.max_memory_allocated() - before
    network.cpu()
    return peak


def onnx_rows(
    found: Sequence[Subject], files: Mapping[str, Path], int8: Path | None,
    memory: Mapping[Path, int | None], x: Tensor, *, device: str, threads: int, batch: int, seconds: float,
) -> list[Row]:  # fmt: skip
    """Every network in onnxruntime, given its file by name, and the quantised one of the pruned network."""
    import onnxruntime

    if device == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return []
    items = [(subject, ONNX, files[subject.name]) for subject in found]
    if int8 is not None and device == "cpu":
        items += [(subject, INT8, int8) for subject in found if subject.name == PRUNED]
    samples = interleaved([_session(path, x, device, threads) for _, _, path in items], seconds)
    return [
        summarise(subject, runtime, part, device=device, threads=threads, batch=batch, bytes=path.stat().st_size,
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
