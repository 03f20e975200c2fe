"""A direct 3x3 convolution for few channels (Triton) against cuDNN, on the shapes of ResNet-56's stages.

    python benchmarks/convolution.py          # needs CUDA; checks, then times forward, both gradients, medians
    TRITON_INTERPRET=1 python benchmarks/convolution.py --check    # checks alone, on any machine with Triton

With 16 channels a convolution is bound by memory: forward must read and write the activations once, each gradient
likewise. cuDNN's tiles are made for wider layers and take five to ten times that. Here a program holds one tile of
pixels with all nine neighbours and all channels, so that one matrix product does the work. A candidate: training does
not use it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from batchnorm import milliseconds
from torch import Tensor

PIXELS, PARTS, WARPS = 128, 528, 4


@triton.jit
def _columns(x_ptr, pixel, pixels, height, width, channels, CP: tl.constexpr, KP: tl.constexpr, FLIP: tl.constexpr):
    """(M,) pixels -> (M, KP): the nine neighbours' channels side by side, zero outside the image."""
    k = tl.arange(0, KP)
    tap, c = k // CP, k % CP
    tap = tl.where(FLIP, 8 - tap, tap)
    dy, dx = tap // 3 - 1, tap % 3 - 1
    row, column = (pixel // width) % height, pixel % width
    inside = (row[:, None] + dy[None, :] >= 0) & (row[:, None] + dy[None, :] < height)
    inside &= (column[:, None] + dx[None, :] >= 0) & (column[:, None] + dx[None, :] < width)
    inside &= (pixel[:, None] < pixels) & (k < 9 * CP)[None, :] & (c < channels)[None, :]
    at = (pixel[:, None] + dy[None, :] * width + dx[None, :]) * channels + c[None, :]
    return tl.load(x_ptr + at, mask=inside, other=0.0)


@triton.jit
def _convolve(
    x_ptr, weight_ptr, y_ptr, pixels, height, width, inputs, outputs, stride_in, stride_out, stride_tap,
    M: tl.constexpr, CP: tl.constexpr, OP: tl.constexpr, KP: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """y = x * w; with FLIP and the strides exchanged, the gradient in x."""
    pixel = tl.program_id(0) * M + tl.arange(0, M)
    k, o = tl.arange(0, KP), tl.arange(0, OP)
    tap, c = k // CP, k % CP
    real = ((k < 9 * CP) & (c < inputs))[:, None] & (o < outputs)[None, :]
    at = (tap * stride_tap + c * stride_in)[:, None] + (o * stride_out)[None, :]
    columns = _columns(x_ptr, pixel, pixels, height, width, inputs, CP, KP, FLIP)
    weight = tl.load(weight_ptr + at, mask=real, other=0.0).to(columns.dtype)
    y = tl.dot(columns, weight, input_precision="ieee")
    where = (pixel[:, None] < pixels) & (o < outputs)[None, :]
    tl.store(y_ptr + pixel[:, None] * outputs + o[None, :], y.to(y_ptr.dtype.element_ty), mask=where)


@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, part_ptr, pixels, height, width, inputs, outputs,
    M: tl.constexpr, CP: tl.constexpr, OP: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Each program's share of dW, (KP, OP)."""
    k, o = tl.arange(0, KP), tl.arange(0, OP)
    total = tl.zeros((KP, OP), tl.float32)
    for start in range(tl.program_id(0) * M, pixels, PARTS * M):
        pixel = start + tl.arange(0, M)
        columns = _columns(x_ptr, pixel, pixels, height, width, inputs, CP, KP, False)
        where = (pixel[:, None] < pixels) & (o < outputs)[None, :]
        dy = tl.load(dy_ptr + pixel[:, None] * outputs + o[None, :], mask=where, other=0.0)
        total += tl.dot(tl.trans(columns), dy, input_precision="ieee")
    tl.store(part_ptr + (tl.program_id(0) * KP + k[:, None]) * OP + o[None, :], total)


class DirectConv(torch.autograd.Function):
    """(N, C, H, W) channels-last, (O, C, 3, 3) channels-last weights in float32 -> (N, O, H, W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _run(x, weight, weight.shape[0], flip=False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = grad_outputs[0].contiguous(memory_format=torch.channels_last)
        dx = _run(dy, weight, weight.shape[1], flip=True)
        outputs, inputs = weight.shape[:2]
        g = _geometry(inputs, outputs)
        pixels = x.numel() // inputs
        parts = min(PARTS, triton.cdiv(pixels, PIXELS))
        partial = torch.empty(parts, g["KP"], g["OP"], device=x.device)
        _weight_gradient[(parts,)](
            x, dy, partial, pixels, *x.shape[2:], inputs, outputs, M=PIXELS, **g, PARTS=parts, num_warps=WARPS
        )
        total = partial.sum(0)[: 9 * g["CP"], :outputs].view(3, 3, g["CP"], outputs)[:, :, :inputs]
        return dx, total.permute(3, 2, 0, 1)


def _geometry(inputs: int, outputs: int) -> dict[str, int]:
    padded = triton.next_power_of_2(inputs)
    wide = max(triton.next_power_of_2(outputs), 16)
    return {"CP": padded, "OP": wide, "KP": max(triton.next_power_of_2(9 * padded), 16)}


def _run(x: Tensor, weight: Tensor, outputs: int, *, flip: bool) -> Tensor:
    """The convolution, or the gradient in its input from the gradient in its output."""
    inputs, pixels = x.shape[1], x.numel() // x.shape[1]
    y = x.new_empty(x.shape[0], outputs, *x.shape[2:]).contiguous(memory_format=torch.channels_last)
    out_axis, in_axis = (1, 0) if flip else (0, 1)
    assert weight.stride(3) * 3 == weight.stride(2), "nine taps must lie at equal distances"
    _convolve[(triton.cdiv(pixels, PIXELS),)](
        x, weight, y, pixels, *x.shape[2:], inputs, outputs, weight.stride(in_axis), weight.stride(out_axis),
        weight.stride(3), M=PIXELS, **_geometry(inputs, outputs), FLIP=flip, num_warps=WARPS,
    )  # fmt: skip
    return y


def direct(x: Tensor, weight: Tensor) -> Tensor:
    return DirectConv.apply(x, weight)  # type: ignore[return-value]


def library(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight.to(x.dtype), padding=1)


def check(device: torch.device, shape: tuple[int, int, int, int], outputs: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative differences to float64: output, gradient in the input, gradient in the weights."""
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, shape[1], 3, 3, device=device).contiguous(memory_format=torch.channels_last)
    dy = torch.randn(shape[0], outputs, *shape[2:], device=device).to(dtype)
    dy = dy.contiguous(memory_format=torch.channels_last)
    results = []
    for function, kind in ((direct, None), (library, torch.float64)):
        leaves = [t.to(kind) if kind else t.clone(memory_format=torch.preserve_format) for t in (x, weight)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        y = function(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    names = ("y", "dx", "dweight")
    return {
        name: float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
        for name, a, b in zip(names, *results, strict=True)
    }


def duration(function: Any, shape: tuple[int, int, int, int], outputs: int) -> dict[str, float]:
    """Milliseconds of forward, and of forward with both gradients, on bfloat16 activations."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, shape[1], 3, 3, device="cuda").contiguous(memory_format=torch.channels_last)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    dy = torch.randn_like(function(*leaves))
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        with torch.no_grad():
            forward = milliseconds(lambda: function(*leaves))
        return {"forward": forward, "all": milliseconds(lambda: torch.autograd.grad(function(*leaves), leaves, dy))}


def main() -> None:
    global PIXELS, PARTS, WARPS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="correctness only")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape, outputs in (((2, 16, 8, 8), 16), ((3, 8, 5, 7), 16), ((2, 16, 6, 4), 8), ((1, 24, 5, 5), 3)):
        # the interpreter cannot multiply bfloat16
        for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
            differences = check(device, shape, outputs, dtype)
            print(json.dumps({"check": shape, "outputs": outputs, "dtype": str(dtype), **differences}))
    if options.check or device.type != "cuda":
        return
    stages = (((512, 16, 32, 32), 16), ((512, 16, 32, 32), 8), ((512, 8, 32, 32), 16), ((512, 32, 16, 16), 32))
    for shape, outputs in stages:
        line = {"shape": shape, "outputs": outputs, "library": duration(library, shape, outputs)}
        for PIXELS in (64, 128, 256):
            for WARPS in (4, 8):
                print(
                    json.dumps({**line, "pixels": PIXELS, "warps": WARPS, "direct": duration(direct, shape, outputs)})
                )


if __name__ == "__main__":
    main()
