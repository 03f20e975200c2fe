"""Run folders come back as they were saved, in any process and without pickle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dllp
from dllp import Config
from dllp.runs import artifacts
from tests.support import saved
from tests.support.short_runs import pictures

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
    network = saved.build()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    loaded = dllp.load(folder, network)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    for a, b in zip(result.particles, loaded.particles, strict=True):
        assert saved.same(a.network, b.network) and saved.same(a.reference, b.reference)
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
    (tmp_path / "nets.py").write_text(textwrap.dedent(saved.NETS))
    x = pictures()[0]
    save_file({"x": x}, tmp_path / "x.safetensors")
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        FRESH,
        folder,
        tmp_path / "x.safetensors",
        tmp_path / "out.safetensors",
    ]
    root = str(Path(dllp.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    subprocess.run([str(c) for c in command], check=True, env=environment, cwd=tmp_path)
    out = load_file(tmp_path / "out.safetensors")
    with torch.no_grad():
        assert torch.equal(out["members"], result.posterior.members(x))
        assert torch.equal(out["model"], result.model(x)) and torch.equal(out["reference"], result.reference(x))


def test_the_folder_holds_what_the_format_says(saved_run: tuple[dllp.Result, Path]) -> None:
    _, folder = saved_run
    files = {
        "run.json",
        "gates.safetensors",
        *(f"{n}-{i}.safetensors" for n in ("particle", "reference") for i in (0, 1)),
    }
    assert {path.name for path in folder.iterdir()} == files
    values = json.loads((folder / "run.json").read_text())
    assert values["format"] == artifacts.FORMAT
    assert Config.from_dict(values["config"]).keep_flops == 0.3


def test_pruned_networks_are_smaller_on_disk(saved_run: tuple[dllp.Result, Path]) -> None:
    """Channels are cut; single weights are stored sparse."""
    result, folder = saved_run
    sizes = [artifacts.network_bytes(folder, i) for i in range(2)]
    reference = (folder / "reference-0.safetensors").stat().st_size
    assert all(size < reference for size in sizes)
    stored = load_file(folder / "particle-0.safetensors")
    gated = result.particles[0].gated
    assert {name for name in stored if "#" in name} == {f"{n}{end}" for n in gated for end in ("#index", "#value")}
    for name in gated:
        weight = result.model.get_parameter(name)
        assert len(stored[f"{name}#value"]) == int((weight != 0).sum()) < weight.numel()
        assert (stored[f"{name}#value"] != 0).all()


def test_tied_weights_and_odd_layouts_survive(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    network = Tied()
    artifacts.write_network(tmp_path / "net.safetensors", network)
    other = Tied()
    artifacts.read_network(tmp_path / "net.safetensors", other)
    assert saved.same(network, other) and other.a.weight is other.b.weight


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_sparse_tensors_come_back(tmp_path: Path, sparsity: float) -> None:
    network, other = nn.Linear(7, 5), nn.Linear(7, 5)
    with torch.no_grad():
        network.weight[torch.rand(5, 7) < sparsity] = 0
    artifacts.write_network(tmp_path / "net.safetensors", network, ("weight",))
    artifacts.read_network(tmp_path / "net.safetensors", other)
    assert saved.same(network, other)


def test_the_way_out_of_an_unfinished_run_is_a_command_as_a_shell_takes_it(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    (folder / "checkpoints").mkdir(parents=True)
    with pytest.raises(dllp.ArtifactError, match=f"dllp prune --resume --out '{folder}'"):
        artifacts.read_run(folder)
