"""Every network in every setting."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dllp.deploy.export import inputs, require_onnx
from dllp.deploy.memory import peak_bytes
from dllp.deploy.rows import ONNX, PRUNED, TORCH, Row, Subject, compared
from dllp.deploy.runtimes import onnx_rows, quantised, torch_rows, written
from dllp.errors import ConfigError


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
        files = {subject.name: written(subject, shape, Path(folder), i) for i, subject in enumerate(found)}
        int8_file = quantised(files[PRUNED][ONNX], shape) if int8 and PRUNED in files else None
        paths = [path for f in files.values() for path in f.values()] + ([int8_file] if int8_file else [])
        memory = {path: peak_bytes(path, (max(batches), *shape)) for path in paths}
        disk = {name: f[TORCH].with_suffix(".safetensors").stat().st_size for name, f in files.items()}
        peaks = {name: memory[f[TORCH]] for name, f in files.items()}
        graphs = {name: f[ONNX] for name, f in files.items()}
        for device in ("cpu", "cuda") if cuda else ("cpu",):
            for count in sorted(set(threads or (1, every))) if device == "cpu" else (1,):
                for batch in batches:
                    progress(f"{device}, {count} threads, batch {batch}")
                    x = inputs(batch, shape)
                    setting: dict[str, Any] = dict(device=device, threads=count, batch=batch, seconds=seconds)
                    rows += torch_rows(found, disk, peaks, x, **setting)
                    rows += onnx_rows(found, graphs, int8_file, memory, x, **setting)
    return compared(rows)


def measure_torch(
    found: Sequence[Subject], shape: tuple[int, ...], *, batches: Sequence[int] = (1, 64), seconds: float = 0.3
) -> list[Row]:
    """A brief look that needs no extra: PyTorch on one thread; bytes are those of the weights, memory is left out."""
    disk = {s.name: sum(value.nbytes for value in s.network.state_dict().values()) for s in found}
    rows: list[Row] = []
    for batch in batches:
        setting: dict[str, Any] = dict(device="cpu", threads=1, batch=batch, seconds=seconds, fewest=3)
        rows += torch_rows(found, disk, {}, inputs(batch, shape), **setting)
    return compared(rows)
