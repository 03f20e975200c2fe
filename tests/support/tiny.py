"""A network with every kind of scale, its forward as a pure function, and how it is trained in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.config import Config
from dllp.structure.groups import Structure, discover

SIDE = 4
NUM_DATA = 7
"""So few examples that the prior is as strong as the data."""


# ---- a network with every kind of scale, and its forward as a pure function


class Tiny(nn.Module):
    """Two coupled convolutions with norms (units 0-3), one without (units 4-8), a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.norm_left = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.right, self.norm_right = nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.mid = nn.Conv2d(4, 5, 3, padding=1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_left(self.left(x)) + self.norm_right(self.right(x)))
        return self.head(torch.sigmoid(self.mid(x)).mean((2, 3)))


CONVOLUTIONS = ("left.weight", "right.weight", "mid.weight")
SCALES = {"channel": ("norm_left.weight", "norm_right.weight", "mid.weight"), "weight": CONVOLUTIONS}
"""Parameters that the prior acts on."""


def explicit(p: dict[str, Tensor], x: Tensor, z: Tensor, granularity: str) -> Tensor:
    """Tiny's forward with gated activations (channel) or gated weights (weight); it knows nothing of folding."""
    if granularity == "weight":
        parts = z.split([p[name].numel() for name in CONVOLUTIONS])
        p = p | {name: p[name] * part.view(p[name].shape) for name, part in zip(CONVOLUTIONS, parts, strict=True)}
        z = z.new_ones(9)

    def normed(h: Tensor, name: str) -> Tensor:
        return F.batch_norm(h, None, None, p[f"{name}.weight"], p[f"{name}.bias"], training=True)

    left = normed(F.conv2d(x, p["left.weight"], padding=1), "norm_left")
    h = F.relu(left + normed(F.conv2d(x, p["right.weight"]), "norm_right")) * z[:4].view(1, 4, 1, 1)
    h = torch.sigmoid(F.conv2d(h, p["mid.weight"], p["mid.bias"], padding=1)).mean((2, 3)) * z[4:]
    return F.linear(h, p["head.weight"], p["head.bias"])


def scales_of(p: dict[str, Tensor], granularity: str) -> Tensor:
    """(U,): what the prior sees; RMS of the coupled norms, RMS of a filter, or the weight itself."""
    if granularity == "weight":
        return torch.cat([p[name].flatten() for name in CONVOLUTIONS])
    norms = ((p["norm_left.weight"] ** 2 + p["norm_right.weight"] ** 2) / 2).sqrt()
    return torch.cat([norms, p["mid.weight"].square().mean((1, 2, 3)).sqrt()])


def expected_flops(theta: Tensor, granularity: str) -> Tensor:
    """(U,) -> (): share of the multiply-accumulates, counted by hand."""
    area = SIDE * SIDE
    if granularity == "weight":
        return (theta.sum() * area + 15) / (260 * area + 15)
    first, second = theta[:4].sum(), theta[4:].sum()
    dense = area * (20 * 4 + 9 * 4 * 5) + 15
    return (area * (20 * first + 9 * first * second) + 3 * second) / dense


def kept_coordinates(p: dict[str, Tensor], keep: Tensor, granularity: str) -> dict[str, Tensor]:
    """Which coordinates belong to the slab, written down layer by layer."""
    masks = {name: torch.ones_like(value) for name, value in p.items()}
    if granularity == "weight":
        for name, part in zip(CONVOLUTIONS, keep.split([p[name].numel() for name in CONVOLUTIONS]), strict=True):
            masks[name] = part.view(p[name].shape).to(p[name].dtype)
        return masks
    first, second = keep[:4].double(), keep[4:].double()
    for side in ("left", "right"):
        masks[f"{side}.weight"] *= first.view(4, 1, 1, 1)
        masks[f"norm_{side}.weight"] *= first
        masks[f"norm_{side}.bias"] *= first
    masks["mid.weight"] *= second.view(5, 1, 1, 1) * first.view(1, 4, 1, 1)
    masks["mid.bias"] *= second
    masks["head.weight"] *= second
    return masks


# ---- trainers in float64


class Fixed:
    """The same batches in every epoch."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches, self.steps = batches, len(batches)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.batches[start_step:]


@cache
def tiny_structure() -> Structure:
    return discover(Tiny(), torch.zeros(1, 2, SIDE, SIDE))


def tiny_networks(n: int) -> list[nn.Module]:
    """Networks without one special weight: norms differ from 1, weights are of the order of the spike's width."""
    networks = [Tiny().double().train() for _ in range(n)]
    with torch.no_grad():
        for network in networks:
            for parameter in network.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return networks


def tiny_batches(count: int) -> Fixed:
    return Fixed([(torch.randn(6, 2, SIDE, SIDE, dtype=torch.float64), torch.arange(6) % 3) for _ in range(count)])


def tiny_config(**changes: Any) -> Config:
    base: dict[str, Any] = dict(
        particles=2, epochs=1, beta=0.3, epsilon=10.0, slab=5.0, slab_bounds=(4.9, 5.2), lr=0.1, lr_end=0.02, warmup=0,
        weight_decay=0.05, keep_flops=0.6, lr_gates=0.1, device="cpu",
    )  # fmt: skip
    return Config(**(base | changes)).resolved()


PHASES = {
    "open": dict(open_until=1.0, ramp_until=1.0, discrete_at=1.0),
    "soft": dict(open_until=0.0, ramp_until=0.8, discrete_at=1.0),
    "all": dict(open_until=0.0, ramp_until=0.4, discrete_at=0.5),
}
