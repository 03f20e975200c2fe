"""Networks, data and settings of runs that take a second."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dllp.config import Config


def mlp(width: int, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def table(n: int = 96) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6)
    return x, (x @ torch.randn(6, 3)).argmax(1)


def pictures(n: int = 48) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 3
    return torch.randn(n, 1, 7, 7) + 0.7 * y.view(-1, 1, 1, 1), y


def quick(**changes: Any) -> Config:
    base: dict[str, Any] = dict(epochs=8, batch_size=16, lr=0.05, warmup=0, lr_gates=0.2, device="cpu", keep_flops=0.5)
    return Config(**(base | changes))
