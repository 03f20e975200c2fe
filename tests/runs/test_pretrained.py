"""Trained weights to start from: read without running anything, checked before a single number is taken."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import dllp
from dllp import files
from dllp.cli.main import main
from dllp.errors import ArtifactError, ConfigError
from dllp.runs import pretrained
from dllp.runs.settings import Task
from dllp.zoo import build
from tests.support.commands import FAST, one_line


def network(classes: int = 3) -> nn.Module:
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *end)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["safetensors", "pt", "wrapped", "parallel", "half", "without counters"])
def test_every_usual_kind_of_file_is_taken(tmp_path: Path, kind: str) -> None:
    trained, found = state(network()), network()
    path = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.pt")
    stored: Any = trained
    if kind == "wrapped":
        stored = {"epoch": 3, "state_dict": trained}
    elif kind == "parallel":
        stored = {f"module.{name}": value for name, value in trained.items()}
    elif kind == "half":
        trained = {n: v.half().float() if v.is_floating_point() else v for n, v in trained.items()}
        stored = {n: v.half() if v.is_floating_point() else v for n, v in trained.items()}
    elif kind == "without counters":
        stored = {n: v for n, v in trained.items() if "num_batches" not in n}
    save_file(stored, path) if kind == "safetensors" else torch.save(stored, path)
    assert pretrained.start(found, path) == [] and equal(state(found), trained)


def test_a_head_for_other_classes_starts_new(tmp_path: Path) -> None:
    save_file(state(network(1000)), tmp_path / "a.safetensors")
    found = network(3)
    before = state(found)
    assert "5.weight, 5.bias" in pretrained.start(found, tmp_path / "a.safetensors")[0]
    after = state(found)
    assert torch.equal(after["5.weight"], before["5.weight"]) and not torch.equal(after["0.weight"], before["0.weight"])


def test_resnet50_knows_its_usual_names() -> None:
    with torch.device("meta"):
        names = list(build("resnet50", 10).state_dict())
    stages = [f"layer{s}.{b}." for s, count in enumerate((3, 4, 6, 3), 1) for b in range(count)]
    usual = {}
    for name in names:
        first, _, rest = name.partition(".")
        block, _, inner = rest.partition(".")
        if first == "blocks":
            usual[name] = stages[int(block)] + inner.replace("shortcut", "downsample")
        else:
            usual[name] = {"conv": "conv1", "bn": "bn1", "classifier": "fc"}[first] + "." + rest
    with torch.device("meta"):
        rename = build("resnet50", 10).usual_name
    assert all(rename(known) == name for name, known in usual.items())
    assert rename("layer9.0.x") == "layer9.0.x"


def damage(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = state(network())
    if kind == "shape":
        found["0.weight"] = torch.zeros(4, 1, 5, 5)
    elif kind == "missing":
        del found["1.running_var"]
    elif kind == "extra":
        found["other"] = torch.zeros(1)
    elif kind == "nan":
        found["0.bias"][1] = torch.nan
    elif kind == "integers":
        found["0.bias"] = torch.zeros(4, dtype=torch.int64)
    elif kind == "words":
        found["0.bias"] = "four"
    return found


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"needs '0.weight' of shape \(4, 1, 3, 3\), but it is \(4, 1, 5, 5\)"),
        ("missing", "needs '1.running_var' .* but it is not there"),
        ("extra", "has a tensor 'other' that the network lacks"),
        ("nan", "'0.bias' holds numbers that are not finite"),
        ("integers", "'0.bias' is torch.int64"),
        ("words", "holds no names and tensors"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, kind: str, message: str) -> None:
    torch.save(damage(kind), tmp_path / "a.pt")
    found = network()
    before = state(found)
    with pytest.raises(ArtifactError, match=message) as caught:
        pretrained.start(found, tmp_path / "a.pt")
    assert equal(state(found), before) and "\n" not in str(caught.value)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("trapped", "w")


def test_files_of_strangers_run_nothing_and_take_no_more_than_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"

    def refused(message: str) -> None:
        with pytest.raises(ArtifactError, match=message) as caught:
            pretrained.read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    refused("is no file")
    alone = r"a.pt cannot be read as weights alone: .* save model.state_dict\(\), best as .safetensors$"
    torch.save({"0.weight": Trap()}, path)
    refused(alone)
    torch.save(network(), path)
    refused(alone)
    path.write_bytes(pickle.dumps(Trap()))
    refused(alone)
    torch.save(state(network()), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(alone)
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    refused(alone)
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"garbage" if name.endswith(".pkl") else old.read(name))
    refused(alone)
    path.write_bytes(whole)
    monkeypatch.setenv(files.CAP_VARIABLE, "100")
    refused("more than the 100")
    assert not (tmp_path / "trapped").exists()


def test_a_run_starts_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    trained = build("small_cnn", 10, 1, image_size=8)
    save_file(state(trained), "trained.safetensors")
    words = ["prune", *FAST, "--out", "run", "--init", "trained.safetensors"]
    assert main([*words, "--lr", "1e-9", "--lr-end", "0", "--prior", "gaussian"]) == 0  # without a spike
    assert "schedule for trained weights, the network as it was as its teacher" in capsys.readouterr().out
    settings = yaml.safe_load(Path("run/config.yaml").read_text())
    assert settings["weights"] == str(tmp_path / "trained.safetensors") and settings["init"] == "given"
    assert settings["discrete_at"] == dllp.Config.short().discrete_at and settings["batch_size"] == 128
    assert equal(load_file("run/dense.safetensors"), state(trained)), "compared with the network as it was given"
    first = load_file("run/reference-0.safetensors")
    assert all(torch.allclose(first[n], v, atol=1e-6) for n, v in trained.named_parameters() if "weight" in n)
    capsys.readouterr()
    assert main([*words, "--overwrite", "--init=absent.pt"]) == 2
    one_line(capsys, "absent.pt is no file")
    assert main(["prune", *FAST, "--init", "trained"]) == 2
    one_line(capsys, "init = trained: expected given")


def test_a_new_head_is_compared_with_a_trained_network(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(state(build("small_cnn", 7, 1, image_size=8)), "other.safetensors")
    assert main(["prune", *FAST, "--quiet", "--out", "run", "--init", "other.safetensors"]) == 0
    assert "starts new" in capsys.readouterr().err
    assert yaml.safe_load(Path("run/config.yaml").read_text())["teacher"] == "off", "a new head teaches nothing"
    lines = Path("run/log.jsonl").read_text()
    assert '"training": "dense"' in lines


def test_contradictions() -> None:
    with pytest.raises(ConfigError, match="init = fresh would throw them away"):
        Task(weights="a.pt").config({"init": "fresh"})
    with pytest.raises(ConfigError, match="preset = short starts from trained weights"):
        Task(preset="short").config({})
    assert Task(weights="a.pt", preset="paper").config({}).init == "given"
    assert Task(model="nets:trained", preset="short").config({"epochs": 5}).epochs == 5
    short, usual = dllp.Config.short(keep_flops=0.5), dllp.Config().resolved()
    assert short.discrete_at < usual.discrete_at and short.open_until < usual.open_until
    assert (short.init, short.teacher) == ("given", "given")


def test_given_weights_choose_their_schedule() -> None:
    assert Task(weights="a.pt").config({}) == dllp.Config.short()
    long = Task(weights="a.pt", preset="default").config({})
    assert long.resolved() == dllp.Config(init="given", epochs=30).resolved()  # digits
    assert Task(weights="a.pt", method="fpgm").config({}).resolved().teacher == "off"
    with pytest.raises(ConfigError, match="teacher = given needs a trained network: give --init FILE"):
        Task().config({"teacher": "given"})
    assert Task(method="fpgm").config({"teacher": "given"}).teacher == "given"  # its own trained network teaches
