"""A short run, and a plain network, for tests of networks as users bring them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dllp

CLASSES = 5


def run(model: nn.Module, data: Any = None, filter_fn: Any = None, **changes: Any) -> dllp.Result:
    """A short run on images of 8 by 8."""
    settings: dict[str, Any] = dict(epochs=2, batch_size=12, lr=0.02, warmup=0, keep_flops=0.5, device="cpu")
    if data is None:
        x = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        data = x, torch.arange(24) % CLASSES
    return dllp.prune(model, data, dllp.Config(**(settings | changes)), filter_fn=filter_fn)


def stack() -> nn.Sequential:
    """Three convolutions; the middle one is what a test changes."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
