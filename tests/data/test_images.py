"""Crops of images: their place, the size at which they are decoded, and resizing against Pillow's."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dllp.data import images
from dllp.data.images import crop, resize_one
from tests.support import pictures


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 40), st.booleans())
def test_resizing_is_pillows(h: int, w: int, size: int, flip: bool) -> None:
    image = np.random.default_rng(h).integers(0, 256, (h, w, 3), np.uint8)
    wanted = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    wanted, found = wanted[:, :, ::-1] if flip else wanted, resize_one(image, flip, size)
    assert found.shape == (3, size, size) and int(np.abs(found.astype(int) - wanted).max()) <= 1


@given(st.integers(2, 600), st.integers(2, 600), st.lists(st.floats(0, 1), min_size=5, max_size=5), st.integers(8, 64))
def test_crops_lie_in_the_image_and_are_no_larger_than_needed(w: int, h: int, draw: list[float], size: int) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (w, h), (90, 120, 200)).save(buffer, "JPEG")
    for box in (images.crop_boxes(np.array([draw]))[0], None):
        found = crop(buffer.getvalue(), box, size)
        assert found.dtype == np.uint8 and min(found.shape) >= 1 and found.shape[0] <= h and found.shape[1] <= w
        assert max(found.shape[:2]) <= 4 / 3 * 2 * images.OVERSIZE * size + 2
        assert int(np.abs(found.astype(int) - (90, 120, 200)).max()) <= 4, "nothing but the image"


def test_evaluation_sees_the_middle() -> None:
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[2:30, 18:46] = 200
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    found = crop(buffer.getvalue(), None, 28)
    assert found.shape == (28, 28, 3) and found.min() == 200


def test_large_photographs_are_decoded_small(monkeypatch: pytest.MonkeyPatch) -> None:
    content = pictures.jpeg(np.random.default_rng(0), (1600, 1200))
    drafts = []
    monkeypatch.setattr(images, "to_rgb", lambda image: drafts.append(image.size) or image.convert("RGB"))
    small = crop(content, None, 32)
    assert drafts == [(200, 150)] and min(small.shape[:2]) >= 32
    monkeypatch.setattr(images, "OVERSIZE", 1000)
    whole = crop(content, None, 32)
    pair = [resize_one(found.copy(), False, 32).astype(float) for found in (small, whole)]
    assert np.abs(pair[0] - pair[1]).mean() < 2
