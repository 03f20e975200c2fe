"""Crop and flip against a plain padded reference, resized crops against Pillow, and the order of batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from dllp.data.arrays import ArrayData, Batches, generator
from dllp.data.images import (
    AREA_IN_MEMORY,
    PADDING,
    crop_flip,
    random_boxes,
    resized_crop,
)


@given(st.integers(5, 9), st.integers(5, 12), st.integers(0, 2**31))
def test_crop_flip_equals_padding_and_slicing(height, width, seed):
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (6, 3, height, width), generator=rng).to(torch.uint8)
    index = torch.tensor([4, 0, 0, 5])
    offset = torch.randint(-PADDING, PADDING + 1, (4, 2), generator=rng)
    flip = torch.tensor([True, False, True, False])
    padded = F.pad(images.float(), (PADDING,) * 4, mode="reflect").to(torch.uint8)
    for row, out in enumerate(crop_flip(images, index, offset, flip)):
        top, left = (int(v) + PADDING for v in offset[row])
        expected = padded[index[row], :, top : top + height, left : left + width]
        assert torch.equal(out, expected.flip(2) if flip[row] else expected)


@given(st.integers(5, 20), st.integers(5, 20), st.integers(0, 2**31))
def test_resized_crops_are_those_of_pillow(height, width, seed):
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (6, 3, height, width), generator=rng).to(torch.uint8)
    index, flip = torch.tensor([4, 0, 0, 5]), torch.tensor([True, False, True, False])
    box = random_boxes(4, rng, height, width)
    for row, out in enumerate(resized_crop(images, index, box, flip)):
        top, left, high, wide = box[row].tolist()
        picture = Image.fromarray(images[index[row]].permute(1, 2, 0).numpy())
        edges = (left, top, min(left + wide, width), min(top + high, height))  # rounding may step over the border
        expected = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR, box=edges)).transpose(2, 0, 1)
        found = out.flip(2) if flip[row] else out
        assert np.abs(found.numpy().astype(int) - expected).max() <= 1, "but for rounding"
    whole = torch.tensor([[0.0, 0.0, height, width]]).expand(4, -1)
    assert torch.equal(resized_crop(images, index, whole, torch.zeros(4, dtype=torch.bool)), images[index])
    floats = resized_crop(images.float() / 255, index, box, flip)
    torch.testing.assert_close(floats, resized_crop(images, index, box, flip) / 255, rtol=0, atol=0.51 / 255)


def test_boxes_have_every_size_shape_and_place():
    top, left, high, wide = random_boxes(5000, generator(0), 32, 40).double().unbind(1)
    assert min(top.min(), left.min()) >= 0 and (top + high).max() < 32 + 1e-4 and (left + wide).max() < 40 + 1e-4
    area, shape = high * wide / (32 * 40), wide / high
    assert (
        area.max() > 0.95
        and AREA_IN_MEMORY[0] <= area.min() < AREA_IN_MEMORY[0] + 0.01
        and shape.min() > 0.74
        and shape.max() < 1.34
    )
    free = torch.stack([top / (32 - high), left / (40 - wide)])[:, (high < 31) & (wide < 39)]
    assert free.min() < 0.01 and free.max() > 0.99 and abs(float(free.mean()) - 0.5) < 0.02


def test_offsets_cover_the_range_and_flips_alternate():
    """Columns 0, 1, ...: differences of neighbours are positive unless an image is mirrored."""
    data = ArrayData(torch.arange(20.0).expand(1000, 1, 20, 20), torch.arange(1000), augment="crop-flip")
    batches = Batches(data, 1000, 0)
    (zero, first), (one, second), (two, third) = (next(batches.epoch(epoch)) for epoch in range(3))
    mirrored = [(x[:, 0, 0, 11] < x[:, 0, 0, 10])[y.argsort()] for x, y in ((zero, first), (one, second), (two, third))]
    assert torch.equal(mirrored[0], ~mirrored[1]) and torch.equal(mirrored[0], mirrored[2])
    assert 400 < int(mirrored[0].sum()) < 600
    middle = torch.where(mirrored[0][first], 19 - 10, 10)
    assert set((zero[:, 0, 0, 10] - middle).tolist()) == set(range(-PADDING, PADDING + 1))


def images(count: int = 50, augment: str = "crop-flip") -> ArrayData:
    x = torch.randint(256, (count, 3, 8, 8), generator=generator(2)).to(torch.uint8)
    return ArrayData(x, torch.arange(count), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), augment)  # pyright: ignore


@pytest.mark.parametrize("augment", ["crop-flip", "resized-crop"])
def test_batches_depend_on_seed_and_epoch_alone(augment):
    one, two = (Batches(images(augment=augment), 16, 7) for _ in range(2))
    list(two.epoch(0))
    torch.rand(3)
    for (x, y), (u, v) in zip(one.epoch(1), two.epoch(1), strict=True):
        assert torch.equal(x, u) and torch.equal(y, v)
        assert not torch.equal(x, one.data.inputs(y)), "they are augmented"
    assert not torch.equal(next(one.epoch(1))[1], next(one.epoch(2))[1])
    assert not torch.equal(next(one.epoch(1))[1], next(Batches(images(), 16, 8).epoch(1))[1])


@pytest.mark.parametrize("augment", ["crop-flip", "resized-crop"])
def test_batches_resume_at_any_step(monkeypatch, augment):
    batches = Batches(images(augment=augment), 8, 0)
    full = list(batches.epoch(3))
    assert len(full) == batches.steps == 6
    for chunk in (1, 3 * 8 * 8 * 8 * 2, 2**25):
        monkeypatch.setattr("dllp.data.arrays.CHUNK_ELEMENTS", chunk)
        for start in (0, 1, 4, 6):
            rest = list(batches.epoch(3, start))
            assert len(rest) == 6 - start
            for (x, y), (u, v) in zip(full[start:], rest, strict=True):
                assert torch.equal(x, u) and torch.equal(y, v)


def test_an_epoch_holds_every_example_once_but_the_rest():
    batches = Batches(images(50), 16, 0)
    labels = torch.cat([y for _, y in batches.epoch(0)])
    assert batches.steps == 3 and len(labels) == len(labels.unique()) == 48
    assert {tuple(x.shape) for x, _ in batches.epoch(0)} == {(16, 3, 8, 8)}


def test_batch_size_is_capped():
    batches = Batches(images(5), 512, 0)
    assert batches.steps == 1 and batches.batch_size == 5
    assert next(batches.epoch(0))[0].shape[0] == 5


def test_without_augmentation_batches_equal_evaluation_inputs():
    data = images(augment="none")
    for x, y in Batches(data, 16, 0).epoch(0):
        assert torch.equal(x, data.inputs(y))
    channels_last = next(Batches(data, 16, 0, channels_last=True).epoch(0))[0]
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(channels_last, next(Batches(data, 16, 0).epoch(0))[0])


def test_inputs_are_normalised():
    data = images()
    expected = (data.x[:2] / 255 - torch.tensor(data.mean).view(3, 1, 1)) / torch.tensor(data.std).view(3, 1, 1)
    torch.testing.assert_close(data.inputs(slice(0, 2)), expected)
    plain = ArrayData(data.x, data.y)
    torch.testing.assert_close(plain.inputs(slice(0, 2)), data.x[:2] / 255)
    table = ArrayData(torch.ones(3, 2), torch.zeros(3, 1), (1.0, 0.0), (1.0, 2.0))
    assert torch.equal(table.inputs(slice(0, 1)), torch.tensor([[0.0, 0.5]]))
