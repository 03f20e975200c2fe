"""PyTorch's own attention after a cut, whose heads need not fill the width of its inputs any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllp.errors import StructureError


class CutAttention:
    """The forward of a cut `nn.MultiheadAttention` with one width of queries, keys and values.

    PyTorch's own divides the width of its inputs by the heads; this one takes all sizes from the weights.
    """

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
        weights = m.in_proj_weight.chunk(3)
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


def shrink(module: nn.MultiheadAttention) -> None:
    """Let a module whose weights were cut run with the sizes they have."""
    module.embed_dim = module.kdim = module.vdim = module.in_proj_weight.shape[1]
    module.head_dim = module.in_proj_weight.shape[0] // 3 // module.num_heads
    module._qkv_same_embed_dim = False  # which keeps encoder layers from calling a kernel that counts on the width
    module.forward = CutAttention(module)  # type: ignore[assignment]
