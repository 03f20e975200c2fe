"""A new user's first hour: the wheel in an environment of its own, own network, own data, and the printed next steps.

Each step is at most three lines of Python or one command. Installed packages are borrowed from the tests' environment;
`make wheel` and the demo's timing in README are about an environment without that help.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import UNTRACED, once

ROOT = Path(__file__).parents[2]
NETS = """
from pathlib import Path

import torch
from torch import nn


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 3),
    )


def trained():
    model = network()
    model.load_state_dict(torch.load(Path(__file__).with_name("trained.pt"), weights_only=True))
    return model
"""
TRAIN = """
import numpy as np, torch
from torch.nn import functional as F
from mine import network

torch.manual_seed(0)
x, y = (torch.from_numpy(np.load(f"data/train_{name}.npy")) for name in "xy")
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(20):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
torch.save(model.state_dict(), "trained.pt")
"""
PRUNE = """
result = dllp.prune(trained(), loader, dllp.Config(keep_flops=0.5, epochs=3, device="cpu"), validation=test)
print(result)
result.save("saved", model="mine:network")
"""
USE = """
print(result.evaluate(test))
print(result.export("network.onnx"))
result.report("report.html", test)
"""
ELSEWHERE = """
import onnxruntime, numpy
session = onnxruntime.InferenceSession("network.onnx")
print(session.run(None, {"input": numpy.load("data/test_x.npy")})[0].shape)
"""
BEGIN = """
import dllp, numpy, torch
from torch.utils.data import DataLoader, TensorDataset
from mine import network, trained

x, y, *test = (torch.from_numpy(numpy.load(f"data/{name}.npy")) for name in ("train_x", "train_y", "test_x", "test_y"))
loader, test = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True), tuple(test)
"""


def built(folder: Path) -> None:
    """The wheel in an environment that has it and borrows everything else."""
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(words, check=True, capture_output=True, env=UNTRACED)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    own = folder / "env" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(words, check=True, capture_output=True, env=UNTRACED)
    borrowed = [p for p in sys.path if p.endswith("site-packages")]
    (own / "borrowed.pth").write_text("\n".join(borrowed))


@pytest.fixture
def python(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Python of the new environment; the current folder holds the user's own network and data."""
    pytest.importorskip("hatchling", reason="needs the build's own package to work without a network")
    there = once(tmp_path_factory, "first-hour", built)
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    Path("data").mkdir()
    for split, count in (("train", 96), ("test", 30)):
        y = np.arange(count) % 3
        x = random.normal(size=(count, 1, 7, 7)) + 1.5 * (y - 1).reshape(-1, 1, 1, 1)
        np.save(f"data/{split}_x.npy", x.astype(np.float32))
        np.save(f"data/{split}_y.npy", y)
    Path("mine.py").write_text(NETS)
    return there / "env" / "bin" / "python"


def call(*words: str | Path) -> str:
    """What a process prints; its errors are ours."""
    environment = {name: value for name, value in UNTRACED.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_python(python: Path) -> None:
    assert all(len(step.strip().splitlines()) <= 3 for step in (PRUNE, USE, ELSEWHERE))
    home = call(python, "-c", "import dllp; print(dllp.__file__)")
    assert home.startswith(str(python.parents[1])), "the wheel's, not the checkout's"
    call(python, "-c", TRAIN)
    shown = call(python, "-c", BEGIN + PRUNE + USE)
    assert "budget: 50% of the FLOPs" in shown and "next: .evaluate(" in shown and "network.onnx" in shown
    assert re.search(r"clean +dense +accuracy", shown) and "<html" in Path("report.html").read_text()[:200]
    assert call(python, "-c", ELSEWHERE) == "(30, 3)\n"
    again = call(python, "-c", BEGIN + "print(dllp.load('saved', network()).evaluate(test).rows[1].name)")
    assert again == "particle 1\n"


def test_by_commands_each_of_which_names_the_next(python: Path) -> None:
    call(python, "-c", TRAIN)
    dllp = str(python.with_name("dllp"))
    shown = call(dllp, *shlex.split("prune --data data --model mine:trained --keep-flops 0.5 --epochs 3 --device cpu"))
    assert shown.startswith("schedule for trained weights, the network as it was as its teacher: 3 epochs")
    for name in ("report", "evaluate", "speed", "export"):
        (following,) = re.findall(r"^next: dllp (.*)$", shown, re.MULTILINE)
        words = shlex.split(following)
        assert words[0] == name
        words += ["--seconds", "0.01", "--batch", "2"] if name == "speed" else []
        shown = call(dllp, *words)
    assert os.path.getsize("network.onnx") and Path("runs/last/report.html").is_file()
