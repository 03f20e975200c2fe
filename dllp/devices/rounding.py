"""Gated weights in the precision they will be used in: what is rounded at once need not be held unrounded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROUNDED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Modules that do nothing with their weight but what autocast rounds it for; not their subclasses."""


def early(network: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name, rounded as autocast would round them when they are used."""
    owners = {name: network.get_submodule(name.rpartition(".")[0]) for name in weights}
    return {
        name: weight.to(torch.bfloat16) if type(owners[name]) in ROUNDED else weight for name, weight in weights.items()
    }
