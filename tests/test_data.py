"""Data sets by name and from folders, loaders, splits, and one line for every mistake."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dllp import data
from dllp.data import ArrayData, Batches, LoaderBatches, from_pair, holdout, validate
from dllp.errors import DataError


def one_line(caught: pytest.ExceptionInfo[DataError]) -> bool:
    return "\n" not in str(caught.value)


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
        (torch.zeros(2, 1), torch.tensor([[0, 1], [1, 0]]), "have shape"),
        (torch.zeros(2), torch.tensor([0, 1]), "inputs of shape"),
        (object(), torch.tensor([0, 1]), "inputs of type object"),
    ],
)
def test_bad_pairs(x, y, message):
    if message is None:
        assert from_pair(x, y).y.tolist() == [1, 0]
        return
    with pytest.raises(DataError, match=message) as caught:
        from_pair(x, y)
    assert one_line(caught)


def test_validate_knows_the_network():
    pair = from_pair(torch.zeros(2, 1), torch.tensor([0, 5]))
    with pytest.raises(DataError, match=r"label 5 .* out of range for 3 classes"):
        validate(pair, 3)
    with pytest.raises(DataError, match="integer classes are needed"):
        data.check_labels(torch.zeros(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "mixup"}, "choose none, crop-flip, resized-crop"),
        ({"augment": "crop-flip"}, "larger than 4 pixels"),
        ({"mean": (0.0,)}, "belong together"),
        ({"mean": (0.0,) * 2, "std": (1.0,) * 2}, "for 3 channels"),
    ],
)
def test_bad_array_data(options, message):
    with pytest.raises(DataError, match=message):
        ArrayData(torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), **options)
    with pytest.raises(DataError, match="empty"):
        Batches(ArrayData(torch.zeros(0, 2), torch.zeros(0, 1)), 4, 0)


def save_arrays(folder, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "train_x": rng.integers(0, 256, (12, 6, 6, 3), np.uint8),
        "train_y": np.arange(12) % 3,
        "test_x": rng.integers(0, 256, (6, 6, 6, 3), np.uint8),
        "test_y": np.arange(6) % 3,
    }
    for name, array in (arrays | changes).items():
        np.save(folder / f"{name}.npy", array)
    return arrays


def test_npy_folder(tmp_path):
    arrays = save_arrays(tmp_path)
    loaded = data.load(tmp_path, validation=3)
    assert loaded.num_classes == 3 and loaded.train.augment == "crop-flip" and len(loaded.train) == 9
    assert torch.equal(loaded.test.x, torch.from_numpy(arrays["test_x"]).permute(0, 3, 1, 2))
    pixels = arrays["train_x"] / 255
    assert loaded.test.mean == pytest.approx(pixels.mean((0, 1, 2))) and loaded.test.std == pytest.approx(
        pixels.std((0, 1, 2))
    )
    assert data.load(tmp_path, augment="none").train.augment == "none"


def test_npy_folder_of_grey_images_and_tables(tmp_path):
    save_arrays(tmp_path, train_x=np.zeros((12, 6, 6), np.uint8), test_x=np.zeros((6, 6, 6), np.uint8))
    grey = data.load(tmp_path)
    assert grey.in_channels == 1 and grey.train.augment == "none"
    table = {"train_x": np.ones((12, 5)), "test_x": np.ones((6, 5)), "train_y": np.ones(12), "test_y": np.ones(6)}
    save_arrays(tmp_path, **table)
    regression = data.load(tmp_path)
    assert (regression.num_classes, regression.in_channels, regression.image_size) == (1, 5, 1)
    save_arrays(tmp_path, **(table | {"test_y": np.ones(6, int) + np.arange(6) % 2}))
    with pytest.raises(DataError, match="differ in kind"):
        data.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_x": np.zeros((12, 6, 6, 3), np.int32)}, "train_x.npy holds int32"),
        ({"train_x": np.zeros((12, 6, 6, 5), np.uint8)}, "give uint8 images"),
        ({"train_y": np.arange(11)}, "train_y.npy holds int64 of shape"),
        ({"test_x": np.zeros((6, 7, 7, 3), np.uint8)}, "different shapes"),
        ({"train_y": np.array([{}] * 12)}, "Python objects"),
        ({"test_y": np.full(6, 7), "train_y": np.arange(12) % 2}, "one class only"),
        ({"test_y": np.arange(6)}, "label 5 in the test split"),
    ],
)
def test_bad_npy_folders(tmp_path, changes, message):
    save_arrays(tmp_path, **changes)
    with pytest.raises(DataError, match=message) as caught:
        data.load(tmp_path)
    assert one_line(caught)


def test_damaged_npy_files(tmp_path):
    save_arrays(tmp_path)
    whole = (tmp_path / "test_x.npy").read_bytes()
    (tmp_path / "test_x.npy").write_bytes(whole[:-1])
    with pytest.raises(DataError, match="is damaged"):
        data.load(tmp_path)
    (tmp_path / "test_x.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"is no \.npy array"):
        data.load(tmp_path)


def save_images(folder, parts=("train", "val"), classes=("cat", "dog"), size=(8, 6)):
    for part in parts:
        for c, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(3):
                Image.new("RGB", size, (40 * c, 10 * i, 255)).save(folder / part / name / f"{i}.png")


def test_image_folder(tmp_path):
    save_images(tmp_path)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    loaded = data.load(str(tmp_path))
    assert loaded.classes == ("cat", "dog") and loaded.train.x.shape == (6, 3, 6, 8)
    assert loaded.train.y.tolist() == [0, 0, 0, 1, 1, 1] and loaded.train.augment == "crop-flip"
    assert loaded.test.x[4, :, 0, 0].tolist() == [40, 10, 255] and loaded.validation is None
    cropped = data.load(str(tmp_path), augment="resized-crop").train
    assert isinstance(cropped, data.ArrayData) and cropped.augment == "resized-crop"
    assert isinstance(data.load(tmp_path, augment="resized-crop", image_size=6, workers=0).train, data.StreamedData)


def test_image_folder_with_three_parts_and_many_sizes(tmp_path):
    save_images(tmp_path, ("train", "val", "test"))
    Image.new("L", (20, 20), 9).save(tmp_path / "val" / "dog" / "9.JPG")
    with pytest.raises(DataError, match=r"9.JPG is 20x20 but others are 8x6.*image_size"):
        data.load(tmp_path)
    loaded = data.load(tmp_path, image_size=12)
    assert loaded.validation is not None and loaded.validation.x.shape == (7, 3, 12, 12) and len(loaded.test) == 6


def test_bad_image_folders(tmp_path):
    def fails(message: str, **options) -> None:
        with pytest.raises(DataError, match=message) as caught:
            data.load(tmp_path / "set", **options)
        assert one_line(caught)

    fails("no data set and no folder is called")
    save_images(tmp_path / "set", ("train",), ("cat",))
    fails("neither val/ nor test/")
    save_images(tmp_path / "set", ("val",), ("cat", "eel"))
    fails("holds 1 class folders")
    save_images(tmp_path / "set", ("train",), ("dog",))
    fails("class 'eel' of .* is missing")
    save_images(tmp_path / "set", ("train",), ("eel",))
    fails("image_size = 0", image_size=0)
    (tmp_path / "set" / "train" / "dog" / "bad.png").write_bytes(b"no image")
    fails("cannot read 1 of 10 images, more than max_bad = 0.1% .*bad.png .it is no image")
    (tmp_path / "set" / "train" / "fox").mkdir()
    fails("fox holds no image")


def test_folders_that_are_no_data_set(tmp_path):
    with pytest.raises(DataError, match="holds neither train/"):
        data.load(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="holds no class folders"):
        data.load(tmp_path)


def loader(**options) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(20, 3, 4, 4), torch.arange(20) % 4), batch_size=8, **options)


@pytest.mark.parametrize("own", [None, torch.Generator()])
def test_loader_batches_depend_on_seed_and_epoch_alone(own):
    source = LoaderBatches(loader(shuffle=True, generator=own), seed=1, channels_last=True)
    assert (source.steps, source.num_examples) == (3, 20)
    torch.manual_seed(5)
    first = list(source.epoch(2))
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))
    rest = list(source.epoch(2, start_step=1))
    assert len(rest) == 2
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first[1:], rest, strict=True))
    assert not torch.equal(first[0][0], next(source.epoch(3))[0])
    assert first[0][0].is_contiguous(memory_format=torch.channels_last)


def test_loader_tells_its_sampler_the_epoch():
    class Sampler(torch.utils.data.SequentialSampler):
        seen = -1

        def set_epoch(self, epoch: int) -> None:
            self.seen = epoch

    sampler = Sampler(range(20))
    list(LoaderBatches(loader(sampler=sampler), seed=0).epoch(4))
    assert sampler.seen == 4


def test_loader_settles_types():
    pairs = TensorDataset(torch.full((2, 1), 255, dtype=torch.uint8), torch.ones(2, dtype=torch.float64))
    x, y = next(LoaderBatches(DataLoader(pairs, batch_size=2), seed=0).epoch(0))
    assert x.dtype == y.dtype == torch.float32 and x.tolist() == [[1], [1]] and y.shape == (2, 1)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (TensorDataset(torch.zeros(4, 1), torch.full((4,), 9)), "label 9 in batch 0 of the DataLoader"),
        (TensorDataset(torch.full((4, 1), torch.nan), torch.zeros(4).long()), "NaN"),
        (TensorDataset(torch.zeros(4, 1)), "is a list, not a pair of tensors"),
        ([{"x": 1}] * 4, "is a dict, not a pair"),
    ],
)
def test_bad_loaders(dataset, message):
    source = LoaderBatches(DataLoader(dataset, batch_size=2), seed=0, num_classes=3)
    with pytest.raises(DataError, match=message):
        list(source.epoch(0))


def test_loaders_without_length_or_batches():
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1), 0

    with pytest.raises(DataError, match="has no length"):
        LoaderBatches(DataLoader(Stream()), seed=0)
    with pytest.raises(DataError, match="yields no batch"):
        LoaderBatches(DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=4, drop_last=True), seed=0)

    class Short(DataLoader):
        def __len__(self) -> int:
            return 5

    short = Short(TensorDataset(torch.zeros(2, 1), torch.zeros(2).long()))
    with pytest.raises(DataError, match="ended at batch 2 of 5"):
        list(LoaderBatches(short, seed=0).epoch(0))
    uneven = DataLoader([0], collate_fn=lambda _: (torch.zeros(2, 1), torch.zeros(3)))
    with pytest.raises(DataError, match="2 inputs but 3 labels"):
        list(LoaderBatches(uneven, seed=0).epoch(0))
