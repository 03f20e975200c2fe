"""Bad input: one line on standard error, exit code 2, nothing left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dllp.cli.main import main
from tests.support.commands import FAST, npy, one_line


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("", ["required: COMMAND; see dllp --help"]),
        ("prone", ["prone", "prune"]),
        ("prune --kep-flops 0.3", ["unexpected argument --kep-flops", "did you mean --keep-flops"]),
        ("prune --bogus", ["unexpected argument --bogus: see dllp prune --help"]),
        ("evaluate DIR --bogus", ["unexpected argument --bogus: see dllp evaluate --help"]),
        ("evaluate DIR --epoch 3", ["unexpected argument --epoch: see dllp evaluate --help"]),
        (
            "prune --init m.onnx",
            ["init = m.onnx: expected given, fresh or a file of trained weights (.safetensors, .pt"],
        ),
        ("prune surplus", ["unexpected argument surplus: see dllp prune --help"]),
        ("prune extra", ["unexpected argument extra: see dllp prune --help"]),
        ("prune --checkpoint-steps -1", ["checkpoint_steps = -1: at least 0 is needed"]),
        ("structure --shape -1 8 8", ["shape = -1: at least 1 is needed"]),
        ("profile --shape 1 8 8 --classes 0", ["classes = 0: at least 1 is needed"]),
        ("prune --epochs", ["--epochs"]),
        ("prune --epochs many", ["epochs = many", "a whole number"]),
        ("prune --keep-flops half", ["keep_flops = half", "expected a number"]),
        ("prune --slab-bounds 1", ["slab_bounds = 1", "expected two numbers"]),
        ("prune --granularity layer", ["granularity = layer", "channel, weight"]),
        ("prune --bandwidth wide", ["bandwidth = wide", "median, paper or a number"]),
        ("prune --keep-flops nan", ["keep_flops = nan"]),
        ("prune --keep-flops 0", ["keep_flops = 0", "(0, 1]"]),
        ("prune --keep-flops 1.5", ["keep_flops = 1.5", "(0, 1]"]),
        ("prune --keep-flops 0.0001", ["0.0001 cannot be reached"]),
        ("prune --particles 0", ["particles = 0"]),
        ("prune --image-size 16", ["image_size = 16", "digits holds images of 8x8", "leave out image_size"]),
        ("prune --workers -1", ["workers = -1", "from 0 up"]),
        ("prune --device cuda:99", ["cuda:99", "cpu"]),
        ("prune --model smal_cnn", ["unknown model 'smal_cnn'", "small_cnn"]),
        ("prune --model vgg16_bn", ["vgg16_bn", "8x8"]),
        ("prune --data thin", ["small_cnn needs images of at least 2x2, not 8x1"]),
        ("prune --model no_such_module:factory", ["no_such_module"]),
        ("prune --model NETS:missing", ["missing"]),
        ("prune --model NETS:text", ["gives a str", "torch.nn.Module"]),
        ("prune --model NETS:broken", ["ValueError: first line"]),
        ("prune --model NETS:large", ["11"]),
        ("prune --model NETS:linear", ["no channels that can be pruned"]),
        ("prune --model NETS:narrow", ["label 9", "out of range for 4 classes"]),
        ("prune --data nowhere", ["nowhere"]),
        ("prune --data one", ["at least two"]),
        ("prune --data bad --model mlp", ["NaN", "example 3"]),
        ("prune --task regression", ["task = regression", "torch.int64"]),
        ("prune --data table --model mlp --task classification", ["for a classification", "torch.float32"]),
        ("prune --data table --model NETS:wide", ["7 outputs", "2 targets"]),
        ("prune --validation 5000", ["5000"]),
        ("prune --out file/run", ["file"]),
        ("prune --config missing.yaml", ["missing.yaml"]),
        ("prune --config tag.yaml", ["tag.yaml", "not plain YAML"]),
        ("prune --config list.yaml", ["list.yaml", "no settings"]),
        ("prune --config unknown.yaml", ["unknown.yaml", "'epoch'", "did you mean epochs"]),
        ("prune --config kind.yaml", ["kind.yaml", "epochs = soon", "a whole number"]),
        ("prune --config switch.yaml", ["switch.yaml", "gate_linear = 3: expected true or false"]),
        ("prune --config out.yaml", ["out.yaml", "'out'"]),
        ("prune --config twice.yaml", ["twice.yaml", "line 2 gives epochs a second time"]),
        ("prune --config dash.yaml", ["dash.yaml", "line 3 gives keep_flops a second time"]),
        ("evaluate", ["required: DIR", "see dllp evaluate --help"]),
        ("evaluate nowhere", ["nowhere"]),
    ],
)
def test_bad_input_is_one_line(
    nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, reported: list[str]
) -> None:
    (tmp_path / "one" / "train" / "only").mkdir(parents=True)
    (tmp_path / "one" / "test" / "only").mkdir(parents=True)
    for part in ("train", "test"):
        Image.new("RGB", (8, 8)).save(tmp_path / "one" / part / "only" / "a.png")
    x = np.zeros((6, 4), np.float32)
    x[3, 1] = np.nan
    npy(tmp_path / "bad", x, np.arange(6) % 2)
    npy(tmp_path / "table", np.zeros((6, 4), np.float32), np.zeros((6, 2), np.float32))
    npy(tmp_path / "thin", np.zeros((6, 1, 8, 1), np.float32), np.arange(6) % 2)
    (tmp_path / "file").write_text("")
    (tmp_path / "tag.yaml").write_text("epochs: !!python/object/apply:os.system ['true']\n")
    (tmp_path / "list.yaml").write_text("- epochs\n")
    (tmp_path / "unknown.yaml").write_text("epoch: 3\n")
    (tmp_path / "kind.yaml").write_text("epochs: soon\n")
    (tmp_path / "switch.yaml").write_text("gate-linear: 3\n")
    (tmp_path / "out.yaml").write_text("out: elsewhere\n")
    (tmp_path / "twice.yaml").write_text("epochs: 3\nepochs: 4\n")
    (tmp_path / "dash.yaml").write_text("keep-flops: 0.5\nepochs: 3\nkeep_flops: 0.2\n")
    before = sorted(os.listdir(tmp_path))
    assert main(words.replace("NETS", nets).split()) == 2
    one_line(capsys, "error: ", *reported)
    assert sorted(set(os.listdir(tmp_path)) - {"__pycache__"}) == before


def test_no_space_when_flushing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["prune", *FAST, "--no-dense", "--quiet", "--out", str(tmp_path / "new" / "run")]) == 2
    one_line(capsys, "No space left on device")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("limit", [100, 20_000])
def test_no_space_in_the_log_or_in_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int, limited: Callable[[int], None]
) -> None:
    limited(limit)
    assert main(["prune", *FAST, "--no-dense", "--quiet", "--out", str(tmp_path / "run")]) == 2
    one_line(capsys, "cannot write", "File too large")
    assert os.listdir(tmp_path) == []
