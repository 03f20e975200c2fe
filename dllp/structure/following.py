"""Forwards of cut modules that their classes' own do not fit: views of other sizes, and PyTorch's attention.

:mod:`dllp.structure.views` finds the views that have other sizes than a forward asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dllp.errors import StructureError

VIEWS = frozenset({"view", "reshape"})


def asked_sizes(name: str, args: tuple[Any, ...]) -> list[int] | None:
    """The sizes that a view is asked for; None for anything else."""
    if name not in VIEWS or len(args) < 2:
        return None
    sizes = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    # an exporter has symbols for sizes that may change
    return sizes if all(isinstance(size, (int, torch.SymInt)) for size in sizes) else None


class Following(TorchFunctionMode):
    """Gives the views of a forward other sizes than it asks for."""

    def __init__(self, sizes: Mapping[int, list[int]]) -> None:
        super().__init__()
        self.sizes, self.count = sizes, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = asked_sizes(getattr(func, "__name__", ""), args)
        if asked is not None:
            sizes = self.sizes.get(self.count)
            self.count += 1
            if sizes is not None and len(sizes) == len(asked):
                return func(args[0], tuple(own or size for own, size in zip(sizes, asked, strict=True)))
        return func(*args, **(kwargs or {}))


class FollowingForward:
    """The forward of a cut module with the sizes that its views have now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.sizes: dict[int, list[int]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Following(self.sizes):
            return type(self.module).forward(self.module, *args, **kwargs)


def follow(module: nn.Module, entry: str, sizes: list[int]) -> None:
    """Let a view of a module have other sizes, in place; `entry` is `@call/rank`."""
    forward = vars(module).get("forward")
    if not isinstance(forward, FollowingForward):
        forward = FollowingForward(module)
        module.forward = forward
    forward.sizes[int(entry[1:].partition("/")[0])] = sizes


class CutAttention:
    """The forward of a cut `nn.MultiheadAttention`, all sizes taken from the weights, none from the inputs' width."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self.module = module

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        m = self.module
        batched = query.dim() == 3
        inputs = [x if batched else x[None] if m.batch_first else x[:, None] for x in (query, key, value)]
        if not m.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        weights = _projections(m)
        biases: Any = (None,) * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
        projected = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
        q, k, v = (x.unflatten(-1, (m.num_heads, -1)).transpose(1, 2) for x in projected)  # (B, heads, T, dim)
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        if is_causal and mask is None:
            mask = q.new_full((q.shape[2], k.shape[2]), -torch.inf).triu(1)
        if need_weights:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            shares = (scores if mask is None else scores + mask).softmax(-1)
            mixed = F.dropout(shares, m.dropout, m.training) @ v
        else:
            shares = None
            mixed = F.scaled_dot_product_attention(q, k, v, mask, m.dropout if m.training else 0.0)
        out = m.out_proj(mixed.transpose(1, 2).flatten(2))
        out = out if m.batch_first else out.transpose(0, 1)
        if shares is not None and average_attn_weights:
            shares = shares.mean(1)
        if not batched:
            out, shares = out.squeeze(0 if m.batch_first else 1), None if shares is None else shares[0]
        return out, shares

    @staticmethod
    def _mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Both masks as numbers that are added to the scores (B, heads, T, S); None without one."""
        result = None
        for mask in (attn_mask, None if padding is None else padding.view(-1, 1, 1, k.shape[2])):
            if mask is None:
                continue
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            if mask.dim() == 3:  # a mask for each head: some are gone
                raise StructureError(
                    "a cut nn.MultiheadAttention takes no mask for each head: give one of shape (T, S)"
                )
            result = mask if result is None else result + mask
        return result


def _projections(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """Weights of queries, keys and values: one tensor, or three where keys or values have a width of their own."""
    if module.in_proj_weight is not None:
        return module.in_proj_weight.chunk(3)
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight


def shrink(module: nn.MultiheadAttention) -> None:
    """Let a module whose weights were cut run with the sizes they have."""
    query, key, value = _projections(module)
    module.embed_dim, module.kdim, module.vdim = query.shape[1], key.shape[1], value.shape[1]
    module.head_dim = query.shape[0] // module.num_heads
    module._qkv_same_embed_dim = False  # which keeps encoder layers from calling a kernel that counts on the width
    module.forward = CutAttention(module)
