"""The command line end to end: runs, their folders, and one line for every mistake."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

import dllp
from dllp import options, progress
from dllp.cli import main
from dllp.task import new_folder
from dllp.zoo import build

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(dllp.__file__).parents[1])}
"""For processes: the package as it is tested here, installed or not."""
FAST = ("--epochs", "2", "--batch-size", "128", "--keep-flops", "0.3")
NETS = """
import torch
from torch import nn

def small():
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *end)

def large():
    return nn.Sequential(nn.Conv2d(1, 8, 11), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))

def text():
    return "no network"

def broken():
    raise ValueError("first line\\nsecond line")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "runs" / "first"
    assert main(["prune", *FAST, "--out", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with networks of the user's own."""
    monkeypatch.chdir(tmp_path)
    name = f"nets_{abs(hash(tmp_path.name))}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def nets(here: Path) -> str:
    return next(here.glob("nets_*.py")).stem


def npy(folder: Path, x: np.ndarray, y: np.ndarray) -> Path:
    folder.mkdir()
    for part in ("train", "test"):
        np.save(folder / f"{part}_x.npy", x)
        np.save(folder / f"{part}_y.npy", y)
    return folder


def one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    error = capsys.readouterr().err
    assert error.startswith("dllp: ") and error.endswith("\n") and error.count("\n") == 1, error
    for word in words:
        assert word in error, error
    return error


# ---- runs


def test_run_folder_holds_everything(run: Path) -> None:
    networks = {f"{kind}-{i}.safetensors" for kind in ("particle", "reference") for i in (0, 1)}
    other = {"config.yaml", "log.jsonl", "run.json", "gates.safetensors", "dense.safetensors", "evaluation.json"}
    assert {path.name for path in run.iterdir()} == networks | other
    assert [path.name for path in run.parent.iterdir()] == ["first"]
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [(line["training"], line["epoch"]) for line in log] == [
        ("pruned", 1), ("pruned", 2), ("dense", 1), ("dense", 2),
    ]  # fmt: skip
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert set(settings) == {*options.TASK, *dllp.Config().as_dict()}
    assert settings["model"] == "small_cnn" and settings["init"] == "fresh" and settings["keep_flops"] == 0.3
    report = json.loads((run / "evaluation.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["dense", "particle 1", "particle 2", "all particles"]
    assert report["rows"][1]["bytes"] == (run / "particle-0.safetensors").stat().st_size
    assert report["rows"][1]["macs"] <= 0.3 * report["rows"][0]["macs"]


def test_settings_file_makes_the_same_run(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert main(["prune", "--config", str(run / "config.yaml"), "--out", str(again), "--quiet"]) == 0
    for path in run.glob("*.safetensors"):
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    assert (run / "config.yaml").read_text() == (again / "config.yaml").read_text()


def test_options_win_over_the_settings_file(run: Path, tmp_path: Path) -> None:
    words = ["--config", str(run / "config.yaml"), "--out", str(tmp_path / "a"), "--epochs=1", "--batch_size", "512"]
    assert main(["prune", *words, "--no-dense", "--quiet"]) == 0
    settings = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert (settings["epochs"], settings["batch_size"], settings["keep_flops"]) == (1, 512, 0.3)
    assert not settings["dense"] and not (tmp_path / "a" / "dense.safetensors").exists()


def test_paper_preset_brings_its_own_recipe(tmp_path: Path) -> None:
    words = ["--preset", "paper", "--epochs", "1", "--keep-flops", "0.5", "--no-dense", "--quiet"]
    assert main(["prune", *words, "--out", str(tmp_path / "a")]) == 0
    settings = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert settings["batch_size"] == 512 and settings["likelihood"] == "gaussian" and settings["epochs"] == 1


def test_plain_lines_and_the_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "--model", f"{nets(here)}:small", *FAST, "--validation", "200", "--particles", "1"]) == 0
    out, error = capsys.readouterr()
    assert not error
    assert out.startswith("pruned epoch 1/2 ") and "(target 0.3)" in out
    assert "dense epoch" not in out and "│ dense" in out, "a given network is evaluated, not trained"
    assert "200 validation examples" in out and out.endswith("run folder: runs/last\n")
    settings = yaml.safe_load(Path("runs/last/config.yaml").read_text())
    assert settings["validation"] == 200 and settings["init"] == "given"
    assert main(["evaluate", "runs/last", "--trust-imports"]) == 0
    assert "200 validation examples" in capsys.readouterr().out


def test_regression_from_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(80, 5)).astype(np.float32)
    data = npy(tmp_path / "table", x, x[:, :1] * 2)
    words = ["--data", str(data), "--model", "mlp", "--epochs", "2", "--lr", "0.01", "--keep-flops", "0.5"]
    assert main(["prune", *words, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["task"] == "regression"
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "RMSE" in capsys.readouterr().out


def test_weight_granularity_is_stored_sparse(tmp_path: Path) -> None:
    words = ["--granularity", "weight", "--keep-params", "0.2", "--epochs", "2", "--no-dense", "--quiet"]
    assert main(["prune", *words, "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/particle-0.safetensors").stat().st_size < 0.5 * os.path.getsize(
        tmp_path / "run/reference-0.safetensors"
    )


# ---- the folder


def test_another_run_is_replaced_only_when_asked(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    short = ["prune", "--epochs", "1", "--particles", "1", "--no-dense", "--quiet", "--out", str(out)]
    out.mkdir()
    assert main([*short, "--seed", "1"]) == 0, "an empty folder is free"
    before = (out / "run.json").read_bytes()
    assert main([*short, "--seed", "2"]) == 2
    one_line(capsys, "already holds a run", "--overwrite")
    assert (out / "run.json").read_bytes() == before
    assert main([*short, "--seed", "2", "--overwrite"]) == 0
    assert (out / "run.json").read_bytes() != before
    assert os.listdir(tmp_path) == ["out"]


def test_other_files_are_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["prune", *FAST, "--out", str(tmp_path), "--overwrite"]) == 2
    one_line(capsys, "holds other files")
    assert main(["prune", *FAST, "--out", str(tmp_path / "thesis.tex"), "--overwrite"]) == 2
    one_line(capsys, "is a file")
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_interrupted_replacement_puts_the_old_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("old")
    rename, calls = os.rename, []

    def interrupted(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "run", overwrite=True):
        pass
    assert (tmp_path / "run" / "run.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["run"]


def test_no_space_when_flushing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["prune", *FAST, "--no-dense", "--quiet", "--out", str(tmp_path / "new" / "run")]) == 2
    one_line(capsys, "No space left on device")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("limit", [100, 20_000])
def test_no_space_in_the_log_or_in_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        code = main(["prune", *FAST, "--no-dense", "--quiet", "--out", str(tmp_path / "run")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    one_line(capsys, "cannot write", "File too large")
    assert os.listdir(tmp_path) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dllp", "prune", "--epochs", "500", "--out", "runs/a"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, text=True, **pipes) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert first.startswith("pruned epoch 1/500"), error
    assert (process.returncode, error) == (130, "dllp: interrupted, nothing was written\n")
    assert os.listdir(tmp_path) == []


# ---- bad input


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", ["command"]),
        ("prone", ["prone", "prune"]),
        ("prune --kep-flops 0.3", ["unknown option --kep-flops", "did you mean --keep-flops"]),
        ("prune surplus", ["surplus"]),
        ("prune --epochs", ["--epochs"]),
        ("prune --epochs many", ["epochs = many", "a whole number"]),
        ("prune --granularity layer", ["granularity = layer", "channel, weight"]),
        ("prune --bandwidth wide", ["bandwidth = wide", "median, paper or a number"]),
        ("prune --keep-flops nan", ["keep_flops = nan"]),
        ("prune --keep-flops 0", ["keep_flops = 0", "(0, 1]"]),
        ("prune --keep-flops 1.5", ["keep_flops = 1.5", "(0, 1]"]),
        ("prune --keep-flops 0.0001", ["0.0001 cannot be reached"]),
        ("prune --particles 0", ["particles = 0"]),
        ("prune --device cuda:99", ["cuda:99", "cpu"]),
        ("prune --model smal_cnn", ["unknown model 'smal_cnn'", "small_cnn"]),
        ("prune --model vgg16_bn", ["vgg16_bn", "8x8"]),
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
        ("prune --validation 5000", ["5000"]),
        ("prune --out file/run", ["file"]),
        ("prune --config missing.yaml", ["missing.yaml"]),
        ("prune --config tag.yaml", ["tag.yaml", "not plain YAML"]),
        ("prune --config list.yaml", ["list.yaml", "no settings"]),
        ("prune --config unknown.yaml", ["unknown.yaml", "'epoch'", "did you mean epochs"]),
        ("prune --config kind.yaml", ["kind.yaml", "epochs = soon", "a whole number"]),
        ("prune --config out.yaml", ["out.yaml", "'out'"]),
        ("evaluate", ["run folder"]),
        ("evaluate nowhere", ["nowhere"]),
    ],
)
def test_bad_input_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], words: str, told: list[str]) -> None:
    (here / "one" / "train" / "only").mkdir(parents=True)
    (here / "one" / "test" / "only").mkdir(parents=True)
    for part in ("train", "test"):
        from PIL import Image

        Image.new("RGB", (8, 8)).save(here / "one" / part / "only" / "a.png")
    x = np.zeros((6, 4), np.float32)
    x[3, 1] = np.nan
    npy(here / "bad", x, np.arange(6) % 2)
    (here / "file").write_text("")
    (here / "tag.yaml").write_text("epochs: !!python/object/apply:os.system ['true']\n")
    (here / "list.yaml").write_text("- epochs\n")
    (here / "unknown.yaml").write_text("epoch: 3\n")
    (here / "kind.yaml").write_text("epochs: soon\n")
    (here / "out.yaml").write_text("out: elsewhere\n")
    before = sorted(os.listdir(here))
    assert main(words.replace("NETS", nets(here)).split()) == 2
    one_line(capsys, "error: ", *told)
    assert sorted(set(os.listdir(here)) - {"__pycache__"}) == before


def test_names_in_files_may_have_dashes_and_exponents(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("keep-flops: 0.5\nlr: 1e-3\nslab-bounds: [1, 2]\ngate-linear: true\n")
    expected = {"keep_flops": 0.5, "lr": 0.001, "slab_bounds": (1.0, 2.0), "gate_linear": True}
    assert options.read(tmp_path / "a.yaml") == expected


@pytest.mark.parametrize("words", [["--help"], ["prune", "--help"], ["evaluate", "--help"], ["--version"]])
def test_help_and_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    out = capsys.readouterr().out
    assert end.value.code == 0 and "dllp" in out
    if words[0] == "prune":
        assert "examples:" in out and "_" not in "".join(w for w in out.split() if w.startswith("--"))
        assert "See --." not in out, "every field of Config is explained in its docstring"
    if words == ["--version"]:
        assert out == f"dllp {dllp.__version__}\n"


# ---- evaluate


def test_evaluate_prints_what_prune_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--json", str(tmp_path / "a.json")]) == 0
    assert "all particles" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads((run / "evaluation.json").read_text())


def test_evaluate_corruptions_on_a_subset(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--corrupt", "gaussian-blur:1,2", "sharpen", "noise:0.1", "--subset", "0.5", "--json"]
    assert main(["evaluate", str(run), *words, str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "180 test examples" in out and "gaussian-blur:2" in out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["data"] for row in rows[::4]] == ["clean", "gaussian-blur:1", "gaussian-blur:2", "sharpen", "noise:0.1"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--corrupt", "fog:1"], ["unknown corruption 'fog'"]),
        (["--subset", "0"], ["subset", "empty"]),
        (["--subset", "2"], ["subset"]),
        (["--data", "wide"], ["(1, 9, 9)", "(1, 8, 8)"]),
        (["--data", "few"], ["other classes"]),
        (["--data", "nowhere"], ["nowhere"]),
        (["--model", "mlp"], ["another network"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--json", "file/a.json"], ["a.json", "Not a directory"]),
    ],
)
def test_evaluate_bad_input(
    run: Path, here: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: list[str]
) -> None:
    y = np.arange(20)
    npy(here / "wide", np.zeros((20, 9, 9), np.uint8), y % 10)
    npy(here / "few", np.zeros((20, 8, 8), np.uint8), y % 3)
    (here / "file").write_text("")
    assert main(["evaluate", str(run), *words]) == 2
    one_line(capsys, "error: ", *told)


def test_other_data_is_normalised_as_in_training(run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = dllp.data.load("digits").test
    npy(here / "same", test.x[:, 0].numpy(), test.y.numpy())
    assert main(["evaluate", str(run), "--data", "same", "--json", "a.json"]) == 0
    rows = json.loads((here / "a.json").read_text())["rows"]
    assert rows == json.loads((run / "evaluation.json").read_text())["rows"]


def test_code_named_by_a_run_is_not_imported_silently(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{nets(here)}:small"
    assert main(["prune", "--model", model, *FAST, "--particles", "1", "--out", "run", "--quiet"]) == 0
    assert main(["evaluate", "run"]) == 2
    one_line(capsys, model, "--model", "--trust-imports")
    assert main(["evaluate", "run", "--model", model]) == 0
    assert main(["evaluate", "run", "--trust-imports"]) == 0


def test_a_run_saved_from_python_needs_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dllp.Config(keep_flops=0.5, epochs=1, particles=1, device="cpu")
    dllp.prune(build("small_cnn", 10, 1), "digits", config).save(tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    one_line(capsys, "--data")
    assert main(["evaluate", str(tmp_path / "run"), "--data", "digits", "--model", "small_cnn"]) == 0


# ---- elsewhere


def python(code: str, cwd: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    result = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_run_loads_elsewhere_without_pickle(run: Path, tmp_path: Path) -> None:
    x = torch.randn(16, 1, 8, 8)
    result = dllp.load(run, build("small_cnn", 10, 1))
    torch.save(x, tmp_path / "x.pt")
    code = """
        import sys, torch
        x = torch.load("x.pt")
        import pickle
        def blocked(*a, **k): raise AssertionError("pickle was used")
        pickle.load = pickle.loads = torch.load = blocked
        pickle.Unpickler = type("Unpickler", (pickle.Unpickler,), {"load": blocked})
        import dllp
        from dllp.zoo import build
        result = dllp.load(sys.argv[1], build("small_cnn", 10, 1))
        from safetensors.torch import save_file
        save_file({"members": result.posterior.members(x), "model": result.model(x).detach()}, "out.safetensors")
    """
    python(code, tmp_path, str(run))
    there = load_file(tmp_path / "out.safetensors")
    assert torch.equal(there["members"], result.posterior.members(x))
    assert torch.equal(there["model"], result.model(x))


def test_the_network_works_where_this_package_is_not(here: Path) -> None:
    model = f"{nets(here)}:small"
    assert main(["prune", "--model", model, *FAST, "--particles", "1", "--out", "run", "--quiet"]) == 0
    sys.path.insert(0, str(here))
    module = __import__(nets(here))
    result = dllp.load("run", module.small())
    x = torch.randn(4, 1, 8, 8)
    torch.save(result.model, here / "model.pt")
    torch.save((x, result.model(x).detach()), here / "pair.pt")
    code = """
        import sys
        sys.modules["dllp"] = None
        import torch
        model = torch.load("model.pt", weights_only=False)
        x, expected = torch.load("pair.pt")
        assert model[0].out_channels < 8
        assert torch.equal(model(x), expected)
        assert not any(name.startswith("dllp.") for name in sys.modules)
    """
    python(code, here)


def test_the_library_needs_no_terminal_packages(tmp_path: Path) -> None:
    code = """
        import sys
        for name in ("rich", "jsonargparse", "yaml"):
            sys.modules[name] = None
        import dllp, dllp.evaluate
    """
    python(code, tmp_path)


# ---- what is shown


def test_the_bar_shows_rate_time_loss_cost_and_temperature(tmp_path: Path) -> None:
    with open(tmp_path / "screen", "w+", encoding="utf-8") as screen:
        with progress.Bar(Console(file=screen, force_terminal=True, width=160)) as shown:
            config = dllp.Config(keep_flops=0.5, epochs=3, particles=1, batch_size=256, device="cpu")
            shown.begin("pruned", config.epochs, config.keep_flops)
            model = build("small_cnn", 10, 1)
            dllp.prune(model, "digits", config, on_step=shown.step, on_epoch=shown.epoch)
        screen.seek(0)
        text = screen.read()
    for part in ("epoch 3/3", "steps/s", "0:00:0", "loss", "cost", "(target 0.5)"):
        assert part in text


def test_a_terminal_gets_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(progress.reporter(quiet=True)) is progress.Silent
    assert type(progress.reporter(quiet=False)) is progress.Lines
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.reporter(quiet=False) as shown:
        assert type(shown) is progress.Bar


def test_the_download_bar_waits_for_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.download(quiet=True) as report:
        assert report is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.download(quiet=False) as report:
        assert report is not None
        report(5, 10)
        report(10, 10)
    assert "downloading" in capsys.readouterr().err
