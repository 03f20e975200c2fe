"""What a measurement says: one row for each network and setting, compared with the dense one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

DENSE, PRUNED = "dense", "pruned"
TORCH, ONNX, INT8 = "PyTorch", "onnxruntime", "onnxruntime int8"


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


def describe(row: Row) -> str:
    """A setting in words."""
    threads = f", {row.threads} thread{'s' * (row.threads > 1)}" if row.device == "cpu" else ""
    return f"{row.runtime}, {row.device}{threads}, batch {row.batch}"


def headline(rows: Sequence[Row]) -> Row | None:
    """The pruned network in the largest batch on the fewest threads: the row that is spoken of.

    In onnxruntime where that was measured: the layers are timed there, too, and what is said of both must fit.
    """
    found = [row for row in rows if row.network == PRUNED and row.speedup is not None and row.runtime != INT8]
    return min(found, key=lambda row: (row.device != "cpu", row.threads, -row.batch, row.runtime != ONNX), default=None)
