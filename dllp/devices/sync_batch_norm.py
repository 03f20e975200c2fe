"""Batch norm with the statistics of the whole batch where processes hold shards of it.

On CUDA it is :class:`torch.nn.SyncBatchNorm`, which works on accelerators only; on the CPU the same sums over gloo.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dllp.devices.mesh import Axis


class _Sum(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce_(values.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.axis.all_reduce_(gradient.contiguous().clone()), None


class CudaSyncBatchNorm(nn.SyncBatchNorm):
    """PyTorch's own, which asks the axis for its group: the axis drops it when the run ends."""

    axis: Axis

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.axis.group


class CpuSyncBatchNorm(_BatchNorm):
    """The same for the CPU, where `nn.SyncBatchNorm` refuses to work."""

    axis: Axis

    def _check_input_dim(self, input: Tensor) -> None: ...

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))  # sums of bfloat16 lose too much
        dims, shape = [d for d in range(input.dim()) if d != 1], (1, -1) + (1,) * (input.dim() - 2)
        count = wide.new_full((1,), input.numel() / input.shape[1])
        total, count = _Sum.apply(torch.cat([wide.sum(dims), count]), self.axis).split([input.shape[1], 1])
        mean = total / count
        centred = wide - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(dims), self.axis) / count
        self._track(mean.detach(), (variance * count / (count - 1)).detach())
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        normed = centred * scale.view(shape)
        return (normed if self.bias is None else normed + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.add_(rate * (mean - self.running_mean))
        self.running_var.add_(rate * (variance - self.running_var))


def synchronise(network: nn.Module, axis: Axis) -> nn.Module:
    """The network with synchronous batch norms: same names, same parameters and buffers (not copies)."""
    held = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, held)
    kind = CudaSyncBatchNorm if next(network.parameters()).is_cuda else CpuSyncBatchNorm
    for module in twin.modules():
        if isinstance(module, _BatchNorm):  # whose attributes are all that both classes need besides the axis
            module.__class__, module.axis = kind, axis  # pyright: ignore[reportArgumentType]
    return twin
