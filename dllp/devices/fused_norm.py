"""Batch normalisation, the addition of a shortcut and ReLU as one operation on channels-last activations (Triton).

All three are bound by memory. PyTorch reads and writes the activations once for each of them; here a forward pass reads
them twice and writes them once, a backward pass reads activations and gradients twice and writes one. Sums are added in
a fixed order: results repeat.
"""

# pyright: reportCallIssue=false
# a kernel's launch takes options of Triton besides its arguments

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

TILE = 4096  # elements that one program handles at a time
WIDTH = 64  # most channels in a tile
PARTS = 256  # most programs that share the rows of one block of channels
WARPS = 8


@triton.jit
def _finish(ticket_ptr, block, PARTS: tl.constexpr):
    """True if this program is the last of its block to arrive here; the ticket is then ready for the next launch."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr + block, 1, sem="acq_rel") == PARTS - 1
    if last:
        tl.store(ticket_ptr + block, 0)
    return last


@triton.jit
def _total(part_ptr, block, which, CP: tl.constexpr, PARTS: tl.constexpr):
    """The sum over all programs' partial sums, (CP,)."""
    p, c = tl.arange(0, PARTS), tl.arange(0, CP)
    at = ((block * PARTS + p[:, None]) * 2 + which) * CP + c[None, :]
    return tl.sum(tl.load(part_ptr + at, cache_modifier=".cg"), 0)


@triton.jit
def _affine(mean_ptr, rstd_ptr, gamma_ptr, beta_ptr, c, real):
    """Mean and 1/std of channels, and the scale and shift that normalise them, (CP,) each."""
    mean = tl.load(mean_ptr + c, mask=real, other=0.0)
    rstd = tl.load(rstd_ptr + c, mask=real, other=0.0)
    scale = tl.load(gamma_ptr + c, mask=real, other=0.0) * rstd
    return mean, rstd, scale, tl.load(beta_ptr + c, mask=real, other=0.0) - mean * scale


