"""Masks of single weights that no training has chosen: controls for those that DLLP learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Mask = Literal["uniform", "erk", "own", "shuffled"]
"""Random, with equal or Erdos-Renyi-kernel densities of all layers; or that of a DLLP run, as it is or shuffled."""
RANDOM: tuple[Mask, ...] = ("uniform", "erk")


def random_scores(shapes: Sequence[Sequence[int]], mask: Mask, generator: torch.Generator) -> Tensor:
    """(U,): scores of the weights of layers with these shapes; the best of them have the densities of `mask`.

    A layer's density is min(1, s r) with r = 1, or for `erk` the sum of its shape over its product (Evci et al., 2020).
    A weight of random rank v in (0, 1] is kept where v <= s r: by the order of -v / r, and the budget finds s.
    """
    scores = []
    for shape in shapes:
        size = torch.Size(shape).numel()
        density = sum(shape) / size if mask == "erk" else 1.0
        scores.append(-(torch.randperm(size, generator=generator).double() + 1) / (size * density))
    return torch.cat(scores)


def shuffled(keep: Tensor, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """(U,) -> (U,): the same number of weights of every layer, at random places."""
    return torch.cat([part[torch.randperm(len(part), generator=generator)] for part in keep.split(list(sizes))])
