"""Run folders that others, or a failing disk, have left: one error that names the file."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dllp
from dllp import ArtifactError
from dllp.runs import artifacts
from tests.support import saved

SAFETENSORS = ["gates.safetensors", "particle-0.safetensors", "reference-1.safetensors"]


@pytest.fixture
def folder(saved_run: tuple[dllp.Result, Path], tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(saved_run[1], tmp_path / "copy"))


@pytest.mark.parametrize("name", ["run.json", *SAFETENSORS])
@pytest.mark.parametrize("damage", ["empty", "half", "noise", "missing"])
def test_damaged_files_are_named(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "half": content[: len(content) // 2], "noise": b"\xff" * 64}[damage])
    with pytest.raises(ArtifactError) as caught:
        dllp.load(folder, saved.build())
    message = str(caught.value)
    assert "\n" not in message and (name in message if damage != "missing" or name != "run.json" else True)
    assert str(folder) in message


@pytest.mark.parametrize("name", SAFETENSORS)
@given(data=st.data())
def test_one_flipped_bit_of_a_tensor_is_told(
    saved_run: tuple[dllp.Result, Path], name: str, data: st.DataObject
) -> None:
    path = saved_run[1] / name
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    place, bit = data.draw(st.integers(begin, len(content) - 1)), data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(saved_run[1], Path(temporary) / "copy"))
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        (folder / name).write_bytes(flipped)
        with pytest.raises(ArtifactError, match=rf"{name}(.* damaged: its checksum|: .* booleans)"):
            dllp.load(folder, saved.build())


def test_weights_that_others_wrote_have_no_checksum(folder: Path) -> None:
    path = folder / "particle-0.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    tensors["8.bias"] += 1
    save_file(tensors, path)
    assert torch.equal(dllp.load(folder, saved.build()).model.state_dict()["8.bias"], tensors["8.bias"])


@given(st.dictionaries(st.text(), st.text(), max_size=3), st.text(), st.integers(0, 3))
def test_the_checksum_covers_texts_names_types_shapes_and_values(texts: dict[str, str], name: str, at: int) -> None:
    assume(name != "other" and "more" not in texts)
    tensors = {name: torch.arange(4.0), "other": torch.zeros(2, 3, dtype=torch.bfloat16)}
    changed = tensors[name].clone()
    changed[at] += 1e-3
    changes = [
        (tensors, {**texts, "more": ""}),
        *((tensors, {**texts, key: text + " "}) for key, text in texts.items()),
        ({name + " ": tensors[name], "other": tensors["other"]}, texts),
        (tensors | {name: tensors[name].double()}, texts),
        (tensors | {name: tensors[name].view(2, 2)}, texts),
        (tensors | {name: changed}, texts),
        (tensors | {"other": tensors["other"].half()}, texts),
    ]
    base = artifacts.checksum(tensors, texts)
    assert base == artifacts.checksum(dict(reversed(tensors.items())), dict(reversed(texts.items()))), "in any order"
    strided = tensors | {name: tensors[name].view(2, 2).T}
    assert artifacts.checksum(strided, texts) == artifacts.checksum(strided | {name: strided[name].contiguous()}, texts)
    assert base not in [artifacts.checksum(*change) for change in changes]


@pytest.mark.parametrize("value", [None, 3, [], "text", {}, {"format": 99}])
def test_a_run_of_another_format(folder: Path, value: Any) -> None:
    (folder / "run.json").write_text(json.dumps(value))
    with pytest.raises(ArtifactError, match=r"run\.json is not of format"):
        dllp.load(folder, saved.build())


@pytest.mark.parametrize(
    "field", ["config", "recipes", "gated", "dense", "sizes", "widths", "whole", "history", "info"]
)
def test_a_missing_field_is_an_error(folder: Path, field: str) -> None:
    values = json.loads((folder / "run.json").read_text())
    del values[field]
    (folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=r"run\.json"):
        dllp.load(folder, saved.build())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("config", 3),
        ("gated", 3),
        ("dense", 3),
        ("sizes", 3),
        ("config", {"keep_flops": 7}),
        ("config", {"unknown": 7}),
        ("recipes", None),
        ("recipes", 3),
        ("recipes", [3, 3]),
        ("recipes", [{"0": {"out": [99]}}] * 2),
        ("recipes", [{}] * 5),
        ("recipes", []),
        ("widths", {"a": []}),
        ("widths", {"a": [3]}),
        ("widths", {"a": [3, 3, 0]}),
        ("history", [{"loss": "x"}]),
        ("history", [{"epoch": 1, "phase": "soft"}]),
    ],
)
def test_fields_of_the_wrong_kind_are_errors_of_the_run(folder: Path, field: str, value: Any) -> None:
    values = json.loads((folder / "run.json").read_text())
    values[field] = value
    (folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=r"run\.json"):
        dllp.load(folder, saved.build())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not a folder"):
        dllp.load(tmp_path / "nothing", saved.build())
    with pytest.raises(ArtifactError, match=r"holds no run\.json"):
        dllp.load(tmp_path, saved.build())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: net.append(nn.Linear(3, 3)), "has no tensor"),
        (lambda net: net.pop(8), "that the network lacks"),
        (lambda net: net.__setitem__(8, nn.Linear(12, 4)), "but the network needs"),
        (lambda net: net.double(), "but the network needs"),
    ],
)
def test_another_network_is_an_error(
    saved_run: tuple[dllp.Result, Path], change: Callable[[nn.Sequential], object], words: str
) -> None:
    network = saved.build()
    assert isinstance(network, nn.Sequential)
    change(network)
    with pytest.raises(ArtifactError, match=words) as caught:
        dllp.load(saved_run[1], network)
    assert "reference-0.safetensors" in str(caught.value)


@pytest.mark.parametrize("index", [torch.tensor([-1, 0]), torch.tensor([0, 99]), torch.tensor([0]), torch.zeros(2)])
def test_positions_that_do_not_fit(tmp_path: Path, index: Tensor) -> None:
    path = tmp_path / "net.safetensors"
    index = index.to(torch.int32) if not index.is_floating_point() else index
    save_file({"weight#index": index, "weight#value": torch.ones(2), "bias": torch.zeros(2)}, path)
    with pytest.raises(ArtifactError, match=r"net\.safetensors: the positions of 'weight' do not fit"):
        artifacts.read_network(path, nn.Linear(3, 2))
