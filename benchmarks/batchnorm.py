"""Batch norm, shortcut and ReLU as one operation (`dllp.devices.fused_norm`) against PyTorch's three, on ResNet-56.

python benchmarks/batchnorm.py            # needs CUDA; forward and backward on bfloat16 activations, medians
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.devices import fused_norm

SHAPES = ((512, 16, 32, 32), (512, 32, 16, 16), (512, 64, 8, 8), (512, 8, 32, 32), (512, 512, 4, 4))


def milliseconds(work: Callable[[], object]) -> float:
    """Median time of a captured call."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 10)
    return round(statistics.median(times), 4)


def duration(function: Callable[..., Tensor], shape: tuple[int, ...], shortcut: bool) -> float:
    """Milliseconds of forward and backward."""
    x, dy, residual = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        for _ in range(3)
    )
    leaves = [x.requires_grad_(), *([residual.requires_grad_()] if shortcut else [])]
    return milliseconds(lambda: torch.autograd.grad(function(*leaves), leaves, dy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other tile sizes")
    options = parser.parse_args()
    tiles = list(product((2048, 4096, 8192), (128, 512), (4, 8))) if options.sweep else [None]
    for shape, shortcut in product(SHAPES[:3] if options.sweep else SHAPES, (False, True)):
        norm = nn.BatchNorm2d(shape[1]).cuda()

        def plain(x: Tensor, residual: Tensor | float = 0.0, norm: nn.Module = norm) -> Tensor:
            y = norm(x)
            return F.relu(y + residual) if isinstance(residual, Tensor) else F.relu(y)

        line = {"shape": shape, "shortcut": shortcut, "plain_ms": duration(plain, shape, shortcut)}
        for choice in tiles:
            if choice is not None:
                fused_norm.TILE, fused_norm.PARTS, fused_norm.WARPS = choice
            fused = duration(fused_norm.FusedNorm(norm, relu=True), shape, shortcut)
            print(json.dumps({**line, "tile": choice, "fused_ms": fused, "ratio": round(fused / line["plain_ms"], 3)}))


if __name__ == "__main__":
    main()