@triton.jit
def _statistics(
    x_ptr, part_ptr, ticket_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, tracked_ptr,
    rows, units, momentum, eps, ALIGN: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Mean and 1/std of every channel, and the running statistics; sums are taken around the running mean."""
    part, block, channels = tl.program_id(0), tl.program_id(1), units * ALIGN
    c = block * CP + tl.arange(0, CP)
    real = c < channels
    pivot = tl.load(running_mean_ptr + c, mask=real, other=0.0)
    total = tl.zeros((R, CP), tl.float32)
    square = tl.zeros((R, CP), tl.float32)
    for start in range(part * R, rows, PARTS * R):
        r = start + tl.arange(0, R)
        mask = (r[:, None] < rows) & real[None, :]
        x = tl.load(x_ptr + r[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - pivot[None, :], 0.0)
        total += x
        square += x * x
    at = (block * PARTS + part) * 2 * CP + tl.arange(0, CP)
    tl.store(part_ptr + at, tl.sum(total, 0))
    tl.store(part_ptr + at + CP, tl.sum(square, 0))
    if _finish(ticket_ptr, block, PARTS):
        shift = _total(part_ptr, block, 0, CP, PARTS) / rows
        var = tl.maximum(_total(part_ptr, block, 1, CP, PARTS) / rows - shift * shift, 0.0)
        tl.store(mean_ptr + c, pivot + shift, mask=real)
        tl.store(rstd_ptr + c, 1.0 / tl.sqrt(var + eps), mask=real)
        tl.store(running_mean_ptr + c, pivot + momentum * shift, mask=real)
        old = tl.load(running_var_ptr + c, mask=real, other=0.0)
        tl.store(running_var_ptr + c, old + momentum * (var * (rows / (rows - 1.0)) - old), mask=real)
        if block == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit
def _normalise(
    x_ptr, residual_ptr, y_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, rows, units,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, CP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """y = relu(gamma (x - mean) / std + beta + residual)."""
    block, channels = tl.program_id(1), units * ALIGN
    c = block * CP + tl.arange(0, CP)
    real = c < channels
    _, _, scale, shift = _affine(mean_ptr, rstd_ptr, gamma_ptr, beta_ptr, c, real)
    r = tl.program_id(0) * R + tl.arange(0, R)
    at = r[:, None] * channels + c[None, :]
    mask = (r[:, None] < rows) & real[None, :]
    y = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        y = tl.maximum(y, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_statistics(
    x_ptr, y_ptr, dy_ptr, dz_ptr, part_ptr, ticket_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, dgamma_ptr, dbeta_ptr,
    rows, units, RELU: tl.constexpr, RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, CP: tl.constexpr, R: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """dgamma and dbeta, and with a residual dz: the gradient behind the ReLU, which is the residual's."""
    part, block, channels = tl.program_id(0), tl.program_id(1), units * ALIGN
    c = block * CP + tl.arange(0, CP)
    real = c < channels
    mean, rstd, scale, shift = _affine(mean_ptr, rstd_ptr, gamma_ptr, beta_ptr, c, real)
    total = tl.zeros((R, CP), tl.float32)
    along = tl.zeros((R, CP), tl.float32)
    for start in range(part * R, rows, PARTS * R):
        r = start + tl.arange(0, R)
        at = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & real[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dz = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            if RESIDUAL:
                dz = tl.where(tl.load(y_ptr + at, mask=mask, other=0.0) > 0, dz, 0.0)
                tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
            else:
                dz = tl.where(x * scale[None, :] + shift[None, :] > 0, dz, 0.0)
        total += dz
        along += dz * (x - mean[None, :])
    at = (block * PARTS + part) * 2 * CP + tl.arange(0, CP)
    tl.store(part_ptr + at, tl.sum(total, 0))
    tl.store(part_ptr + at + CP, tl.sum(along, 0))
    if _finish(ticket_ptr, block, PARTS):
        tl.store(dbeta_ptr + c, _total(part_ptr, block, 0, CP, PARTS), mask=real)
        tl.store(dgamma_ptr + c, _total(part_ptr, block, 1, CP, PARTS) * rstd, mask=real)


@triton.jit
def _backward(
    x_ptr, dz_ptr, dx_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, dgamma_ptr, dbeta_ptr, rows, units,
    RELU: tl.constexpr, ALIGN: tl.constexpr, CP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """dx = gamma / std (dz - mean(dz) - xhat mean(dz xhat)); with RELU, dz is masked here once more."""
    block, channels = tl.program_id(1), units * ALIGN
    c = block * CP + tl.arange(0, CP)
    real = c < channels
    mean, rstd, scale, shift = _affine(mean_ptr, rstd_ptr, gamma_ptr, beta_ptr, c, real)
    constant = tl.load(dbeta_ptr + c, mask=real, other=0.0) / rows
    slope = tl.load(dgamma_ptr + c, mask=real, other=0.0) * rstd / rows
    r = tl.program_id(0) * R + tl.arange(0, R)
    at = r[:, None] * channels + c[None, :]
    mask = (r[:, None] < rows) & real[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dz = tl.load(dz_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        dz = tl.where(x * scale[None, :] + shift[None, :] > 0, dz, 0.0)
    dx = scale[None, :] * (dz - constant[None, :] - (x - mean[None, :]) * slope[None, :])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class _Geometry:
    """The division of (rows, channels) among programs."""

    def __init__(self, x: Tensor) -> None:
        channels, self.rows = x.shape[1], x.numel() // x.shape[1]
        align = 8 if channels % 8 == 0 else 1
        width = min(triton.next_power_of_2(channels), WIDTH)
        self.units = channels // align
        self.shape = {"ALIGN": align, "CP": width, "R": TILE // width}
        self.tiles, self.blocks = triton.cdiv(self.rows, TILE // width), triton.cdiv(channels, width)
        self.parts = min(triton.next_power_of_2(self.tiles), PARTS)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, residual: Tensor | None, norm: FusedNorm) -> Tensor:
        g, relu = _Geometry(x), norm.relu
        partial, tickets = norm.scratch(g, x.device)
        y, mean, rstd = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)
        _statistics[(g.parts, g.blocks)](
            x, partial, tickets, mean, rstd, norm.running_mean, norm.running_var, norm.num_batches_tracked,
            g.rows, g.units, norm.momentum, norm.eps, **g.shape, PARTS=g.parts, num_warps=WARPS,
        )  # fmt: skip
        _normalise[(g.tiles, g.blocks)](
            x, x if residual is None else residual, y, gamma, beta, mean, rstd, g.rows, g.units,
            RELU=relu, RESIDUAL=residual is not None, **g.shape, num_warps=WARPS,
        )  # fmt: skip
        ctx.norm, ctx.geometry, ctx.residual = norm, g, residual is not None
        ctx.save_for_backward(x, gamma, beta, mean, rstd, y if relu and residual is not None else x)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, rstd, y = ctx.saved_tensors
        g, relu = ctx.geometry, ctx.norm.relu
        partial, tickets = ctx.norm.scratch(g, x.device)
        dy = grad_outputs[0].contiguous(memory_format=torch.channels_last)
        masked = ctx.residual and relu
        dz = torch.empty_like(dy) if masked else dy
        dx, dgamma, dbeta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(beta)
        _backward_statistics[(g.parts, g.blocks)](
            x, y, dy, dz, partial, tickets, gamma, beta, mean, rstd, dgamma, dbeta, g.rows, g.units,
            RELU=relu, RESIDUAL=ctx.residual, **g.shape, PARTS=g.parts, num_warps=WARPS,
        )  # fmt: skip
        _backward[(g.tiles, g.blocks)](
            x, dz, dx, gamma, beta, mean, rstd, dgamma, dbeta, g.rows, g.units,
            RELU=relu and not masked, **g.shape, num_warps=WARPS,
        )  # fmt: skip
        return dx, dgamma, dbeta, dz if ctx.residual else None, None


class FusedNorm(nn.Module):
    """Replaces an affine batch norm in training, with the same names; `relu` rectifies, after a residual."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm2d, relu: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.momentum, self.eps, self.relu = (
            norm.weight, norm.bias, float(norm.momentum or 0), norm.eps, relu,
        )  # fmt: skip
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)
        self._scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def scratch(self, geometry: _Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
        """Partial sums and tickets; one set serves all launches, which follow each other on the particle's stream.

        A batch of another size may need another set, and none is freed: a captured step goes on writing to its own.
        """
        key = geometry.blocks, geometry.parts
        if key not in self._scratch:
            partial = torch.empty(*key, 2, geometry.shape["CP"], device=device)
            self._scratch[key] = partial, torch.zeros(geometry.blocks, dtype=torch.int32, device=device)
        return self._scratch[key]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.to(x.dtype).expand_as(x).contiguous(memory_format=torch.channels_last)
        return _Function.apply(x, self.weight, self.bias, residual, self)  # type: ignore[return-value]
