"""The command line end to end: runs, their folders, and one line for every mistake."""

from __future__ import annotations

import json
import os
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

import dllp
from dllp import zoo
from dllp.cli import progress
from dllp.cli.main import main
from dllp.cli.open_run import imported
from dllp.cli.parser import COMMANDS, NETWORKS
from dllp.data.unreadable import MAX_BAD
from dllp.runs.folder import new_folder
from dllp.runs.settings import TASK, Task, read
from dllp.zoo import build
from tests.support.commands import ENVIRONMENT, FAST, UNTRACED, npy, one_line

# ---- runs


def test_run_folder_holds_everything(run: Path) -> None:
    networks = {f"{kind}-{i}.safetensors" for kind in ("particle", "reference") for i in (0, 1)}
    other = {"config.yaml", "log.jsonl", "run.json", "gates.safetensors", "dense.safetensors", "evaluation.json"}
    other.add("examples.safetensors")
    assert {path.name for path in run.iterdir()} == networks | other
    assert [path.name for path in run.parent.iterdir()] == ["first"]
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [(line["training"], line["epoch"]) for line in log] == [
        ("pruned", 1), ("pruned", 2), ("dense", 1), ("dense", 2),
    ]  # fmt: skip
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert set(settings) == {*TASK, *dllp.Config().as_dict()}
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


def test_plain_lines_and_the_table(nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "--model", f"{nets}:small", *FAST, "--validation", "200", "--particles", "1"]) == 0
    out, error = capsys.readouterr()
    assert error.startswith("dllp: warning: pruned: the training loss ended at"), "after two epochs, and true"
    assert error.count("\n") == 1 and "\npruned epoch 1/2 " in out and "(target 0.3)" in out
    assert "validation: " in out and "in the last epoch, the result; the best was " in out
    assert "dense epoch" not in out and "\n dense " in out, "a given network is evaluated, not trained"
    next_step = f"run folder: runs/last\nnext: dllp report runs/last --model {nets}:small\n"
    assert "200 validation examples" in out and out.endswith(next_step)
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


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dllp", "prune", "--epochs", "500", "--out", "runs/a"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, text=True, **pipes) as process:
        assert process.stdout is not None
        chosen, first = process.stdout.readline(), process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert chosen.startswith("schedule for a start without trained weights: 500 epochs, batches of 64"), error
    assert first.startswith("pruned epoch 1/500"), error
    assert (process.returncode, error) == (130, "dllp: interrupted, go on with dllp prune --resume --out runs/a\n")
    assert {path.name for path in (tmp_path / "runs/a").iterdir()} == {"config.yaml", "checkpoints", "log.jsonl"}


CALL = "from dllp.cli.main import main; main(['methods'])"


@pytest.mark.parametrize("module", ["argparse", "torch"])
@pytest.mark.parametrize("words", [["-m", "dllp"], ["bin/dllp"], ["-c", CALL]])
def test_ctrl_c_while_it_loads(tmp_path: Path, module: str, words: list[str]) -> None:
    """The command ends without a word; a program of a user's own goes on."""
    (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dllp").write_text("import sys\nfrom dllp.cli.main import main\nsys.exit(main())\n")
    path = os.pathsep.join([str(tmp_path), UNTRACED["PYTHONPATH"]])
    call = [sys.executable, *words, "methods"]
    done = subprocess.run(call, cwd=tmp_path, env=UNTRACED | {"PYTHONPATH": path}, capture_output=True, text=True)
    if words[0] == "-c":
        assert (done.returncode, done.stderr) == (0, "dllp: interrupted, nothing was written\n")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_next_to_nothing(command: str, tmp_path: Path) -> None:
    code = """
        import sys
        from dllp.cli.main import main
        try:
            main([*sys.argv[1:], "--help"])
        except SystemExit:
            own = [name for name in sys.modules if name.split(".")[0] in ("dllp", "paper")]
            print(len(own), "torch" in sys.modules, "yaml" in sys.modules, "rich" in sys.modules)
    """
    count, *loaded = python(code, tmp_path, *filter(None, [command])).splitlines()[-1].split()
    if command != "bench":  # its list of tables takes the tables
        assert int(count) <= 12 and loaded == ["False"] * 3


def test_help_knows_networks_and_defaults_without_loading_them() -> None:
    assert zoo.names() == NETWORKS and Task().max_bad == MAX_BAD


def test_names_in_files_may_have_dashes_and_exponents(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("keep-flops: 0.5\nlr: 1e-3\nslab-bounds: [1, 2]\ngate-linear: true\n")
    expected = {"keep_flops": 0.5, "lr": 0.001, "slab_bounds": (1.0, 2.0), "gate_linear": True}
    assert read(tmp_path / "a.yaml") == expected


def test_a_factory_may_leave_the_folder_that_it_was_found_in(nets: str, tmp_path: Path) -> None:
    code = f"\ndef away():\n    import os\n    os.chdir({str(tmp_path.parent)!r})\n    return small()\n"
    with open(tmp_path / f"{nets}.py", "a") as file:
        file.write(code)
    before = list(sys.path)
    assert isinstance(imported(f"{nets}:away"), torch.nn.Module) and Path.cwd() == tmp_path.parent
    assert sys.path == before


def test_version_and_explanations(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["prune", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"dllp {dllp.__version__}\n")
    assert "See --." not in out, "every field of Config is explained in its docstring"


# ---- elsewhere


def python(code: str, cwd: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    result = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_network_works_where_this_package_is_not(nets: str, tmp_path: Path) -> None:
    model = f"{nets}:small"
    assert main(["prune", "--model", model, *FAST, "--particles", "1", "--out", "run", "--quiet"]) == 0
    sys.path.insert(0, str(tmp_path))
    module = __import__(nets)
    result = dllp.load("run", module.small())
    x = torch.randn(4, 1, 8, 8)
    torch.save(result.model, tmp_path / "model.pt")
    torch.save((x, result.model(x).detach()), tmp_path / "pair.pt")
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
    python(code, tmp_path)


def test_the_library_needs_no_terminal_packages(tmp_path: Path) -> None:
    code = """
        import sys
        for name in ("rich", "yaml"):
            sys.modules[name] = None
        import dllp, dllp.evaluation.evaluate
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
