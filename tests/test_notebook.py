"""Notebooks: a real one is executed; elsewhere nothing is shown, and IPython is not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dllp
from dllp import notebook
from tests.support.commands import ENVIRONMENT

PRUNE = """
import torch, dllp
from torch import nn
torch.set_num_threads(1)
network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
data = torch.randn(64, 1, 6, 6), torch.randint(3, (64,))
config = dllp.Config(keep_flops=0.5, epochs=3, batch_size=16, particles=2, init="fresh", device="cpu")
result = dllp.prune(network, data, config)
"""


def test_a_notebook_shows_progress_and_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install -e '.[dev]'")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[dev]'")
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in (PRUNE, "result")])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    shown, result = (cell.outputs for cell in book.cells)
    assert [output.output_type for output in shown] == ["display_data"]  # one line that was updated, and no text
    line: Any = shown[0]["data"]["text/html"]
    for part in ('value="12" max="12"', "epoch 3/3", "steps/s", "0 s left", "loss", "(target 0.5)"):
        assert part in line, line
    table = result[0]["data"]["text/html"]
    assert "asked to keep 50% of the FLOPs" in table and "particle 2" in table and " of 8" in table


def test_a_script_shows_nothing(tmp_path: Path) -> None:
    code = PRUNE + "import sys\nassert 'IPython' not in sys.modules\nassert result._repr_html_()"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        @staticmethod
        def get_ipython() -> object:
            return object()

    monkeypatch.setitem(sys.modules, "IPython", Terminal)  # type: ignore[arg-type]
    assert not notebook.in_notebook()


def test_names_are_escaped() -> None:
    size = {"macs": 10.0, "params": 10}
    text = notebook.summary(dllp.Config(), size, [size], {"<img src=x>": [3, 4]}, [])
    assert "<img" not in text and "&lt;img src=x&gt;" in text and "asked" not in text
    assert "<details>" not in notebook.summary(dllp.Config(), size | {"macs": 0.0}, [size], {}, [])
