"""`dllp evaluate`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dllp
from dllp.cli.main import main
from dllp.zoo import build
from tests.support.commands import FAST, npy, one_line

Capture = pytest.CaptureFixture[str]


def test_the_command_prints_what_prune_measured(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(run), "--json", str(tmp_path / "a.json")]) == 0
    assert "all particles" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads((run / "evaluation.json").read_text())


def test_evaluate_corruptions_on_a_subset(run: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["--corrupt", "gaussian-blur:1,2", "sharpen", "gaussian-blur:1", "noise:0.1", "--subset", "0.5", "--json"]
    assert main(["evaluate", str(run), *words, str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "180 test examples" in out and "gaussian-blur:2" in out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["data"] for row in rows[::4]] == ["clean", "gaussian-blur:1", "gaussian-blur:2", "sharpen", "noise:0.1"]


def test_the_command_looks_elsewhere(tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "run")
    assert main(["prune", *FAST, "--leave-out", "8,9", "--no-dense", "--out", out, "--quiet"]) == 0
    words = ["--ood", "noise", "left-out", "--references", "--gate-draws", "2", "--corrupt", "sharpen"]
    assert main(["evaluate", out, *words, "--json", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("AUROC", "left-out", "estimation efficiency", "all references", "drawn"))
    report = json.loads((tmp_path / "a.json").read_text())
    assert {row["data"] for row in report["rows"]} == {"clean", "sharpen", "ood:noise", "ood:left-out"}
    assert [entry["data"] for entry in report["efficiency"]] == ["clean", "sharpen"] and report["curves"]
    assert dllp.load(out, build("small_cnn", 8, 1)).info["data"]["classes"] == list("01234567")


def test_bad_evaluations_are_one_line(run: Path, nets: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    shutil.copytree(run, "without")
    Path("without/particle-1.safetensors").unlink()
    y = np.arange(20)
    npy(tmp_path / "rows", np.zeros((20, 7), np.float32), y % 10)
    npy(tmp_path / "few", np.zeros((20, 8, 8), np.uint8), y % 3)
    for words, text in (
        ("--ood fog", "unknown out-of-distribution data 'fog'"),
        ("--ood digits", "the data of the evaluation itself"),
        ("--ood left-out", "left no class out"),
        ("--ood empty", "holds no image"),
        ("--corrupt fog:1", "unknown corruption 'fog:1'"),
        ("--subset 0", "subset = 0: a share of the examples in (0, 1]"),
        ("--subset 2", "subset = 2: a share of the examples in (0, 1]"),
        ("--subset 1e-9", "is empty: give a larger fraction"),
        ("--gate-draws 0", "gate_draws = 0: a whole number is needed, at least 1"),
        ("--data rows", "inputs of shape (7,), but the run was trained on (1, 8, 8): give data of that shape"),
        ("--data few", "other classes"),
        ("--data nowhere", "nowhere"),
        ("--model mlp", "another network"),
        ("--device cuda:99", "cuda:99"),
        ("--json file/a.json", "a.json: Not a directory"),
    ):
        assert main(["evaluate", str(run), "--json", "no.json", *words.split()]) == 2, words
        one_line(capsys, "error: ", text)
    for folder, text in (("empty", "not the folder of a finished run"), ("without", "particle-1.safetensors")):
        assert main(["evaluate", folder]) == 2
        one_line(capsys, text)
    assert not Path("no.json").exists()


def test_the_own_data_is_known_by_any_path(
    own_photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--epochs", "1", "--image-size", "8", "--keep-flops", "0.5", "--no-dense", "--quiet", "--out", "run"]
    assert main(["prune", "--data", own_photographs.name, "--augment", "none", *words]) == 0
    capsys.readouterr()
    (tmp_path / "link").symlink_to(own_photographs)
    for name in (f"./{own_photographs.name}", "link"):
        assert main(["evaluate", "run", "--ood", name]) == 2
        one_line(capsys, f"--ood {name}: that is the data of the evaluation itself")


def test_the_own_data_is_evaluated_as_in_the_run_however_its_folder_is_called(
    own_photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--image-size", "8", "--validation", "0.25", "--augment", "none", "--no-dense"]
    words += ["--epochs", "1", "--keep-flops", "0.5", "--quiet", "--out", "run"]
    assert main(["prune", "--data", own_photographs.name, *words]) == 0
    assert main(["evaluate", "run", "--data", own_photographs.name, "--json", "a.json"]) == 0
    stored, again = (json.loads(Path(name).read_text()) for name in ("run/evaluation.json", "a.json"))
    assert again["rows"] == stored["rows"] and again["split"] == "validation"
    capsys.readouterr()
    assert main(["evaluate", "run", "--image-size", "12", "--corrupt", "sharpen"]) == 2
    one_line(capsys, "inputs of shape (3, 12, 12), but the run was trained on (3, 8, 8)")
    assert not Path("run/corruptions.json").exists()


def test_folders_elsewhere_may_have_any_name_and_images_of_any_size(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("flat [/b]", "set [red]/train/a", "set [red]/test/a"):
        Path(place).mkdir(parents=True)
        for side in (9, 12):
            Image.new("RGB", (side, 10)).save(Path(place, f"{side}.png"))
    assert main(["evaluate", str(run), "--ood", "flat [/b]", "set [red]"]) == 0
    shown = capsys.readouterr().out
    assert "flat [/b]" in shown and "set [red]" in shown and "by the entropy" in shown


def test_a_given_network_of_a_regression_says_nothing_of_inputs_from_elsewhere(nets: str, capsys: Capture) -> None:
    x = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    data, model = npy(Path("data"), x, np.stack([x.sum(1)] * 7, 1)), f"{nets}:wide"
    words = ["--data", str(data), "--model", model, "--epochs", "1", "--keep-flops", "0.5", "--particles", "2"]
    words += ["--quiet", "--out", "run"]
    assert main(["prune", *words]) == 0
    assert main(["evaluate", "run", "--model", model, "--ood", "noise", "--json", "a.json"]) == 0
    shown = capsys.readouterr().out
    assert "by the variance" in shown and "information" not in shown
    rows = [row for row in json.loads(Path("a.json").read_text())["rows"] if row["data"] == "ood:noise"]
    known = [sorted(row["metrics"]) for row in rows]
    assert known == [[], *[["auroc", "fpr95"]] * 3]


def test_classes_that_are_not_there_cannot_be_left_out(tmp_path: Path, capsys: Capture) -> None:
    assert main(["prune", *FAST, "--leave-out", "ten", "--out", str(tmp_path / "run")]) == 2
    one_line(capsys, "no class 'ten'")
    assert not (tmp_path / "run").exists()


def test_other_data_is_normalised_as_in_training(run: Path, nets: str, tmp_path: Path, capsys: Capture) -> None:
    test = dllp.data.load("digits").test
    npy(tmp_path / "same", test.x[:, 0].numpy(), test.y.numpy())
    assert main(["evaluate", str(run), "--data", "same", "--json", "a.json"]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert rows == json.loads((run / "evaluation.json").read_text())["rows"]


def test_code_named_by_a_run_is_not_imported_silently(nets: str, tmp_path: Path, capsys: Capture) -> None:
    model = f"{nets}:small"
    assert main(["prune", "--model", model, *FAST, "--particles", "1", "--out", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "run"]) == 2
    one_line(capsys, model, "--model", "--trust-imports")
    assert main(["evaluate", "run", "--model", model]) == 0
    assert main(["evaluate", "run"]) == 2  # naming it once is not trusting the folder
    assert main(["evaluate", "run", "--trust-imports"]) == 0
    assert main(["evaluate", "run"]) == 0  # which is remembered, for this folder and this code alone
    shutil.copytree("run", "other")
    settings = tmp_path / "run" / "config.yaml"
    settings.write_text(settings.read_text().replace(model, f"{nets}:linear"))
    capsys.readouterr()
    for folder, code in (("other", model), ("run", f"{nets}:linear")):
        assert main(["evaluate", folder]) == 2
        one_line(capsys, code, "--trust-imports")
    place = tmp_path / "settings" / "dllp" / "trusted.json"
    place.write_text("{")  # a damaged file trusts nothing
    assert main(["evaluate", "run"]) == 2


def test_a_run_saved_from_python_needs_names(tmp_path: Path, capsys: Capture) -> None:
    config = dllp.Config(keep_flops=0.5, epochs=1, particles=1, device="cpu")
    dllp.prune(build("small_cnn", 10, 1), "digits", config).save(tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    one_line(capsys, "--data")
    assert main(["evaluate", str(tmp_path / "run"), "--data", "digits", "--model", "small_cnn"]) == 0
