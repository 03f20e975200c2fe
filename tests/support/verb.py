"""A small network, its images and a short run, for tests of the one verb."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dllp import Config


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs),
    )  # fmt: skip


def images(n: int = 40) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 3
    return torch.randn(n, 1, 6, 6) + 0.7 * y.view(-1, 1, 1, 1), y


def config(**changes: Any) -> Config:
    values: dict[str, Any] = dict(epochs=2, batch_size=16, keep_flops=0.6, device="cpu", warmup=0, lr_gates=0.3)
    return Config(**(values | changes))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
