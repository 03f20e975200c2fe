"""Networks, data and settings of runs that take a second, and what such runs leave behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dllp
from dllp import Config
from dllp.baselines.protocol import Scene
from dllp.data import load
from dllp.prepare import make_gating
from dllp.structure.groups import discover
from dllp.training.particles import Particles


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
    base: dict[str, Any] = dict(
        particles=2, epochs=8, batch_size=16, lr=0.05, warmup=0, lr_gates=0.2, device="cpu", keep_flops=0.5
    )
    return Config(**(base | changes))


# ---- one call of the API


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs),
    )  # fmt: skip


def images(n: int = 40) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 3
    return torch.randn(n, 1, 6, 6) + 0.7 * y.view(-1, 1, 1, 1), y


def config(**changes: Any) -> Config:
    values: dict[str, Any] = dict(
        particles=2, epochs=2, batch_size=16, keep_flops=0.6, device="cpu", warmup=0, lr_gates=0.3
    )
    return Config(**(values | changes))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---- networks as users bring them


CLASSES = 5


def run(model: nn.Module, data: Any = None, filter_fn: Any = None, **changes: Any) -> dllp.Result:
    """A short run on images of 8 by 8."""
    settings: dict[str, Any] = dict(
        particles=2, epochs=2, batch_size=12, lr=0.02, warmup=0, keep_flops=0.5, device="cpu"
    )
    if data is None:
        x = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        data = x, torch.arange(24) % CLASSES
    return dllp.prune(model, data, dllp.Config(**(settings | changes)), filter_fn=filter_fn)


def stack() -> nn.Sequential:
    """Three convolutions; the middle one is what a test changes."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


# ---- a run folder, and the code that builds its network


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
        granularity=granularity,
        particles=2,
        keep_flops=0.3,
        epochs=4,
        batch_size=16,
        lr_gates=0.3,
        device="cpu",
        warmup=0,
    )
    return dllp.prune(build(), pictures(), Config(**(values | changes)))


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# ---- a network as a baseline sees it


DIGITS = load("digits")


def scene_of(model: nn.Module, inputs: Tensor, **changes: object) -> Scene:
    config = Config(**{"keep_flops": 0.4, "particles": 1, **changes}).resolved()  # pyright: ignore[reportArgumentType]
    particles = Particles([model])
    structure = discover(model, inputs)
    gating = make_gating(model, structure, particles, config, None)
    return Scene(particles, structure, gating, config, inputs)
