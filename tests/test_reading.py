"""Files from strangers: links, pipes and code are refused, limits hold, and every refusal is one line."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dllp import data, files
from dllp.cli.main import main
from dllp.data import images as pictures_of
from dllp.errors import LONGEST, ArtifactError, ConfigError, DataError, DllpError
from dllp.runs import artifacts, settings
from paper.store import Store
from tests.support.commands import FAST, npy, one_line, settle


def images(root: Path, size: tuple[int, int] = (8, 8)) -> Path:
    for part in ("train", "test"):
        for name in ("a", "b"):
            (root / part / name).mkdir(parents=True)
            Image.new("RGB", size).save(root / part / name / "one.png")
    return root


# ---- one line, whatever it quotes


def test_messages_are_one_printable_line() -> None:
    text = str(DllpError("a\nb\x1b[31m\u2028c\udcff" + "x" * 5000))
    assert text.isprintable() and text.startswith("a b\\x1b[31m c\\udcff") and len(text) == LONGEST + 4


# ---- links, pipes, code


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "particle-0.safetensors", "dense.safetensors"])
def test_a_link_out_of_a_run_folder_is_refused(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    os.rename(copied / name, tmp_path / "outside")
    (copied / name).symlink_to(tmp_path / "outside")
    assert main(["evaluate", str(copied)]) == 2
    one_line(capsys, name, "leads out of")
    (copied / name).unlink()
    os.rename(tmp_path / "outside", copied / "inside")
    (copied / name).symlink_to("inside")
    assert main(["evaluate", str(copied)]) == 0, "a link within the folder does no harm"


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/pruned"])
def test_checkpoints_are_never_written_or_removed_elsewhere(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step-000000001.safetensors").touch()
    (copied / "run.json").unlink()
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).symlink_to(outside)
    for words in (["--resume"], ["--overwrite"]):
        assert main(["prune", *words, "--out", str(copied)]) == 2
        one_line(capsys, name, "leads out of")
    assert (outside / "step-000000001.safetensors").exists()


def test_a_link_in_a_circle_is_refused(copied: Path) -> None:
    (copied / "gates.safetensors").unlink()
    (copied / "gates.safetensors").symlink_to("gates.safetensors")
    with pytest.raises(ArtifactError, match="gates"):
        artifacts.read_tensors(copied / "gates.safetensors")


def test_links_out_of_a_data_folder_are_refused(tmp_path: Path) -> None:
    folder = npy(tmp_path / "arrays", np.zeros((4, 3), np.float32), np.arange(4) % 2)
    os.rename(folder / "test_x.npy", tmp_path / "test_x.npy")
    (folder / "test_x.npy").symlink_to(tmp_path / "test_x.npy")
    with pytest.raises(DataError, match=r"test_x\.npy is a link that leads out"):
        data.load(folder)
    pictures = images(tmp_path / "images")
    os.rename(pictures / "train" / "a", tmp_path / "a")
    (pictures / "train" / "a").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match=r"train/a is a link that leads out"):
        data.load(pictures)


def test_pipes_never_hang(copied: Path, tmp_path: Path) -> None:
    for name, read in (
        ("pipe.safetensors", artifacts.read_tensors),
        ("pipe.json", artifacts.read_json),
        ("pipe.yaml", settings.read),
    ):
        os.mkfifo(copied / name)
        with pytest.raises(DllpError, match=rf"{name}: it is no regular file"):
            read(copied / name)
    pictures = images(tmp_path / "images")
    (pictures / "train" / "a" / "one.png").unlink()
    os.mkfifo(pictures / "train" / "a" / "one.png")
    with pytest.raises(DataError, match="no regular file"):
        data.load(pictures)


def test_code_is_imported_only_where_the_command_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(tmp_path, monkeypatch)
    (tmp_path / "stranger.py").write_text("open('ran', 'w').close()\nfrom dllp.zoo import build\n"
                                          "def net():\n    return build('small_cnn', 10, 1)\n")  # fmt: skip
    (tmp_path / "theirs.yaml").write_text("model: stranger:net\n")
    words = ["prune", "--config", "theirs.yaml", *FAST, "--no-dense", "--quiet", "--out", "run"]
    assert main(words) == 2
    one_line(capsys, "stranger:net", "--model", "--trust-imports")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()
    assert main([*words, "--trust-imports"]) == 0 and (tmp_path / "ran").exists()
    assert main([*words, "--model", "small_cnn", "--overwrite"]) == 0, "what is named on the command line wins"


def test_pillow_gets_only_the_formats_we_name(tmp_path: Path) -> None:
    pictures = images(tmp_path / "images")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (pictures / "train" / "a" / "one.png").write_bytes((tmp_path / "a.eps").read_bytes())
    with pytest.raises(DataError, match=r"cannot read 1 of 2 images.*one\.png"):
        data.load(pictures)


def test_large_images_are_told_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = images(tmp_path / "images")
    monkeypatch.setattr(pictures_of, "MAX_PIXELS", 63)
    with pytest.raises(DataError, match="8x8: more than 63 pixels"):
        data.load(pictures)
    monkeypatch.undo()
    monkeypatch.setenv(files.CAP_VARIABLE, "300")
    with pytest.raises(DataError, match="2 images of 8x8 take more than the 300 bytes"):
        data.load(pictures)
    with pytest.raises(DataError, match="image_size = 100000"):
        data.load(pictures, image_size=100_000)


def test_class_folders_need_names_that_are_text(tmp_path: Path) -> None:
    pictures = images(tmp_path / "images")
    os.rename(pictures / "train" / "a", pictures / "train" / "a\x1b[0m")
    with pytest.raises(DataError, match="no text"):
        data.load(pictures)


# ---- limits


def test_the_cap_is_stated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "a.safetensors")
    folder = npy(tmp_path / "arrays", np.zeros((4, 30), np.float32), np.arange(4) % 2)
    monkeypatch.setenv(files.CAP_VARIABLE, "399")
    with pytest.raises(ArtifactError, match="400 bytes of tensors, more than the 399"):
        artifacts.read_tensors(tmp_path / "a.safetensors")
    with pytest.raises(DataError, match="480 bytes, more than the 399"):
        data.load(folder)
    monkeypatch.setenv(files.CAP_VARIABLE, "much")
    with pytest.raises(ConfigError, match="DLLP_MAX_BYTES = 'much'"):
        artifacts.read_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"NaN", "NaN is no number"),
        (b"[1e999]", "not finite"),
        (b"9" * 30, "30 digits"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 40 + b"]" * 40, "nested too deeply"),
        (b"[" * 10**5, "nested too deeply"),
        (b"\xff", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b" " * (files.JSON_BYTES + 1), "bytes"),
        (b"," * (files.JSON_VALUES + 1), "too large for JSON"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=words) as caught:
        artifacts.read_json(tmp_path / "a.json")
    assert "a.json" in str(caught.value)


def entry(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([], "no object"),
        ({"__metadata__": {"a": 1}, "a": entry()}, "__metadata__"),
        ({"a": 3}, "dtype, shape and data_offsets"),
        ({"a": entry() | {"more": 1}}, "dtype, shape and data_offsets"),
        ({"a": entry("OBJECT")}, "unknown dtype 'OBJECT'"),
        ({"a": entry(shape=[-2])}, "shape of tensor 'a'"),
        ({"a": entry(shape=[1] * 20)}, "shape of tensor 'a'"),
        ({"a": entry(shape=[True])}, "shape of tensor 'a'"),
        ({"a": entry(shape=[3])}, "but its data_offsets are"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": entry(offsets=(1, 3))}, "gap at byte 0"),
        ({}, "its header declares 0"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, header: object, words: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\x00\x01")
    with pytest.raises(ArtifactError, match=words) as caught:
        artifacts.read_tensors(tmp_path / "a.safetensors")
    assert "a.safetensors" in str(caught.value)


def test_booleans_and_weights_are_what_they_say(tmp_path: Path) -> None:
    text = json.dumps({"a": entry("BOOL")}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\x00\x07")
    with pytest.raises(ArtifactError, match="'a' holds booleans"):
        artifacts.read_tensors(tmp_path / "a.safetensors")
    network = torch.nn.Linear(2, 1)
    broken = {"weight": torch.tensor([[1.0, torch.inf]]), "bias": torch.zeros(1)}
    save_file(broken, tmp_path / "b.safetensors")
    with pytest.raises(ArtifactError, match=r"b\.safetensors: 'weight' holds numbers that are not finite"):
        artifacts.read_network(tmp_path / "b.safetensors", network)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs: !!int 3", "line 1 has a tag"),
        ("lr: &a 0.1\nlr_end: *a", "an anchor or an alias"),
        ("epochs: [[[[3]]]]", "nested too deeply"),
        ("epochs: {a: 1}", "epochs must be a number"),
        ("lr: '[0.1, 0.2]'", "expected a number"),
        ("epochs: 0x" + "f" * 40, "epochs must be a number"),
        ("model: \"a\\nb\"", "model must be a number, a word"),
        ("1: 2", "no name of a setting"),
        ("lr: -1", "lr = -1"),
        ("model:", "model has no value"),
        ("epochs: null", "epochs has no value"),
        ("epochs: 3" + " " * 2**16, "more than the 65536"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        settings.read(tmp_path / "a.yaml")
    assert "a.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": 3}, "'data' or 'dense_noise'"),
        ({"data": {"num_classes": 2**30}}, "'num_classes'"),
        ({"data": {"num_classes": 2**20}}, "reference-0"),
        ({"data": {"shape": "8x8"}}, "'shape'"),
        ({"data": {"mean": [None]}}, "'mean'"),
        ({"data": {"std": [0.0], "mean": [0.0]}}, "'std' must be positive"),
        ({"dense_noise": "much"}, "'data' or 'dense_noise'"),
    ],
)
def test_descriptions_that_are_refused(
    copied: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], words: str
) -> None:
    values = json.loads((copied / "run.json").read_text())
    values["info"] |= change
    (copied / "run.json").write_text(json.dumps(values))
    assert main(["evaluate", str(copied)]) == 2
    one_line(capsys, str(copied), words)


def test_digests_never_name_a_path(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for digest in ("../../x", "a/b", "", "x" * 65):
        with pytest.raises(ArtifactError, match="no digest"):
            store.probabilities(digest)
        store.runs.write_text(json.dumps({"digest": digest, "seed": 0}) + "\n")
        with pytest.raises(ArtifactError, match="line 1 is damaged"):
            store.lines()
