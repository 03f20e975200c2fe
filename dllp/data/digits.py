"""The embedded data set: scikit-learn's 1797 grey 8x8 digits."""

from __future__ import annotations

import importlib.util

import torch

from dllp.data.arrays import ArrayData
from dllp.data.split import stratified

TEST = 360
SIDE = 8
SPLIT_SEED = 0


def installed() -> bool:
    """Whether scikit-learn, which holds the images, is there."""
    return importlib.util.find_spec("sklearn") is not None


def arrays() -> tuple[ArrayData, ArrayData]:
    """(train, test) of 1437 and 360 images, stratified, always the same split.

    The original grey values 0..16 become uint8 by v * 255 / 16, rounded: 17 different values stay 17.
    """
    from sklearn.datasets import load_digits

    values, target = load_digits(return_X_y=True)
    x = torch.from_numpy(values).mul(255 / 16).round().to(torch.uint8).view(-1, 1, SIDE, SIDE)
    y = torch.from_numpy(target).long()
    held = torch.zeros(len(y), dtype=torch.bool)
    held[stratified(y, TEST, SPLIT_SEED)] = True
    train = x[~held] / 255
    mean, std = (float(train.mean()),), (float(train.std()),)
    return ArrayData(x[~held], y[~held], mean, std), ArrayData(x[held], y[held], mean, std)
