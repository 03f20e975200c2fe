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
"""(10, 3): a colour for each class, once around the circle."""


def mirrored(classes: Tensor) -> Tensor:
    """(B,) -> (B,): 9 for 0, 8 for 1, ...; no class keeps its own."""
    return len(HUES) - 1 - classes


RULES: dict[str, Rule | None] = {CLEAN: lambda classes: classes, REVERSED: mirrored, RANDOM: None}
"""The class whose colour an image has, by version of the test set; the first is that of training."""


def load_data(name: str, **options: Any) -> Dataset:
    """The data of a bench: painted digits, or whatever :func:`dllp.data.load` knows."""
    if name != DATA:
        return load(name, **options)
    digits = load("digits", **options)
    train = paint(cast(ArrayData, digits.train), RULES[CLEAN], seed=0)
    pixels = train.x.double() / 255
    mean, std = (tuple(values.tolist()) for values in (pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))))
    train = replace(train, mean=mean, std=std)
    return Dataset(DATA, train, versions(train)[CLEAN], digits.classes)


def versions(like: ArrayData) -> dict[str, ArrayData]:
    """The same test images by the rules of :data:`RULES`, normalised like others."""
    grey = load("digits").test
    return {name: replace(paint(grey, rule, seed=1), mean=like.mean, std=like.std) for name, rule in RULES.items()}


def paint(grey: ArrayData, rule: Rule | None, seed: int) -> ArrayData:
    """(N, 1, H, W) images of ink -> (N, 3, H, W): black on a background of the rule's colour, or of any."""
    draw = generator(seed, 7)
    colours = torch.randint(len(HUES), (len(grey),), generator=draw)
    follows = torch.rand(len(grey), generator=draw) < CORRELATED
    if rule is not None:
        colours = torch.where(follows, rule(grey.y), colours)
    light = 1 - grey.x.float() / 255
    return replace(grey, x=(255 * light * HUES[colours, :, None, None]).round().to(torch.uint8), mean=None, std=None)
