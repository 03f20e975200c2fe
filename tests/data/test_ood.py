"""Inputs from elsewhere: their shape, their range, and what cannot be made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dllp.data import ArrayData, load, ood
from dllp.errors import ConfigError, DataError
from tests.support.commands import npy


def like(channels: int = 3, height: int = 12, width: int = 10, n: int = 40) -> ArrayData:
    x = torch.zeros(n, channels, height, width, dtype=torch.uint8)
    return ArrayData(x, torch.arange(n) % 4, (0.5,) * channels, (0.25,) * channels, "crop-flip")


def table() -> ArrayData:
    return ArrayData(torch.linspace(-3, 5, 60).view(20, 3), torch.zeros(20, dtype=torch.long))


def test_noise_is_uniform_over_the_range_of_the_data() -> None:
    images = ood.noise(like(n=100))
    assert images.x.dtype == torch.uint8 and images.x.shape == (100, 3, 12, 10) and images.augment == "none"
    values = images.x.double()
    assert float(values.mean()) == pytest.approx(127.5, abs=1.5)
    assert float(values.std()) == pytest.approx(256 / 12**0.5, abs=1)
    assert torch.equal(images.x, ood.noise(like(n=100)).x)
    floats = ood.noise(table())
    assert floats.x.shape == (20, 3) and float(floats.x.min()) >= -3 and float(floats.x.max()) <= 5


def test_digits_get_the_shape_and_the_normalisation_of_the_data() -> None:
    digits = ood.find("digits", like())
    assert digits.x.shape == (360, 3, 12, 10) and digits.mean == (0.5,) * 3
    assert torch.equal(digits.x[:, 0], digits.x[:, 2]), "grey"
    same = ood.resized(load("digits").test.x, like(1, 8, 8))
    assert torch.equal(same.x, load("digits").test.x), "nothing to resize"
    flat = torch.full((2, 3, 5, 5), 77, dtype=torch.uint8)
    assert ood.resized(flat, like(1)).x.unique().tolist() == [77]
    with pytest.raises(DataError, match="use noise"):
        ood.find("digits", table())
    with pytest.raises(DataError, match="needs uint8 images"):
        ood.resized(torch.zeros(2, 3, 4, 4), like())


def test_folders_of_images_and_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    for place, grey in ((tmp_path / "a.png", 10), (tmp_path / "cats" / "b.png", 20)):
        Image.fromarray(np.full((30, 20, 3), grey, np.uint8)).save(place)
    found = ood.find(str(tmp_path), like())
    assert found.x.shape == (2, 3, 12, 10) and found.x[:, 0, 0, 0].tolist() == [10, 20]
    arrays = npy(tmp_path / "arrays", np.full((4, 9, 9), 30, np.uint8), np.arange(4) % 2)
    assert ood.find(str(arrays), like()).x.unique().tolist() == [30]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no image"):
        ood.find(str(tmp_path / "empty"), like())
    with pytest.raises(DataError, match="use noise"):
        ood.find(str(tmp_path), table())


def test_classes_left_out() -> None:
    digits = load("digits", validation=100)
    data = ood.without(digits, ("3", "7"))
    assert data.classes == tuple("01245689") and data.num_classes == 8 and data.left_out is not None
    assert data.train.y.unique().tolist() == list(range(8)) == data.test.y.unique().tolist()
    assert data.validation is not None and data.validation.y.unique().tolist() == list(range(8))
    left = torch.isin(digits.test.y, torch.tensor([3, 7]))
    assert torch.equal(data.left_out.x, digits.test.x[left]) and len(data.test) == int((~left).sum())
    six = digits.test.y == 6
    assert torch.equal(data.test.x[data.test.y == data.classes.index("6")], digits.test.x[six])
    assert torch.equal(ood.find("left-out", data.test, left_out=data.left_out).x, data.left_out.x)


def test_what_cannot_be_found_or_left_out() -> None:
    digits = load("digits")
    for call, words in (
        (lambda: ood.find("fog", like()), "unknown out-of-distribution data 'fog'"),
        (lambda: ood.find("left-out", like()), "left no class out"),
        (lambda: ood.without(digits, ("ten",)), "no class 'ten'"),
        (lambda: ood.without(digits, tuple("012345678")), "fewer than two classes"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_regression_has_no_classes_to_leave_out(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    data = load(npy(tmp_path / "regression", x, x[:, :1]))
    with pytest.raises(ConfigError, match="no classes"):
        ood.without(data, ("0",))


def test_one_folder_under_many_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photos").mkdir()
    (tmp_path / "digits").mkdir()
    (tmp_path / "link").symlink_to("photos")
    whole = str(tmp_path / "photos")
    for name in ("photos", "./photos", "photos/", "link", "~/photos", "digits/../photos", whole):
        assert ood.same(name, whole) and ood.same(whole, name), name
    assert ood.same("digits", "digits") and not ood.same("digits", "cifar10")
    assert not ood.same("digits", str(tmp_path / "digits")), "a name goes before a folder that is called so"
    assert not ood.same("./digits", whole)
