"""Corruptions on images whose result can be written down."""

import pytest
import torch

from dllp import data
from dllp.data.corruptions import Corruption, parse
from dllp.errors import ConfigError, DataError


def test_parse_lists_every_level():
    assert [c.name for c in parse("gaussian-blur:1,2.5")] == ["gaussian-blur:1", "gaussian-blur:2.5"]
    assert parse("sharpen") == [Corruption("sharpen")]
    assert parse("noise:0.1", seed=3) == [Corruption("noise", 0.1, 3)]
    assert [parse(c.name)[0] for c in parse("noise:0.1,0.2")] == parse("noise:0.1,0.2")


@pytest.mark.parametrize(
    "text", ["fog", "", "gaussian-blur", "gaussian-blur:", "noise:x", "noise:-1", "sharpen:2", "noise:nan", "noise:inf"]
)
def test_bad_corruptions(text):
    with pytest.raises(ConfigError, match="corruption") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_sharpening_is_the_stated_kernel():
    image = torch.full((1, 1, 3, 3), 100, dtype=torch.uint8)
    image[0, 0, 1] = torch.tensor([90, 110, 95])
    out = Corruption("sharpen")(image)
    assert int(out[0, 0, 1, 1]) == 5 * 110 - 100 - 100 - 90 - 95
    out[0, 0, 1, 1] = 110
    assert torch.equal(out, image)


def test_blur_spreads_by_its_standard_deviation():
    image = torch.zeros(1, 3, 65, 65, dtype=torch.uint8)
    image[0, 1, 28:37, 28:37] = 255
    out = Corruption("gaussian-blur", 3)(image)[0].double()
    assert not out[0].any() and not out[2].any()
    position = torch.arange(65).double()
    weight = out[1].sum(0) / out[1].sum()
    variance = float((weight * (position - 32) ** 2).sum())
    assert variance == pytest.approx((9**2 - 1) / 12 + 3**2, rel=0.1)


def test_noise_has_its_sigma_and_seed():
    grey = torch.full((20, 3, 16, 16), 128, dtype=torch.uint8)
    noisy = Corruption("noise", 0.1, 1)(grey)
    assert float(noisy.double().std()) == pytest.approx(25.5, rel=0.02)
    assert torch.equal(noisy, Corruption("noise", 0.1, 1)(grey))
    assert not torch.equal(noisy, Corruption("noise", 0.1, 2)(grey))
    assert int(Corruption("noise", 2.0)(grey).max()) == 255


@pytest.mark.parametrize("kind", ["gaussian-blur", "sharpen", "noise"])
def test_corrupted_images_are_copies(kind):
    images = torch.randint(256, (3, 3, 9, 7)).to(torch.uint8)
    before = images.clone()
    out = Corruption(kind, 1.0)(images)
    assert torch.equal(images, before) and out.shape == images.shape and out.is_contiguous()
    assert not torch.equal(out, images)


def test_a_whole_split_is_corrupted():
    digits = data.load("digits").test
    blurred = Corruption("gaussian-blur", 1)(digits.x[:4])
    part = Corruption("gaussian-blur", 1).apply_to(digits.subset([0, 1, 2, 3]))
    assert torch.equal(part.x, blurred) and part.mean == digits.mean


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 2, 4, 4, dtype=torch.uint8)],
)
def test_only_images_are_taken(images):
    with pytest.raises(DataError, match="needs uint8 images"):
        Corruption("sharpen")(images)
