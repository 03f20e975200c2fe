"""Launchers with real workers, really killed: processes of this machine, and the nodes of a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paper.store import Store
from tests.support import spreading
from tests.support.commands import ENVIRONMENT
from tests.support.spreading import EVERY, PLAN

pytestmark = pytest.mark.slow


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.spreading", str(tmp_path / "notes"), "bench", "small"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = ["--out", str(tmp_path), "--device", "cpu", *words]
    place: dict[str, Any] = {"env": ENVIRONMENT, "cwd": ENVIRONMENT["PYTHONPATH"], "start_new_session": True}
    return subprocess.Popen([*command, *options], **pipes, **place)


def finished(tmp_path: Path) -> list[str]:
    """Digests in the file, line by line."""
    runs = tmp_path / "small" / "runs.jsonl"
    return [json.loads(line)["digest"] for line in runs.read_bytes().splitlines()] if runs.exists() else []


def wait(reached: Callable[[], bool]) -> None:
    for _ in range(1800):
        if reached():
            return
        time.sleep(0.1)
    pytest.fail("it never came to that")


def check_every_job_once(tmp_path: Path, before: list[str]) -> None:
    """All are finished, each once; nothing ran again but the one job that was lost."""
    assert sorted(finished(tmp_path)) == sorted(EVERY)
    counted = spreading.counts(tmp_path / "notes")
    assert set(counted) == set(EVERY) and sum(counted.values()) == len(EVERY) + 1
    assert len(before) == len(EVERY) - 3 and all(counted[digest] == 1 for digest in before)
    assert Store(tmp_path / "small").probabilities(next(p.job.digest for p in PLAN if p.row.predictions == "kept"))


def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with start(tmp_path, "--launcher", "local", "--jobs", "2") as driver:
        wait(lambda: len(spreading.held(notes)) == 2)
        before = finished(tmp_path)
        os.kill(spreading.held(notes)[0], signal.SIGKILL)
        spreading.let_go(notes)
        shown, error = driver.communicate(timeout=300)
    assert driver.returncode == 0, error
    assert error == "dllp: thin seed 0: its worker was lost (killed by SIGKILL), another one takes the job\n"
    assert "2 processes shared the device" in shown
    check_every_job_once(tmp_path, before)
    noted = notes.read_bytes()
    with start(tmp_path, "--launcher", "local") as again:
        assert again.communicate(timeout=120)[1] == "" and again.returncode == 0
    assert notes.read_bytes() == noted, "nothing was begun again"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_no_process_outlives_its_launcher(tmp_path: Path, launcher: str, how: signal.Signals) -> None:
    if launcher == "ray":
        pytest.importorskip("ray", reason="needs Ray: pip install -e '.[dev]'")
    words = {"local": ["--jobs", "1"], "ray": ["--jobs", "1", "--address", "local"]}
    with start(tmp_path, "--launcher", launcher, *words[launcher]) as driver:
        wait(lambda: len(spreading.held(tmp_path / "notes")) == 1)
        family = psutil.Process(driver.pid).children(recursive=True)
        (worker,) = [member for member in family if member.pid in spreading.held(tmp_path / "notes")]
        if how == signal.SIGINT:
            os.killpg(driver.pid, how)  # as Ctrl-C does: every process of the terminal
        else:
            driver.send_signal(how)
        _, error = driver.communicate(timeout=120)
    # after a kill Ray's own services take their time
    _, alive = psutil.wait_procs([worker] if how == signal.SIGKILL else family, timeout=60)
    assert not alive
    assert len(finished(tmp_path)) == 2, "a dense network, and what starts from it"
    if how != signal.SIGKILL:
        assert driver.returncode == 128 + how
        assert error == "dllp: interrupted, finished jobs are kept, the same command goes on\n"
        assert (tmp_path / "small" / "table.md").exists()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[dev]'")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "tests.support.spreading", "cluster"]
    environment = ENVIRONMENT | {"RAY_USAGE_STATS_ENABLED": "0", spreading.NOTES: str(tmp_path / "notes")}
    with subprocess.Popen(command, env=environment, cwd=ENVIRONMENT["PYTHONPATH"], **pipes) as process:
        yield process
        process.communicate(timeout=120)
    assert process.returncode == 0


def test_a_node_of_a_cluster_is_killed(tmp_path: Path, cluster: subprocess.Popen[str]) -> None:
    assert cluster.stdin is not None and cluster.stdout is not None
    address, notes = cluster.stdout.readline().strip(), tmp_path / "notes"
    with start(tmp_path, "--launcher", "ray", "--address", address) as driver:
        wait(lambda: len(spreading.held(notes)) == 2)
        before = finished(tmp_path)
        cluster.stdin.write("\n")
        cluster.stdin.flush()
        assert cluster.stdout.readline() == "killed\n"
        spreading.let_go(notes)
        _, error = driver.communicate(timeout=300)
    assert driver.returncode == 0, error
    told = error.splitlines()  # Ray may send a job to the dead node once more before it knows
    assert told and all(line.startswith("dllp: thin seed ") and "its worker was lost" in line for line in told), error
    check_every_job_once(tmp_path, before)
