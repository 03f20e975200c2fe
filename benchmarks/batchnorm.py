"""A fused batch normalisation with ReLU for channels-last activations, against PyTorch's own two operations.

    python benchmarks/batchnorm.py            # needs CUDA and Triton; checks, then times the shapes of ResNet-56
    TRITON_INTERPRET=1 python benchmarks/batchnorm.py --check    # checks alone, on any machine with Triton

Batch normalisation is memory-bound: forward must read the activations twice and write them once, backward read two
tensors twice and write one. The candidate does just that in two kernels each, ReLU included; if it is faster on the
shapes that matter, training can use it in place of `nn.BatchNorm2d` followed by `nn.ReLU`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

PARTS = 128  # programs that each reduce a share of the rows; their partial sums are few enough to be read by everyone


@triton.jit
def _statistics(x_ptr, part_ptr, rows, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr):
    """Partial sums of x and x^2 over a share of the rows, for every channel."""
    pid = tl.program_id(0)
    c = tl.arange(0, CP)
    total = tl.zeros((CP,), tl.float32)
    square = tl.zeros((CP,), tl.float32)
    for start in range(pid * R, rows, PARTS * R):
        r = start + tl.arange(0, R)
        mask = (r[:, None] < rows) & (c[None, :] < C)
        x = tl.load(x_ptr + r[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(x, 0)
        square += tl.sum(x * x, 0)
    tl.store(part_ptr + pid * 2 * CP + c, total)
    tl.store(part_ptr + pid * 2 * CP + CP + c, square)


@triton.jit
def _reduce(part_ptr, which, CP: tl.constexpr, PARTS: tl.constexpr):
    """The sum over all programs' partial sums, (CP,)."""
    p = tl.arange(0, PARTS)
    c = tl.arange(0, CP)
    return tl.sum(tl.load(part_ptr + p[:, None] * 2 * CP + which * CP + c[None, :]), 0)


