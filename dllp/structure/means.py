"""Gated statistics: a mean over units counts the open ones only, as it will after the cut.

Layer norms, RMS norms, group norms and global response norms take means over channels. In a gated network such a
module runs with its means weighted by the gates z: sum(z x) / sum(z) in place of sum(x) / C. Whatever class it is of,
its own forward computes the rest.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

GATE = "gate_of_means"  # where a module finds the gates (C,) of the axis it takes means over; all are open without


class GatedMeans(TorchFunctionMode):
    """Weights means over the axis `axis`, counted from the last one, by gates (C,)."""

    def __init__(self, gates: Tensor, axis: int) -> None:
        super().__init__()
        self.gates, self.axis = gates, axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in STATISTICS and isinstance(args[0], Tensor):
            shape = args[0].shape
            if len(shape) >= -self.axis and shape[self.axis] == len(self.gates):
                result = STATISTICS[name](self, *args, **kwargs)
                if result is not None:
                    return result
        return func(*args, **kwargs)

    def weights(self, x: Tensor) -> Tensor:
        """The gates in the shape of x."""
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return self.gates.view(shape).to(x.dtype)

    def average(self, x: Tensor, dims: list[int]) -> Tensor:
        """Weighted mean over `dims`, which stay with size 1."""
        z = self.weights(x)
        others = torch.Size([x.shape[d] for d in dims if d != self.axis]).numel()
        return (z * x).sum(dims, keepdim=True) / (z.sum() * others)

    def normalise(self, x: Tensor, dims: list[int], eps: float, *, centred: bool = True) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        wide = wide - self.average(wide, dims) if centred else wide
        return wide * torch.rsqrt(self.average(wide.square(), dims) + eps)


def _mean(mode: GatedMeans, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    dims = [d % x.dim() - x.dim() for d in dims]
    if mode.axis not in dims:
        return None
    result = mode.average(x if dtype is None else x.to(dtype), dims)
    return result if keepdim else result.squeeze(dims)


def _var(
    mode: GatedMeans, x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
    correction: Any = None,
) -> Tensor | None:  # fmt: skip
    centre = _mean(mode, x, dim, keepdim=True)
    if centre is None or (unbiased if correction is None else correction):  # of so many minus one: left alone
        return None
    return _mean(mode, (x - centre).square(), dim, keepdim)


def _layer_norm(
    mode: GatedMeans, x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *_: Any,
) -> Tensor:  # fmt: skip
    return _affine(mode.normalise(x, list(range(-len(normalized_shape), 0)), eps), weight, bias)


def _rms_norm(
    mode: GatedMeans, x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    dims = list(range(-len(normalized_shape), 0))
    return _affine(mode.normalise(x, dims, eps, centred=False), weight, None).to(x.dtype)


def _group_norm(
    mode: GatedMeans, x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    z = mode.weights(x).expand(1, x.shape[1], *[1] * (x.dim() - 2)).reshape(1, num_groups, -1, 1)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    wide = wide.reshape(len(x), num_groups, x.shape[1] // num_groups, -1)
    count = z.sum(2, keepdim=True) * wide.shape[-1]
    wide = wide - (z * wide).sum((2, 3), keepdim=True) / count
    variance = (z * wide.square()).sum((2, 3), keepdim=True) / count
    shape = [-1, *[1] * (x.dim() - 2)]
    weight, bias = (None if t is None else t.view(shape) for t in (weight, bias))
    return _affine((wide * torch.rsqrt(variance + eps)).reshape(x.shape), weight, bias)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


STATISTICS = {
    "mean": _mean, "var": _var, "layer_norm": _layer_norm, "rms_norm": _rms_norm, "group_norm": _group_norm,
}  # fmt: skip


class GatedForward:
    """The forward of a module whose means are gated wherever it has gates."""

    def __init__(self, module: nn.Module, axis: int) -> None:
        self.hook = -1
        self.module, self.axis, self.inner = module, axis, vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner or partial(type(self.module).forward, self.module)
        gates = getattr(self.module, GATE, None)
        with nullcontext() if gates is None else GatedMeans(gates, self.axis):
            return forward(*args, **kwargs)


def gate_means(model: nn.Module, axes: dict[str, int]) -> None:
    """Let the named modules of a network take gated means over an axis each, in place."""
    for name, axis in axes.items():
        module = model.get_submodule(name)
        if isinstance(vars(module).get("forward"), GatedForward):
            continue
        forward = GatedForward(module, axis)
        # encoder layers of PyTorch call a kernel in place of their norms unless they see a hook
        forward.hook = module.register_forward_pre_hook(lambda *_: None).id
        module.forward = forward


def plain_means(model: nn.Module) -> None:
    """Undo `gate_means`, in place."""
    for module in model.modules():
        gated = vars(module).get("forward")
        if isinstance(gated, GatedForward):
            del module.forward
            vars(module).pop(GATE, None)
            module._forward_pre_hooks.pop(gated.hook, None)
            if gated.inner is not None:
                module.forward = gated.inner
