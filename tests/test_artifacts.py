"""Run folders: whole or not at all, readable without pickle, honest about damage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dllp
from dllp import ArtifactError, Config, artifacts

NETS = """
import torch
from torch import nn

def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )
"""
FRESH = """
import io, pickle, sys

def refuse(*args, **kwargs):
    raise AssertionError("pickle was used")

import torch, dllp
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


def build() -> nn.Module:
    space: dict[str, Any] = {}
    exec(NETS, space)  # noqa: S102
    return space["network"]()


def data() -> tuple[Tensor, Tensor]:
    y = torch.arange(48) % 3
    return torch.randn(48, 1, 7, 7) + 0.7 * y.view(-1, 1, 1, 1), y


def pruned(granularity: Any, **changes: Any) -> dllp.Result:
    torch.manual_seed(0)
    values = dict(
        granularity=granularity, keep_flops=0.3, epochs=4, batch_size=16, lr_gates=0.3, device="cpu", warmup=0
    )
    return dllp.prune(build(), data(), Config(**(values | changes)))


@pytest.fixture(scope="module", params=["channel", "weight"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dllp.Result, Path]:
    result = pruned(request.param)
    return result, result.save(tmp_path_factory.mktemp("run") / request.param)


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# ---- round trips


def test_a_loaded_run_is_the_saved_one(run: tuple[dllp.Result, Path]) -> None:
    result, folder = run
    network = build()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    loaded = dllp.load(folder, network)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    for a, b in zip(result.slabs, loaded.slabs, strict=True):
        assert same(a.network, b.network) and same(a.reference, b.reference)
        assert a.recipe == b.recipe and a.gated == b.gated
        assert a.keep is not None and b.keep is not None and torch.equal(a.keep, b.keep)
    for name in ("config", "history", "dense", "sizes", "widths", "whole", "info"):
        assert getattr(loaded, name) == getattr(result, name)
    assert all(torch.equal(result.gates[k], loaded.gates[k]) for k in result.gates)
    x = data()[0]
    assert torch.equal(result.posterior.members(x), loaded.posterior.members(x))
    assert not any(module.training for module in loaded.model.modules())


def test_a_fresh_process_without_pickle_gives_equal_bits(run: tuple[dllp.Result, Path], tmp_path: Path) -> None:
    result, folder = run
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS))
    x = data()[0]
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


def test_the_folder_holds_what_the_format_says(run: tuple[dllp.Result, Path]) -> None:
    _, folder = run
    files = {
        "run.json",
        "gates.safetensors",
        *(f"{n}-{i}.safetensors" for n in ("particle", "reference") for i in (0, 1)),
    }
    assert {path.name for path in folder.iterdir()} == files
    values = json.loads((folder / "run.json").read_text())
    assert values["format"] == artifacts.FORMAT
    assert Config.from_dict(values["config"]).keep_flops == 0.3


def test_pruned_networks_are_smaller_on_disk(run: tuple[dllp.Result, Path]) -> None:
    """Channels are cut; single weights are stored sparse."""
    result, folder = run
    sizes = [artifacts.network_bytes(folder, i) for i in range(2)]
    reference = (folder / "reference-0.safetensors").stat().st_size
    assert all(size < reference for size in sizes)
    stored = load_file(folder / "particle-0.safetensors")
    gated = result.slabs[0].gated
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
    assert same(network, other) and other.a.weight is other.b.weight


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_sparse_tensors_come_back(tmp_path: Path, sparsity: float) -> None:
    network, other = nn.Linear(7, 5), nn.Linear(7, 5)
    with torch.no_grad():
        network.weight[torch.rand(5, 7) < sparsity] = 0
    artifacts.write_network(tmp_path / "net.safetensors", network, ("weight",))
    artifacts.read_network(tmp_path / "net.safetensors", other)
    assert same(network, other)


# ---- writing


