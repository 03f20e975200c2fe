"""A 3x3 convolution of few channels on channels-last activations (Triton).

With 16 or 32 channels a convolution is bound by memory, and cuDNN's kernels, made for wide layers, take several times
as long as reading and writing the activations once. Here a program takes a run of pixels with all channels and adds one
small matrix product for each tap, or for three taps side by side. Sums are added in a fixed order: results repeat.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# a kernel's launch takes options of Triton besides its arguments, and its constants are plain numbers

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: pixels and warps of a program, and taps in one matrix product (1, or 4 for three and a blank)."""

    pixels: int
    warps: int
    taps: int


CONVOLVE = Tiles(256, 4, 1)
WEIGHTS = Tiles(64, 4, 4)
PARTS = 528  # programs that share the pixels in the gradient of the weights: four for each of an H100's processors
SMALLEST = 16  # a matrix product's smallest inner dimension


@triton.jit
def _tap(first, k, CP: tl.constexpr, TAPS: tl.constexpr):
    """The taps 0..8 of columns `k`, and a mask that is False for blank columns."""
    return first * (3 if TAPS == 4 else 1) + k // CP, k // CP < 3


@triton.jit
def _neighbours(
    x_ptr, pixel, pixels, first, IN: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, CP: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """(M,) pixels -> (M, TAPS * CP): their neighbours' channels side by side, zero outside the image."""
    k = tl.arange(0, TAPS * CP)
    tap, real = _tap(first, k, CP, TAPS)
    tap = 8 - tap if FLIP else tap
    dy, dx, c = tap // 3 - 1, tap % 3 - 1, k % CP
    y, x = (pixel // W % H)[:, None] + dy[None, :], (pixel % W)[:, None] + dx[None, :]
    inside = (y >= 0) & (y < H) & (x >= 0) & (x < W) & (pixel < pixels)[:, None] & (real & (c < IN))[None, :]
    at = (pixel[:, None] + (dy * W + dx)[None, :]) * IN + c[None, :]
    return tl.load(x_ptr + at, mask=inside, other=0.0)


@triton.jit
def _convolve(
    x_ptr, weight_ptr, y_ptr, pixels, stride_in, stride_out, stride_tap,
    IN: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CP: tl.constexpr, OP: tl.constexpr,
    TAPS: tl.constexpr, FLIP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """y = x * w; with FLIP and the strides exchanged, the gradient in x."""
    pixel = tl.program_id(0) * M + tl.arange(0, M)
    k, o = tl.arange(0, TAPS * CP), tl.arange(0, OP)
    total = tl.zeros((M, OP), tl.float32)
    for first in tl.static_range(3 if TAPS == 4 else 9):
        x = _neighbours(x_ptr, pixel, pixels, first, IN, H, W, CP, TAPS, FLIP)
        tap, real = _tap(first, k, CP, TAPS)
        at = (tap * stride_tap + k % CP * stride_in)[:, None] + (o * stride_out)[None, :]
        weight = tl.load(weight_ptr + at, mask=(real & (k % CP < IN))[:, None] & (o < OUT)[None, :], other=0.0)
        total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
    where = (pixel < pixels)[:, None] & (o < OUT)[None, :]
    tl.store(y_ptr + pixel[:, None] * OUT + o[None, :], total.to(y_ptr.dtype.element_ty), mask=where)


@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, part_ptr, pixels, IN: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    CP: tl.constexpr, OP: tl.constexpr, TAPS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Each program's share of dW, (taps and inputs, outputs)."""
    part, first, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    k, o = tl.arange(0, TAPS * CP), tl.arange(0, OP)
    total = tl.zeros((TAPS * CP, OP), tl.float32)
    for start in range(part * M, pixels, parts * M):
        pixel = start + tl.arange(0, M)
        x = _neighbours(x_ptr, pixel, pixels, first, IN, H, W, CP, TAPS, False)
        where = (pixel < pixels)[:, None] & (o < OUT)[None, :]
        dy = tl.load(dy_ptr + pixel[:, None] * OUT + o[None, :], mask=where, other=0.0)
        total = tl.dot(tl.trans(x), dy, total, input_precision="ieee")
    at = ((part * tl.num_programs(1) + first) * TAPS * CP + k[:, None]) * OP + o[None, :]
    tl.store(part_ptr + at, total)


def _geometry(inputs: int, outputs: int, size: torch.Size, tiles: Tiles) -> dict[str, int]:
    """Constants of a kernel; from the channels the compiler concludes that it may load whole words."""
    padded = max(triton.next_power_of_2(inputs), SMALLEST // tiles.taps)
    return {
        "IN": inputs, "OUT": outputs, "H": size[0], "W": size[1], "CP": padded,
        "OP": max(triton.next_power_of_2(outputs), SMALLEST), "TAPS": tiles.taps, "M": tiles.pixels,
    }  # fmt: skip


def convolve(x: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """(N, C, H, W) channels-last and (O, C, 3, 3) -> (N, O, H, W); `transposed`: the gradient in x from that in y."""
    out_axis, in_axis = (1, 0) if transposed else (0, 1)
    inputs, outputs, pixels = x.shape[1], weight.shape[out_axis], x.numel() // x.shape[1]
    y = torch.empty(
        (x.shape[0], outputs, *x.shape[2:]), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )
    _convolve[(triton.cdiv(pixels, CONVOLVE.pixels),)](
        x, weight, y, pixels, weight.stride(in_axis), weight.stride(out_axis), weight.stride(3),
        **_geometry(inputs, outputs, x.shape[2:], CONVOLVE), FLIP=transposed, num_warps=CONVOLVE.warps,
    )  # fmt: skip
    return y


def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """(O, C, 3, 3) in float32."""
    inputs, outputs, pixels = x.shape[1], dy.shape[1], x.numel() // x.shape[1]
    g = _geometry(inputs, outputs, x.shape[2:], WEIGHTS)
    parts, rows = min(PARTS, triton.cdiv(pixels, WEIGHTS.pixels)), 3 if g["TAPS"] == 4 else 9
    partial = torch.empty(parts, rows * g["TAPS"] * g["CP"], g["OP"], device=x.device)
    _weight_gradient[(parts, rows)](x, dy, partial, pixels, **g, num_warps=WEIGHTS.warps)
    total = partial.sum(0).view(3, -1, g["CP"], g["OP"])[:, :3, :inputs, :outputs]
    return total.permute(3, 2, 0, 1)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return convolve(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = grad_outputs[0].contiguous(memory_format=torch.channels_last)
        dx = convolve(dy, weight, transposed=True) if ctx.needs_input_grad[0] else None
        return dx, weight_gradient(x, dy) if ctx.needs_input_grad[1] else None


class DirectConv(nn.Module):
    """Replaces a convolution in training, with the same parameter under the same name."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight = conv.weight

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x = x.to(dtype).contiguous(memory_format=torch.channels_last)
        return _Function.apply(x, self.weight)  # type: ignore[return-value]
