"""Digits on coloured backgrounds: the colour goes with the class in training, and need not do so in the test.

Shape is what makes a digit; colour is a spurious feature, and easier to read. The paper's appendix ends with such
data and does not say how they are made: every choice here is ours.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from dllp.data import ArrayData, Dataset, load
from dllp.data.arrays import generator
from paper.store import CLEAN

DATA = "coloured-digits"
CORRELATED = 0.9
"""Probability that an image has the colour of its rule; the others have one of all ten at random."""
REVERSED, RANDOM = "reversed colours", "random colours"
Rule = Callable[[Tensor], Tensor]
HUES = torch.tensor([colorsys.hsv_to_rgb(k / 10, 1.0, 1.0) for k in range(10)])
"""(10, 3): once around the circle."""


def mirrored(classes: Tensor) -> Tensor:
    """(B,) -> (B,): 9 for 0, 8 for 1, ...; no class keeps its own."""
    return len(HUES) - 1 - classes


RULES: dict[str, Rule | None] = {CLEAN: lambda classes: classes, REVERSED: mirrored, RANDOM: None}
"""The class whose colour an image has, by version of the test set; the first is that of training."""


def load_data(name: str, **options: Any) -> Dataset:
    """The data of a bench: painted digits, or whatever :func:`dllp.data.load` knows."""
    if name != DATA:
        return load(name, **options)
    train, tests = painted(load("digits", **options), seed=0)
    return Dataset(DATA, train, tests[CLEAN], tuple("0123456789"))


def painting(seed: int) -> int:
    """The painting of a seed; two seeds share one, so that two dense networks can be an ensemble."""
    return seed // 2


def painted(digits: Dataset, seed: int) -> tuple[ArrayData, dict[str, ArrayData]]:
    """Training images, and the same test images by each of :data:`RULES`, as networks of this seed see them.

    A painting decides which class has which colour, and what every image has: a network's reliance on colour depends
    on the few images of other colours, so that seeds of one painting would agree too well.
    """
    number = painting(seed)
    hues = HUES[torch.randperm(len(HUES), generator=generator(number, 6))]
    train = paint(cast(ArrayData, digits.train), RULES[CLEAN], hues, generator(number, 7))
    pixels = train.x.double() / 255
    scale = {"mean": tuple(pixels.mean((0, 2, 3)).tolist()), "std": tuple(pixels.std((0, 2, 3)).tolist())}
    tests = {name: paint(digits.test, rule, hues, generator(number, 8)) for name, rule in RULES.items()}
    return replace(train, **scale), {name: replace(test, **scale) for name, test in tests.items()}


def paint(grey: ArrayData, rule: Rule | None, hues: Tensor, draw: torch.Generator) -> ArrayData:
    """(N, 1, H, W) images of ink -> (N, 3, H, W): black on a background of the rule's colour, or of any."""
    colours = torch.randint(len(hues), (len(grey),), generator=draw)
    follows = torch.rand(len(grey), generator=draw) < CORRELATED
    if rule is not None:
        colours = torch.where(follows, rule(grey.y), colours)
    light = 1 - grey.x.float() / 255
    return replace(grey, x=(255 * light * hues[colours, :, None, None]).round().to(torch.uint8), mean=None, std=None)