def full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(artifacts.os, name, full)
    with pytest.raises(ArtifactError, match=r"cannot write .*new\.json: No space left on device"):
        artifacts.write_json(tmp_path / "new.json", {"a": 1})
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    artifacts.write_json(path, {"a": 1})
    monkeypatch.setattr(artifacts.os, "fsync", full)
    with pytest.raises(ArtifactError):
        artifacts.write_json(path, {"a": 2})
    assert artifacts.read_json(path) == {"a": 1} and len(list(tmp_path.iterdir())) == 1


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, calls, write = pruned("channel", epochs=1), [], artifacts.write_bytes

    def third(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise ArtifactError(f"cannot write {path}: full")
        write(path, content)

    monkeypatch.setattr(artifacts, "write_bytes", third)
    with pytest.raises(ArtifactError, match="full"):
        result.save(tmp_path / "deep" / "run")
    assert len(calls) == 3 and not list(tmp_path.iterdir())


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write"):
        artifacts.write_json(tmp_path / "file" / "run.json", {})


def test_save_refuses_a_folder_with_another_run(run: tuple[dllp.Result, Path]) -> None:
    result, folder = run
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ArtifactError, match="already holds a run"):
        result.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_save_replaces_a_run_when_asked_and_nothing_else(run: tuple[dllp.Result, Path], tmp_path: Path) -> None:
    result, folder = run
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    (old / "extra.txt").write_text("part of the old run")
    assert result.save(old, overwrite=True) == old
    assert {path.name for path in old.iterdir()} == {path.name for path in folder.iterdir()}
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="holds other files"):
        result.save(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "thesis.tex"]


def test_values_that_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        artifacts.write_json(tmp_path / "nan.json", float("nan"))
    assert not list(tmp_path.iterdir())


# ---- reading what others, or a failing disk, have left


@pytest.fixture
def folder(run: tuple[dllp.Result, Path], tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(run[1], tmp_path / "copy"))


SAFETENSORS = ["gates.safetensors", "particle-0.safetensors", "reference-1.safetensors"]


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
        dllp.load(folder, build())
    message = str(caught.value)
    assert "\n" not in message and (name in message if damage != "missing" or name != "run.json" else True)
    assert str(folder) in message


@pytest.mark.parametrize("value", [None, 3, [], "text", {}, {"format": 99}])
def test_a_run_of_another_format(folder: Path, value: Any) -> None:
    (folder / "run.json").write_text(json.dumps(value))
    with pytest.raises(ArtifactError, match=r"run\.json is not of format"):
        dllp.load(folder, build())


@pytest.mark.parametrize(
    "field", ["config", "recipes", "gated", "dense", "sizes", "widths", "whole", "history", "info"]
)
def test_a_missing_field_is_an_error(folder: Path, field: str) -> None:
    values = json.loads((folder / "run.json").read_text())
    del values[field]
    (folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=r"run\.json"):
        dllp.load(folder, build())


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
    ],
)
def test_fields_of_the_wrong_kind_are_errors_of_the_run(folder: Path, field: str, value: Any) -> None:
    values = json.loads((folder / "run.json").read_text())
    values[field] = value
    (folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=r"run\.json"):
        dllp.load(folder, build())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not a folder"):
        dllp.load(tmp_path / "nothing", build())
    with pytest.raises(ArtifactError, match=r"holds no run\.json"):
        dllp.load(tmp_path, build())


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
    run: tuple[dllp.Result, Path], change: Callable[[nn.Sequential], object], words: str
) -> None:
    network = build()
    assert isinstance(network, nn.Sequential)
    change(network)
    with pytest.raises(ArtifactError, match=words) as caught:
        dllp.load(run[1], network)
    assert "reference-0.safetensors" in str(caught.value)


@pytest.mark.parametrize("index", [torch.tensor([-1, 0]), torch.tensor([0, 99]), torch.tensor([0]), torch.zeros(2)])
def test_positions_that_do_not_fit(tmp_path: Path, index: Tensor) -> None:
    path = tmp_path / "net.safetensors"
    index = index.to(torch.int32) if not index.is_floating_point() else index
    save_file({"weight#index": index, "weight#value": torch.ones(2), "bias": torch.zeros(2)}, path)
    with pytest.raises(ArtifactError, match=r"net\.safetensors: the positions of 'weight' do not fit"):
        artifacts.read_network(path, nn.Linear(3, 2))
