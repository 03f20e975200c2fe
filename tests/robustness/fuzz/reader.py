"""One reader of files from strangers, and what it may do.

A reader takes bytes, puts them where a stranger would and reads them as a user would. What it may do is come back, or
raise a DllpError of one line that names the file.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from mutate import mutate
from torch import Tensor, nn

from dllp.errors import LONGEST, DllpError

Mutator = Callable[[random.Random, bytes, bytes], bytes]


class Broken(AssertionError):
    """An error that a reader told badly."""


@dataclass(frozen=True)
class Reader:
    """Attributes:
    name: Of the kind of file.
    seeds: Whole files.
    read: Reads one; raises nothing but DllpError.
    named: What every error must name.
    mutators: Damage that keeps the grammar, besides the plain one.
    share: Of the inputs; slow readers get fewer.
    """

    name: str
    seeds: list[bytes]
    read: Callable[[bytes], object]
    named: str
    mutators: tuple[Mutator, ...] = ()
    share: float = 1.0

    def damaged(self, number: int) -> bytes:
        """Input `number`, always the same."""
        rng = random.Random(f"{self.name} {number}")  # noqa: S311 - damage must repeat, not surprise
        content, other = rng.choice(self.seeds), rng.choice(self.seeds)
        if self.mutators and rng.random() < 0.6:
            content = rng.choice(self.mutators)(rng, content, other)
            return content if rng.random() < 0.8 else mutate(rng, content, other)
        return mutate(rng, content, other)

    def check(self, content: bytes) -> bool:
        """Read; whether the file was taken. Anything but success and a well-told DllpError is raised."""
        try:
            self.read(content)
            return True
        except DllpError as error:
            text = str(error)
            if not text.isprintable() or len(text) > LONGEST + 4 or self.named not in text:
                raise Broken(f"not one line that names {self.named}: {text[:300]!r}") from error
            return False


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def examples() -> tuple[Tensor, Tensor]:
    y = torch.arange(12) % 3
    return torch.randn(12, 1, 6, 6) + y.view(-1, 1, 1, 1), y