@triton.jit
def _normalise(
    x_ptr, y_ptr, part_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr,
    rows, momentum, eps, RELU: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """y = relu(gamma (x - mean) / std + beta); the first program also keeps the statistics."""
    pid = tl.program_id(0)
    c = tl.arange(0, CP)
    real = c < C
    mean = _reduce(part_ptr, 0, CP, PARTS) / rows
    var = tl.maximum(_reduce(part_ptr, 1, CP, PARTS) / rows - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    gamma = tl.load(gamma_ptr + c, mask=real, other=0.0)
    beta = tl.load(beta_ptr + c, mask=real, other=0.0)
    if pid == 0:
        tl.store(mean_ptr + c, mean, mask=real)
        tl.store(rstd_ptr + c, rstd, mask=real)
        old_mean = tl.load(running_mean_ptr + c, mask=real, other=0.0)
        old_var = tl.load(running_var_ptr + c, mask=real, other=0.0)
        tl.store(running_mean_ptr + c, old_mean + momentum * (mean - old_mean), mask=real)
        unbiased = var * rows / (rows - 1)
        tl.store(running_var_ptr + c, old_var + momentum * (unbiased - old_var), mask=real)
    scale = gamma * rstd
    shift = beta - mean * scale
    for start in range(pid * R, rows, tl.num_programs(0) * R):
        r = start + tl.arange(0, R)
        at = r[:, None] * C + c[None, :]
        mask = (r[:, None] < rows) & real[None, :]
        y = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if RELU:
            y = tl.maximum(y, 0.0)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_statistics(
    x_ptr, dy_ptr, part_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, rows,
    RELU: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Partial sums of dy and dy * xhat, dy taken behind the ReLU."""
    pid = tl.program_id(0)
    c = tl.arange(0, CP)
    real = c < C
    mean = tl.load(mean_ptr + c, mask=real, other=0.0)
    rstd = tl.load(rstd_ptr + c, mask=real, other=0.0)
    gamma = tl.load(gamma_ptr + c, mask=real, other=0.0)
    beta = tl.load(beta_ptr + c, mask=real, other=0.0)
    total = tl.zeros((CP,), tl.float32)
    along = tl.zeros((CP,), tl.float32)
    for start in range(pid * R, rows, PARTS * R):
        r = start + tl.arange(0, R)
        at = r[:, None] * C + c[None, :]
        mask = (r[:, None] < rows) & real[None, :]
        xhat = (tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            dy = tl.where(xhat * gamma[None, :] + beta[None, :] > 0, dy, 0.0)
        total += tl.sum(dy, 0)
        along += tl.sum(tl.where(mask, dy * xhat, 0.0), 0)
    tl.store(part_ptr + pid * 2 * CP + c, total)
    tl.store(part_ptr + pid * 2 * CP + CP + c, along)


@triton.jit
def _backward(
    x_ptr, dy_ptr, dx_ptr, part_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, dgamma_ptr, dbeta_ptr, rows,
    RELU: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dx = gamma / std (dy - mean(dy) - xhat mean(dy xhat))."""
    pid = tl.program_id(0)
    c = tl.arange(0, CP)
    real = c < C
    total = _reduce(part_ptr, 0, CP, PARTS)
    along = _reduce(part_ptr, 1, CP, PARTS)
    if pid == 0:
        tl.store(dbeta_ptr + c, total, mask=real)
        tl.store(dgamma_ptr + c, along, mask=real)
    mean = tl.load(mean_ptr + c, mask=real, other=0.0)
    rstd = tl.load(rstd_ptr + c, mask=real, other=0.0)
    gamma = tl.load(gamma_ptr + c, mask=real, other=0.0)
    beta = tl.load(beta_ptr + c, mask=real, other=0.0)
    for start in range(pid * R, rows, tl.num_programs(0) * R):
        r = start + tl.arange(0, R)
        at = r[:, None] * C + c[None, :]
        mask = (r[:, None] < rows) & real[None, :]
        xhat = (tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            dy = tl.where(xhat * gamma[None, :] + beta[None, :] > 0, dy, 0.0)
        dx = (gamma * rstd)[None, :] * (dy - (total / rows)[None, :] - xhat * (along / rows)[None, :])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class FusedNorm(torch.autograd.Function):
    """(N, C, H, W) channels-last activations -> batch-normalised, and rectified where `relu`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor, running_var: Tensor,
        momentum: float, eps: float, relu: bool,
    ) -> Tensor:  # fmt: skip
        channels, rows = x.shape[1], x.numel() // x.shape[1]
        shape = _shape(channels)
        partial = torch.empty(PARTS, 2, shape["CP"], device=x.device, dtype=torch.float32)
        y, mean, rstd = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)
        _statistics[(PARTS,)](x, partial, rows, **shape)
        _normalise[(4 * PARTS,)](
            x, y, partial, gamma, beta, mean, rstd, running_mean, running_var, rows, momentum, eps, RELU=relu, **shape
        )
        ctx.save_for_backward(x, gamma, beta, mean, rstd)
        ctx.relu = relu
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, rstd = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        channels, rows = x.shape[1], x.numel() // x.shape[1]
        shape = _shape(channels)
        partial = torch.empty(PARTS, 2, shape["CP"], device=x.device, dtype=torch.float32)
        dx, dgamma, dbeta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(beta)
        _backward_statistics[(PARTS,)](x, dy, partial, gamma, beta, mean, rstd, rows, RELU=ctx.relu, **shape)
        _backward[(4 * PARTS,)](
            x, dy, dx, partial, gamma, beta, mean, rstd, dgamma, dbeta, rows, RELU=ctx.relu, **shape
        )
        return dx, dgamma, dbeta, None, None, None, None, None


def _shape(channels: int) -> dict[str, int]:
    """Tiles of about 8,192 elements whatever the number of channels."""
    padded = triton.next_power_of_2(channels)
    return {"C": channels, "CP": padded, "R": max(8192 // padded, 16), "PARTS": PARTS}


def plain(x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, relu: bool) -> Tensor:
    y = F.batch_norm(x, mean, var, gamma, beta, training=True, momentum=0.1, eps=1e-5)
    return F.relu(y) if relu else y


def fused(x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, relu: bool) -> Tensor:
    return FusedNorm.apply(x, gamma, beta, mean, var, 0.1, 1e-5, relu)  # type: ignore[return-value]


def check(device: torch.device, shape: tuple[int, int, int, int], relu: bool, dtype: torch.dtype) -> dict[str, float]:
    """Relative differences to PyTorch in float64: outputs, gradients, running statistics."""
    x = (3 + 2 * torch.randn(shape, device=device)).contiguous(memory_format=torch.channels_last).to(dtype)
    dy = torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last).to(dtype)
    channels = shape[1]
    gamma, beta = torch.randn(channels, device=device), torch.randn(channels, device=device)
    results = []
    for function, kind in ((fused, torch.float32), (plain, torch.float64)):
        mean, var = torch.zeros(channels, device=device, dtype=kind), torch.ones(channels, device=device, dtype=kind)
        leaves = [x.detach().to(dtype if function is fused else kind), gamma.to(kind), beta.to(kind)]
        leaves = [leaf.clone(memory_format=torch.preserve_format).requires_grad_() for leaf in leaves]
        y = function(*leaves, mean, var, relu)
        y.backward(dy.to(y.dtype))
        results.append([y.detach(), *(leaf.grad for leaf in leaves), mean, var])
    names = ("y", "dx", "dgamma", "dbeta", "mean", "var")
    pairs = zip(names, *results, strict=True)
    return {name: float((a.double() - b.double()).norm() / b.double().norm()) for name, a, b in pairs}


def milliseconds(work: Callable[[], None]) -> float:
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
    return statistics.median(times)


def duration(function: Callable[..., Tensor], shape: tuple[int, ...], device: torch.device) -> float:
    """Milliseconds of forward and backward on bfloat16 activations, ReLU included."""
    x = torch.randn(shape, device=device, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    dy, ones, zeros = torch.randn_like(x), torch.ones(shape[1], device=device), torch.zeros(shape[1], device=device)
    leaves = [x.requires_grad_(), ones.clone().requires_grad_(), zeros.clone().requires_grad_()]

    def work() -> None:
        torch.autograd.grad(function(*leaves, zeros, ones, True), leaves, dy)

    return round(milliseconds(work), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="correctness only")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in ((4, 16, 8, 8), (3, 24, 5, 7), (2, 64, 4, 4), (5, 3, 9, 9)):
        for relu in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                print(
                    json.dumps({"check": shape, "relu": relu, "dtype": str(dtype), **check(device, shape, relu, dtype)})
                )
    if options.check or device.type != "cuda":
        return
    for shape in ((512, 16, 32, 32), (512, 32, 16, 16), (512, 64, 8, 8), (512, 8, 32, 32)):
        times = {function.__name__: duration(function, shape, device) for function in (plain, fused)}
        print(json.dumps({"shape": shape, **times, "ratio": round(times["fused"] / times["plain"], 3)}))


if __name__ == "__main__":
    main()
