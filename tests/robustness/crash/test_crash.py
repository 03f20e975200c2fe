"""Runs killed at random moments and inside their writing, resumed until done: the same files, and none besides.

`make crash` does the same 300 times, with a fault at every operation, and on the real demo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness.crash.harness import digest
from tests.support.commands import ENVIRONMENT


def test_killed_runs_end_as_if_they_had_never_been(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.robustness.crash.harness",
        "--kills",
        "10",
        "--faults",
        "0.04",
        "--seed",
        "5",
    ]
    summary = tmp_path / "summary.json"
    summary.write_text('{"fuzz": 1}')
    arguments = [*command, "--summary", str(summary)]
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(summary.read_text())
    figures = whole["crash"]
    assert whole["fuzz"] == 1, "what others wrote stays"
    assert figures["kills"] >= 10 and figures["kills_inside_writing"] >= 2 and figures["faults"] >= 4
    assert [figures[name] for name in ("lost", "differing", "orphans", "unclear_ends")] == [0, 0, 0, 0]


@pytest.mark.parametrize("change", ["weights", "loss", "file"])
def test_the_digest_sees_a_difference(tmp_path: Path, change: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\0\1")
    (tmp_path / "run.json").write_text('{"loss": 0.25, "seconds": 3.5}')
    before = digest(tmp_path)
    (tmp_path / "run.json").write_text('{"loss": 0.25, "seconds": 1e-05}')
    assert digest(tmp_path) == before, "time is not compared"
    if change == "weights":
        (tmp_path / "a.safetensors").write_bytes(b"\0\2")
    elif change == "loss":
        (tmp_path / "run.json").write_text('{"loss": 0.26, "seconds": 3.5}')
    else:
        (tmp_path / "b").touch()
    assert digest(tmp_path) != before
