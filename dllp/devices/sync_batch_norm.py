"""Batch norm over all shards of a batch: what a single process would compute on the whole of it.

PyTorch's own module of this kind works on accelerators only; this one is a few differentiable sums, for any device.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dllp.devices.mesh import Axis


class _Sum(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.add_(values.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.axis.add_(gradient.contiguous().clone()), None


class SharedNorm(nn.Module):
    """A batch norm with the weights and running statistics of `norm`, under the same names."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: _BatchNorm, axis: Axis) -> None:
        super().__init__()
        self.eps, self.momentum, self.axis = norm.eps, norm.momentum, axis
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if self.training or mean is None or variance is None:
            return self._normalised(x)
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)

    def _normalised(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # sums of bfloat16 lose too much
        axes, shape = [d for d in range(x.dim()) if d != 1], (1, -1) + (1,) * (x.dim() - 2)
        own = wide.new_full((1,), x.numel() / x.shape[1])
        total, count = _Sum.apply(torch.cat([wide.sum(axes), own]), self.axis).split([x.shape[1], 1])
        mean = total / count
        centred = wide - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(axes), self.axis) / count
        self._remember(mean.detach(), variance.detach(), count.detach())
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        normed = centred * scale.view(shape)
        return (normed if self.bias is None else normed + self.bias.view(shape)).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.add_(rate * (mean - self.running_mean))
        self.running_var.add_(rate * (variance * count / (count - 1) - self.running_var))


def share(networks: list[nn.Module], axis: Axis) -> list[nn.Module]:
    """Networks with the same parameters and buffers (not copies) under the same names, whose batch norms are shared."""
    return [_shared(network, axis) for network in networks]


def _shared(network: nn.Module, axis: Axis) -> nn.Module:
    held = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, held)
    if isinstance(twin, _BatchNorm):
        return SharedNorm(twin, axis)
    for name, module in list(twin.named_modules()):
        if isinstance(module, _BatchNorm):
            twin.set_submodule(name, SharedNorm(module, axis))
    return twin
