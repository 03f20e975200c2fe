"""A 3x3 convolution of few channels (`dllp.devices.direct_conv`) against cuDNN's, on the shapes of ResNet-56's stages.

python benchmarks/convolution.py [--sweep]     # needs CUDA; bfloat16 activations, medians in milliseconds

`forward`, `inputs` and `weights` are the three operations of a training step: the convolution, and the gradients in its
input and in its weights.
"""

from __future__ import annotations

import argparse
import json
from itertools import product

import torch
import torch.nn.functional as F
from batchnorm import milliseconds
from torch import Tensor

from dllp.devices import direct_conv
from dllp.devices.direct_conv import Tiles

SHAPES = (
    ((512, 16, 32, 32), 16), ((512, 32, 16, 16), 32), ((512, 64, 8, 8), 64), ((512, 16, 32, 32), 8),
    ((512, 8, 32, 32), 16), ((512, 3, 32, 32), 16),
)  # fmt: skip


def tensors(shape: tuple[int, ...], outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, shape[1], 3, 3, device="cuda") / (3 * shape[1] ** 0.5)
    dy = torch.randn(shape[0], outputs, *shape[2:], device="cuda", dtype=torch.bfloat16)
    return x, weight, dy.contiguous(memory_format=torch.channels_last)


def library(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, float]:
    w = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)

    def backward(mask: tuple[bool, bool, bool]) -> float:
        rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return milliseconds(lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *rest, mask))

    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        forward = milliseconds(lambda: F.conv2d(x, w, padding=1))
        return {"forward": forward, "inputs": backward((True, False, False)), "weights": backward((False, True, False))}


def direct(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, float]:
    return {
        "forward": milliseconds(lambda: direct_conv.convolve(x, weight)),
        "inputs": milliseconds(lambda: direct_conv.convolve(dy, weight, transposed=True)),
        "weights": milliseconds(lambda: direct_conv.weight_gradient(x, dy)),
    }


def error(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, float]:
    """Relative differences to float64, of the direct operations and of cuDNN's."""
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    y = F.conv2d(*leaves, padding=1)
    true = [y, *torch.autograd.grad(y, leaves, dy.double())]
    found = [direct_conv.convolve(x, weight), direct_conv.convolve(dy, weight, transposed=True)]
    found.append(direct_conv.weight_gradient(x, dy))
    pairs = zip(("forward", "inputs", "weights"), found, true, strict=True)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)), help="which of the shapes")
    options = parser.parse_args()
    choices = [Tiles(*c) for c in product((64, 128, 256), (2, 4, 8), (1, 4))] if options.sweep else [None]
    for which in options.shapes:
        shape, outputs = SHAPES[which]
        x, weight, dy = tensors(shape, outputs)
        line = {"shape": shape, "outputs": outputs, "error": error(x[:8], weight, dy[:8])}
        line |= {"library": library(x, weight, dy)}
        for tiles in choices:
            if tiles is not None:
                direct_conv.CONVOLVE = direct_conv.WEIGHTS = tiles
            print(json.dumps({**line, "tiles": tiles and vars(tiles), "direct": direct(x, weight, dy)}), flush=True)


if __name__ == "__main__":
    main()
