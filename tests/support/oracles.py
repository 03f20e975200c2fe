"""Closed-form targets and slow, obvious references that the package is checked against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dllp.devices.trees import tensors
from dllp.method import stein
from dllp.structure.slicing import Group, cut, gap, gated_outputs, recipe


@dataclass(frozen=True)
class Gaussian:
    """The target N(mean, std^2 I), whose score and spread are known."""

    mean: float = 0.0
    std: float = 1.0

    def score(self, x: Tensor) -> Tensor:
        """(n, P) -> (n, P): gradient of the log density."""
        return (self.mean - x) / self.std**2

    def sample(self, n: int, dimension: int, seed: int = 0) -> Tensor:
        """-> (n, P) float64: independent draws."""
        return self.mean + self.std * normal(n, dimension, seed=seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """-> (*shape) float64: reproducible standard normal draws."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def follow(x: Tensor, score: Callable[[Tensor], Tensor], *, lr: float, steps: int, **options: object) -> Tensor:
    """(n, P) -> (n, P): plain Stein variational gradient ascent."""
    for _ in range(steps):
        x = x + lr * stein.direction(x, score(x), **options)  # pyright: ignore[reportArgumentType]
    return x


# n = 2, median bandwidth, N(0, I): the squared distance at which phi vanishes in one block, whatever its dimension.
# By symmetry x2 = -x1, k = 1/2, and (1 - k) x1 = (4 k / h) x1 gives h = 4; the distance squared is h ln 2.
TWO_PARTICLE_FIXED_POINT = 4 * math.log(2)


def naive_stein_kernel(x: Tensor, y: Tensor, sx: Tensor, sy: Tensor, h: float) -> Tensor:
    """(D,), (D,), (D,), (D,) -> (): s_x.s_y k + s_x.grad_y k + s_y.grad_x k + tr grad_x grad_y k, by autograd."""
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    k = torch.exp(-((a - b) ** 2).sum() / h)
    ga, gb = torch.autograd.grad(k, (a, b), create_graph=True)
    trace = sum(torch.autograd.grad(ga[d], b, retain_graph=True)[0][d] for d in range(len(x)))
    return (k * (sx @ sy) + sx @ gb + sy @ ga + trace).detach()


@torch.no_grad()
def difference(model: nn.Module, groups: Sequence[Group], keep: Tensor, inputs: tuple[Any, ...]) -> float | None:
    """Largest difference of gated and cut network, relative to the largest output; None where shapes differ."""
    gates = keep.to(next(model.parameters()).device, torch.float64)
    actual = tensors(cut(model, recipe(model, groups, keep))(*inputs))
    return gap(actual, gated_outputs(model, groups, gates, inputs))
