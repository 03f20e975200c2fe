"""Other methods on the command line: by name, stopped and resumed, and listed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dllp.baselines import DYNAMIC, METHODS, run
from dllp.cli.main import main
from tests.support.commands import npy, one_line


def test_a_run_of_another_method_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ["--method", "magnitude-l1", "--keep-params", "0.3", "--epochs", "2", "--finetune-epochs", "1"]
    assert main(["prune", *words, "--batch-size", "256", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if "%" in line]
    assert len(table) == 3 and "before fine-tuning" in shown and "…" not in shown and max(map(len, table)) <= 80
    rows = json.loads((out / "evaluation.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["dense", "before fine-tuning", "particle 1"]
    assert rows[1]["params"] == rows[2]["params"] <= 0.3 * rows[0]["params"]
    stored = json.loads((out / "run.json").read_text())
    assert stored["info"]["method"] == "magnitude-l1" and stored["config"]["granularity"] == "weight"
    assert main(["analyze", str(out), "--json", str(tmp_path / "shapes.json")]) == 0
    whole = json.loads((tmp_path / "shapes.json").read_text())["whole"]
    assert whole["kept"]["near_zero"] < whole["before"]["near_zero"]
    capsys.readouterr()
    for options, words in (
        (["--method", "sfp", "--particles", "2", "--keep-flops", "0.5"], ["method sfp has particles = 1"]),
        (["--method", "sfp", "--granularity", "weight", "--keep-flops", "0.5"], ["granularity = channel"]),
        (["--method", "sfp"], ["sfp needs a budget"]),
        (["--method", "sfp", "--keep-flops", "0.0001"], ["cannot be reached", "method magnitude-l2"]),
        (["--finetune-epochs", "2"], ["finetune_epochs is for other methods"]),
        (["--method", "fbs", "--keep-flops", "0.5"], ["fbs chooses channels for each image", "dllp bench table2"]),
        (["--method", "dense", "--keep-latency", "0.5"], ["dense removes nothing: leave out keep_latency"]),
        (["--method", "nothing"], ["there is no method 'nothing'"]),
        (["--method", "dllp:beta=2"], ["dllp has no hyperparameters behind its name", "as options"]),
        (["--method", "slimming:t=2"], ["method slimming has no hyperparameter 't': it has strength"]),
        (["--method", "fpgm:strength=2"], ["method fpgm has no hyperparameter 'strength': it has begin"]),
        (["--method", "random:strength=2"], ["method random has no hyperparameter 'strength': it has none"]),
        (["--method", "polarization:t=much"], ["t = 'much': a number is needed, such as polarization:t=1.2"]),
        (["--method", "sss:strength=-1"], ["strength = -1.0"]),
        *((["--method", f"{name}:images=0"], ["images = 0.0: a number from 1 to"]) for name in ("ccp", "dcp", "amc")),
        (["--method", "slimming", "--keep-flops", "0.5", "--prior", "laplace"], ["prior = laplace", "leave out prior"]),
    ):
        assert main(["prune", *options, "--out", str(tmp_path / "none")]) == 2
        one_line(capsys, *words)
    assert not (tmp_path / "none").exists()


def test_a_fine_tuned_network_keeps_its_own_noise(tmp_path: Path) -> None:
    """A regression's likelihood: when the folder is read again, it is what the run itself has measured."""
    x = np.random.default_rng(0).standard_normal((64, 1, 8, 8)).astype(np.float32)
    data, out = npy(tmp_path / "data", x, x.sum((1, 2, 3)) / 8), str(tmp_path / "run")
    words = ["--method", "fpgm", "--keep-flops", "0.5", "--epochs", "1", "--finetune-epochs", "2", "--quiet"]
    assert main(["prune", "--data", str(data), *words, "--out", out]) == 0
    assert main(["evaluate", out, "--json", str(tmp_path / "again.json")]) == 0
    found = [json.loads(path.read_text())["rows"] for path in (Path(out, "evaluation.json"), tmp_path / "again.json")]
    dense, cut, tuned = found[0]
    assert found[1] == [dense, tuned] and cut["metrics"]["nll"] != tuned["metrics"]["nll"]


def test_a_stopped_run_of_another_method_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = "magnitude-l1:strength=2e-5"
    words = ["--method", method, "--keep-params", "0.3", "--epochs", "2", "--finetune-epochs", "1", "--quiet"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(["prune", *words, "--out", str(whole)]) == 0

    def broken(*args: object, **rest: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(run, "masked", lambda masks: broken)
        assert main(["prune", *words, "--out", str(stopped)]) == 2
    assert not (stopped / "run.json").exists()
    assert main(["prune", "--resume", "--out", str(stopped), "--quiet"]) == 0
    for name in ("particle-0.safetensors", "reference-0.safetensors", "gates.safetensors"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()
    assert json.loads((whole / "run.json").read_text())["config"]["weight_decay"] == 0
    assert main(["evaluate", str(whole)]) == 0


def test_methods_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json", str(tmp_path / "list.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dllp ") and any("2019" in line for line in lines)
    listed = json.loads((tmp_path / "list.json").read_text())
    names = ["dllp", *METHODS, *DYNAMIC]
    assert [entry["name"] for entry in listed] == [line.split()[0] for line in lines] == names and len(names) == 19
    assert [line.split()[0] for line in lines if "channels by image: dllp bench only" in line] == [*DYNAMIC]
    assert {"strength": 3e-4, "least": 0.05, "t": 1.2} in [entry["hyperparameters"] for entry in listed]
    assert any("strength 0.0003; least 0.05; t 1.2" in line for line in lines)
