"""A pruned network in a run folder, and the code that builds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dllp
from dllp import Config
from tests.support.short_runs import pictures

NETS = """
import torch
from torch import nn

def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )
"""


def build() -> nn.Module:
    space: dict[str, Any] = {}
    exec(NETS, space)  # noqa: S102
    return space["network"]()


def pruned(granularity: Any, **changes: Any) -> dllp.Result:
    torch.manual_seed(0)
    values = dict(
        granularity=granularity, keep_flops=0.3, epochs=4, batch_size=16, lr_gates=0.3, device="cpu", warmup=0
    )
    return dllp.prune(build(), pictures(), Config(**(values | changes)))


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
