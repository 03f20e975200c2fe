"""Run folders come back as they were saved, in any process and without pickle; damaged ones are one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import dllp
from dllp import ArtifactError, Config
from dllp.runs.result import FORMAT, read_run
from tests.support import short_runs
from tests.support.short_runs import pictures

SAFETENSORS = ["gates.safetensors", "particle-0.safetensors", "reference-1.safetensors"]
FRESH = """
import io, pickle, sys

def refuse(*args, **kwargs):
    raise AssertionError("pickle was used")

import torch, dllp, dllp.api
from nets import network
pickle.load = pickle.loads = pickle.Unpickler = pickle.dump = pickle.dumps = torch.load = refuse
folder, x_path, out_path = sys.argv[1:]
from safetensors.torch import load_file, save_file
result = dllp.load(folder, network())
x = load_file(x_path)["x"]
with torch.no_grad():
    outputs = {"members": result.posterior.members(x), "model": result.model(x), "reference": result.reference(x)}
    save_file(outputs, out_path)
"""


def test_a_loaded_run_is_the_saved_one(saved_run: tuple[dllp.Result, Path]) -> None:
    result, folder = saved_run
    network = short_runs.build()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    loaded = dllp.load(folder, network)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    for a, b in zip(result.particles, loaded.particles, strict=True):
        assert short_runs.same(a.network, b.network) and short_runs.same(a.reference, b.reference)
        assert a.recipe == b.recipe and a.gated == b.gated
        assert a.keep is not None and b.keep is not None and torch.equal(a.keep, b.keep)
    for name in ("config", "history", "dense", "sizes", "widths", "whole", "info"):
        assert getattr(loaded, name) == getattr(result, name)
    assert all(torch.equal(result.gates[k], loaded.gates[k]) for k in result.gates)
    x = pictures()[0]
    assert torch.equal(result.posterior.members(x), loaded.posterior.members(x))
    assert not any(module.training for module in loaded.model.modules())


def test_a_fresh_process_without_pickle_gives_equal_bits(saved_run: tuple[dllp.Result, Path], tmp_path: Path) -> None:
    result, folder = saved_run
    (tmp_path / "nets.py").write_text(textwrap.dedent(short_runs.NETS))
    x = pictures()[0]
    save_file({"x": x}, tmp_path / "x.safetensors")
    command = [sys.executable, "-W", "error", "-c", FRESH, folder, "x.safetensors", "out.safetensors"]
    root = str(Path(dllp.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    subprocess.run([str(c) for c in command], check=True, env=environment, cwd=tmp_path)
    out = load_file(tmp_path / "out.safetensors")
    with torch.no_grad():
        assert torch.equal(out["members"], result.posterior.members(x))
        assert torch.equal(out["model"], result.model(x)) and torch.equal(out["reference"], result.reference(x))


def test_the_folder_holds_what_the_format_says(saved_run: tuple[dllp.Result, Path]) -> None:
    _, folder = saved_run
    networks = {f"{name}-{k}.safetensors" for name in ("particle", "reference") for k in (0, 1)}
    assert {path.name for path in folder.iterdir()} == {"run.json", "gates.safetensors"} | networks
    values = json.loads((folder / "run.json").read_text())
    assert values["format"] == FORMAT
    assert Config.from_dict(values["config"]).keep_flops == 0.3


def test_pruned_networks_are_smaller_on_disk(saved_run: tuple[dllp.Result, Path]) -> None:
    """Channels are cut; single weights are stored sparse."""
    result, folder = saved_run
    sizes = [(folder / f"particle-{k}.safetensors").stat().st_size for k in range(2)]
    reference = (folder / "reference-0.safetensors").stat().st_size
    assert all(size < reference for size in sizes)
    stored = load_file(folder / "particle-0.safetensors")
    gated = result.particles[0].gated
    assert {name for name in stored if "#" in name} == {f"{n}{end}" for n in gated for end in ("#index", "#value")}
    for name in gated:
        weight = result.model.get_parameter(name)
        assert len(stored[f"{name}#value"]) == int((weight != 0).sum()) < weight.numel()
        assert (stored[f"{name}#value"] != 0).all()


def test_the_way_out_of_an_unfinished_run_is_a_command_as_a_shell_takes_it(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").touch()
    with pytest.raises(ArtifactError, match=f"dllp prune --resume --out '{folder}'"):
        read_run(folder)


# ---- damage


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
        dllp.load(folder, short_runs.build())
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
            dllp.load(folder, short_runs.build())


def test_weights_that_others_wrote_have_no_checksum(folder: Path) -> None:
    path = folder / "particle-0.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    tensors["8.bias"] += 1
    save_file(tensors, path)
    assert torch.equal(dllp.load(folder, short_runs.build()).model.state_dict()["8.bias"], tensors["8.bias"])


@pytest.mark.parametrize("value", [None, 3, [], "text", {}, {"format": 99}])
def test_a_run_of_another_format(folder: Path, value: Any) -> None:
    (folder / "run.json").write_text(json.dumps(value))
    with pytest.raises(ArtifactError, match=r"run\.json is not of format .*: dllp prune --config .*config\.yaml"):
        dllp.load(folder, short_runs.build())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("config", 3),
        ("gated", 3),
        ("dense", 3),
        ("sizes", 3),
        ("config", {"keep_flops": 7}),
        ("config", {"unknown": 7}),
        ("config", {"slab_bounds": 3}),
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
        dllp.load(folder, short_runs.build())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not a folder"):
        dllp.load(tmp_path / "nothing", short_runs.build())
    with pytest.raises(ArtifactError, match=r"holds no run\.json"):
        dllp.load(tmp_path, short_runs.build())


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
    network = short_runs.build()
    assert isinstance(network, nn.Sequential)
    change(network)
    with pytest.raises(ArtifactError, match=words) as caught:
        dllp.load(saved_run[1], network)
    assert "reference-0.safetensors" in str(caught.value)
