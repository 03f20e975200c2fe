"""Dense against extracted, measured: time, peak memory and bytes on disk, and what became of the saved FLOPs."""

from dllp.deploy.clock import interleaved
from dllp.deploy.layers import LayerTime, holding_back, layers, torch_layers
from dllp.deploy.measure import measure, measure_torch
from dllp.deploy.rows import DENSE, INT8, ONNX, PRUNED, TORCH, Row, Subject, as_dict, compared, describe, headline
from dllp.deploy.subjects import multiples, subjects

__all__ = [
    "DENSE", "INT8", "ONNX", "PRUNED", "TORCH", "LayerTime", "Row", "Subject", "as_dict", "compared", "describe",
    "headline", "holding_back", "interleaved", "layers", "measure", "measure_torch", "multiples", "subjects",
    "torch_layers",
]  # fmt: skip
