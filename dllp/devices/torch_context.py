"""PyTorch's global modes: a run independent of those its caller has set, and weights cast as autocast casts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

AUTOCAST_ONLY = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Modules whose weight goes into one operation that autocast casts it for, and nowhere else; not their subclasses."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """PyTorch's default modes (gradients, no autocast, float32, CPU) inside, and the caller's again afterwards.

    A run chooses gradients, precision and devices itself. Within a caller's `no_grad` it could not learn, an
    `autocast` would round what must be exact, and a default device would part tensors from their generators.
    """
    with ExitStack() as held:
        held.enter_context(torch.inference_mode(False))
        held.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                held.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # the context has a price: every call passes through it
            held.enter_context(torch.device("cpu"))
        held.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield


def cast_like_autocast(network: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gated weights by name in bfloat16 where autocast would cast them later: the float32 ones need not be kept."""
    owners = {name: network.get_submodule(name.rpartition(".")[0]) for name in weights}
    return {
        name: weight.to(torch.bfloat16) if type(owners[name]) in AUTOCAST_ONLY else weight
        for name, weight in weights.items()
    }
