"""Data sets by name, splits, pairs of tensors, and one line for every mistake."""

import numpy as np
import pytest
import torch

from dllp import data
from dllp.data import ArrayData, from_pair, holdout, validate
from dllp.errors import DataError
from tests.support.commands import npy


def test_digits_are_split_once_and_for_all():
    digits, again = data.load("digits"), data.load("digits", seed=5)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert torch.equal(digits.test.x, again.test.x)
    assert digits.test.y.bincount().min() >= 35 and digits.train.x.unique().numel() == 17
    assert (digits.num_classes, digits.in_channels, digits.image_size) == (10, 1, 8)
    x = digits.train.inputs(slice(None))
    assert abs(float(x.mean())) < 1e-4 and float(x.std()) == pytest.approx(1, abs=1e-3)


def test_validation_is_held_out_of_training():
    whole, part = data.load("digits"), data.load("digits", validation=137, seed=1)
    assert part.validation is not None
    assert (len(part.train), len(part.validation), len(part.test)) == (1300, 137, 360)
    both = torch.cat([part.train.x, part.validation.x]).flatten(1).float()
    assert torch.equal(both.sum(0), whole.train.x.flatten(1).float().sum(0))
    other = data.load("digits", validation=137, seed=2).validation
    assert other is not None and not torch.equal(other.x, part.validation.x)


@pytest.mark.parametrize("size", [50, 0.5])
def test_holdout_is_stratified(size):
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    whole = ArrayData(torch.zeros(100, 3, 8, 8, dtype=torch.uint8), y, augment="crop-flip")
    train, held = holdout(whole, size, 0)
    assert held.y.bincount().tolist() == [30, 15, 5] == train.y.bincount().tolist()
    assert train.augment == "crop-flip" and held.augment == "none"


def test_holdout_shares_out_remainders_and_takes_regressions():
    y = torch.tensor([0] * 5 + [1] * 5 + [2] * 5)
    assert len(holdout(ArrayData(torch.zeros(15, 2), y), 7, 0)[1]) == 7
    train, held = holdout(ArrayData(torch.arange(10.0)[:, None], torch.arange(10.0)[:, None]), 3, 0)
    assert sorted(torch.cat([train.x, held.x]).flatten().tolist()) == list(range(10)) and len(held) == 3
    for size in (0, 10, 1.0, -1):
        with pytest.raises(DataError, match="validation split"):
            holdout(held, size, 0)


def test_from_pair_settles_types():
    pair = from_pair(np.zeros((4, 2)), [0, 1, 0, 1])
    assert pair.x.dtype == torch.float32 and pair.y.dtype == torch.int64 and pair.is_classification
    assert from_pair(torch.zeros(4, 2), torch.tensor([[0], [1], [0], [1]])).y.shape == (4,)
    regression = from_pair(torch.zeros(4, 2), torch.zeros(4, dtype=torch.float64))
    assert regression.y.shape == (4, 1) and regression.y.dtype == torch.float32
    maps = torch.randn(4, 3, 5, 2).permute(0, 3, 1, 2)
    assert torch.equal(from_pair(torch.zeros(4, 2), maps).y, maps.flatten(1))


@pytest.mark.parametrize("kind", [">i2", ">i8", ">f4", ">f8", ">u2"])
def test_any_byte_order_is_taken(kind, tmp_path):
    x, y = np.arange(8).reshape(4, 2).astype(">f8"), np.array([0, 1, 256, 1]).astype(kind)
    pair = from_pair(x, y)
    assert pair.x.tolist() == x.tolist() and pair.y.flatten().tolist() == y.tolist()
    loaded = data.load(npy(tmp_path / "arrays", x, y))
    assert loaded.test.x.tolist() == x.tolist() and loaded.test.y.flatten().tolist() == y.tolist()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.tensor([[0.0], [float("nan")]]), torch.tensor([0, 1]), "NaN or infinity .* first in example 1"),
        (torch.zeros(2, 1), torch.tensor([0.0, float("inf")]), "targets"),
        (torch.zeros(2, 1), torch.tensor([-1, 1]), "label -1 .* negative"),
        (torch.zeros(2, 1), torch.tensor([1, 1]), "one class only"),
        (torch.zeros(3, 1), torch.tensor([0, 1]), "3 inputs but 2 labels"),
        (torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64), "empty"),
        (torch.zeros(2, 1), torch.tensor([True, False]), None),
        (torch.zeros(2), torch.tensor([0, 1]), "inputs of shape"),
        (object(), torch.tensor([0, 1]), "inputs of type object"),
    ],
)
def test_bad_pairs(x, y, message):
    if message is None:
        assert from_pair(x, y).y.tolist() == [1, 0]
        return
    with pytest.raises(DataError, match=message) as caught:
        validate(from_pair(x, y))
    assert "\n" not in str(caught.value)


def test_validate_knows_the_network():
    pair = from_pair(torch.zeros(2, 1), torch.tensor([0, 5]))
    with pytest.raises(DataError, match=r"label 5 .* out of range for 3 classes"):
        validate(pair, 3)
    for kind in (torch.float32, torch.bool, torch.int32, torch.uint16):
        with pytest.raises(DataError, match=f"are {kind}: int64 classes are needed"):
            data.check_labels(torch.zeros(3, dtype=kind))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "mixup"}, "choose none, crop-flip, resized-crop"),
        ({"augment": "crop-flip"}, "larger than 4 pixels"),
        ({"mean": (0.0,)}, "belong together"),
    ],
)
def test_bad_array_data(options, message):
    with pytest.raises(DataError, match=message):
        ArrayData(torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), **options)
