"""Data sets from folders of arrays and of images, and one line for every mistake."""

import time

import numpy as np
import pytest
import torch
from PIL import Image

from dllp import data, files
from dllp.data import StreamBatches, images, ood, reader, stream
from dllp.data.unreadable import Unreadable
from dllp.errors import DataError
from tests.support import pictures

# ---- arrays


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
    save_arrays(tmp_path, test_y=np.ones(6, int))
    assert data.load(tmp_path).test.y.tolist() == [1] * 6, "one class is enough to test on"


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
        ({"train_y": np.zeros(12, int), "test_y": np.zeros(6, int)}, "one class only"),
        ({"test_y": np.full(6, 7)}, "label 7 in the test split"),
        ({"test_y": np.arange(6)}, "label 5 in the test split"),
    ],
)
def test_bad_npy_folders(tmp_path, changes, message):
    save_arrays(tmp_path, **changes)
    with pytest.raises(DataError, match=message) as caught:
        data.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_npy_files(tmp_path):
    save_arrays(tmp_path)
    whole = (tmp_path / "test_x.npy").read_bytes()
    (tmp_path / "test_x.npy").write_bytes(whole[:-1])
    with pytest.raises(DataError, match="is damaged"):
        data.load(tmp_path)
    (tmp_path / "test_x.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"is no \.npy array"):
        data.load(tmp_path)


# ---- images


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


@pytest.mark.parametrize("kind", ["memory", "streamed", "shards", "elsewhere"])
def test_grey_of_16_bits_is_that_of_its_high_bytes(tmp_path, kind):
    """As many programs make 16 bits of 8, and as Pillow reads 16-bit colour; low bytes are noise here."""
    rng = np.random.default_rng(0)
    for name in ("deep", "plain"):
        save_images(tmp_path / name)
    for path in (tmp_path / "deep").glob("*/*/*.png"):
        grey = rng.integers(0, 2**16, (20, 24), np.uint16)
        Image.fromarray(grey).save(path)
        Image.fromarray((grey >> 8).astype(np.uint8)).save(tmp_path / "plain" / path.relative_to(tmp_path / "deep"))
    found = []
    for name in ("deep", "plain"):
        place = tmp_path / name
        if kind == "memory":
            found.append(data.load(place).test.inputs(slice(None)))
        elif kind == "elsewhere":
            found.append(ood.find(str(place), data.load("digits").test).x)
        else:
            place = pictures.shards(tmp_path / f"{name}-tar", place) if kind == "shards" else place
            found.append(next(StreamBatches(pictures.streamed(place), 6, seed=0).epoch(0))[0])
    assert torch.equal(*found) and len(found[0].unique()) > 50


def test_grey_whose_white_is_unknown_cannot_be_read():
    whole = np.array([[0, 255, 256], [257, 2**15, 2**16 - 1]], np.int32)
    assert np.asarray(images.to_rgb(Image.fromarray(whole)))[..., 1].tolist() == [[0, 0, 1], [1, 128, 255]]
    for pixels in (whole + 1, whole - 1, whole.astype(np.float32)):
        with pytest.raises(Unreadable, match="save it with 8 or 16 bits"):
            images.to_rgb(Image.fromarray(pixels))


def test_every_image_is_opened_once_and_threads_change_nothing(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    names = [f"{part}/{name}/{i:02d}.png" for part in ("train", "val") for name in ("cat", "dog") for i in range(20)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8)).save(tmp_path / name)
    for name in names[3:6]:
        (tmp_path / name).write_bytes(b"no image")
    opened, plain = [], files.open_plain
    monkeypatch.setattr(files, "open_plain", lambda path, kind: opened.append(str(path)) or plain(path, kind))
    monkeypatch.setattr(reader, "cores", lambda: 4)
    monkeypatch.setattr(stream, "THREAD_CHUNK", 2)
    told = []
    loaded = data.load(tmp_path, image_size=8, max_bad=0.1, report=lambda image: told.append(str(image)))
    assert sorted(opened) == sorted(str(tmp_path / name) for name in names)
    good = names[:3] + names[6:40]
    pictures = [Image.open(tmp_path / name).resize((8, 8), Image.Resampling.BILINEAR) for name in good]
    assert isinstance(loaded.train, data.ArrayData)
    assert loaded.train.x.equal(torch.from_numpy(np.stack([np.asarray(i).transpose(2, 0, 1) for i in pictures])))
    assert loaded.train.y.tolist() == ["dog" in name for name in good]
    assert [line.split(" is left out, ")[0] for line in told] == [str(tmp_path / name) for name in names[3:6]]


def test_large_images_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    save_images(tmp_path)
    now, most, to_rgb = [], [], images.to_rgb

    def watched(image):
        now.append(1)
        most.append(len(now))
        time.sleep(0.01)
        now.pop()
        return to_rgb(image)

    monkeypatch.setattr(images, "to_rgb", watched)
    monkeypatch.setattr(reader, "cores", lambda: 4)
    monkeypatch.setattr(stream, "THREAD_CHUNK", 1)
    monkeypatch.setattr(images, "LARGE", 10)
    data.load(tmp_path)
    assert most == [1] * 12


@pytest.mark.parametrize("name", ["digits", "arrays", "table"])
def test_data_that_are_not_resized(tmp_path, name):
    place, held = name, "images of 8x8"
    if name in ("arrays", "table"):
        x = {} if name == "arrays" else {"train_x": np.ones((12, 5)), "test_x": np.ones((6, 5))}
        save_arrays(tmp_path, **x)
        place, held = tmp_path, "images of 6x6" if name == "arrays" else "tables"
    with pytest.raises(DataError, match=rf"image_size = 16: .* holds {held}, which are not resized: leave out"):
        data.load(place, image_size=16)
    same = {"digits": 8, "arrays": 6}.get(name)
    assert same is None or data.load(place, image_size=same).image_size == same


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
        assert "\n" not in str(caught.value)

    fails("no data set and no folder is called")
    save_images(tmp_path / "set", ("train",), ("cat",))
    fails("holds train: give train/<class>/ and val/<class>/")
    save_images(tmp_path / "set", ("val",), ("cat", "eel"))
    fails("one class only")
    save_images(tmp_path / "set", ("train",), ("dog",))
    fails("class 'eel' of val .* is missing in train")
    save_images(tmp_path / "set", ("train",), ("eel",))
    fails("image_size = 0", image_size=0)
    (tmp_path / "set" / "train" / "dog" / "bad.png").write_bytes(b"no image")
    fails("cannot read 1 of 10 images, more than max_bad = 0.1% .*bad.png .it is no image")
    (tmp_path / "set" / "train" / "fox").mkdir()
    fails("fox holds no image")


def test_folders_that_are_no_data_set(tmp_path):
    with pytest.raises(DataError, match="holds no splits: give train/"):
        data.load(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="holds no class folders"):
        data.load(tmp_path)
