"""`torchrun -m dllp prune`: one run folder whatever the layout, lost processes, and what can be wrong at the start."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dllp.cli.main import main
from tests.robustness.crash.harness import digest, names
from tests.support import many, pictures
from tests.support.commands import ENVIRONMENT, npy

pytestmark = pytest.mark.slow  # every test starts several processes, and some wait for them to give up
SHORT = ("--model", "mlp", "--granularity", "weight", "--gate-linear", "--keep-params", "0.3", "--epochs", "3",
         "--particles", "2", "--batch-size", "32", "--checkpoint-steps", "1", "--threads", "1", "--quiet")  # fmt: skip
"""Nine steps of a small network, twice."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    y = np.arange(96) % 4
    x = (rng.normal(size=(96, 6)) + y[:, None]).astype(np.float32)
    return npy(tmp_path_factory.mktemp("torchrun") / "data", x, y)


def torchrun(
    size: int, data: Path, out: Path, *words: str, restarts: int = 0, fault: str = "none:9"
) -> tuple[int, str]:
    """Exit code and standard error of a run in so many processes."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", *launcher, "-m", "tests.support.faulty", "prune", "--data", str(data), *SHORT]
    done = subprocess.run(
        [*command, "--out", str(out), *words], env=ENVIRONMENT | {"FAULT": fault, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr


def told(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("dllp:")]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "out"
    code, error = torchrun(2, data, out, "--parallel", "particles")
    assert code == 0, error
    return out


def test_the_run_folder_is_that_of_one_process(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "one"
    assert main(["prune", "--data", str(data), *SHORT, "--parallel", "particles", "--out", str(out)]) == 0
    assert names(out) == names(whole) and (out / "config.yaml").read_text() == (whole / "config.yaml").read_text()
    for name in ("gates", "particle-1", "reference-1", "dense"):
        found, known = (load_file(folder / f"{name}.safetensors") for folder in (whole, out))
        for key in known:
            torch.testing.assert_close(found[key], known[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fault", ["kill:1:5", "kill:0:8"])
def test_torchrun_starts_a_killed_run_again_to_the_same_end(
    data: Path, whole: Path, tmp_path: Path, fault: str
) -> None:
    code, error = torchrun(2, data, tmp_path / "out", "--parallel", "particles", restarts=1, fault=fault)
    assert code == 0, error
    assert "exitcode: -9" in error and len(told(error)) <= 1
    assert digest(tmp_path / "out") == digest(whole), "every file, and none besides"


def test_a_lost_process_ends_the_others_and_one_process_goes_on(data: Path, whole: Path, tmp_path: Path) -> None:
    out, began = tmp_path / "out", time.monotonic()
    code, error = torchrun(2, data, out, "--parallel", "particles", fault="kill:1:5")
    assert code != 0 and time.monotonic() - began < 60
    (line,) = told(error)
    assert "another process of the run was lost" in line and f"go on with dllp prune --resume --out {out}" in line
    assert main(["prune", "--resume", "--quiet", "--out", str(out)]) == 0
    found, known = (load_file(folder / "particle-0.safetensors") for folder in (out, whole))
    for key in known:
        torch.testing.assert_close(found[key], known[key], rtol=1e-3, atol=1e-4)


# ---- images on disk, of which each process reads its part

STREAMED = ("--image-size", "8", "--augment", "resized-crop", "--workers", "1", "--batch-size", "6", "--no-dense",
            "--parallel", "data")  # fmt: skip
"""Four steps in an epoch."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of 24 training images cannot be read."""
    root = pictures.folder(tmp_path_factory.mktemp("torchrun") / "photos")
    for name in ("cat/003.jpg", "dog/008.jpg"):
        (root / "train" / name).write_bytes(b"")
    return root


def test_streamed_images_make_the_run_of_one_process_also_from_within_an_epoch(photos: Path, tmp_path: Path) -> None:
    words = (*STREAMED, "--max-bad", "10%")
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["prune", "--data", str(photos), *SHORT, *words, "--out", str(one)]) == 0
    code, error = torchrun(2, photos, two, *words, fault="kill:1:6")
    assert code != 0
    warnings = [line for line in told(error) if "is left out" in line]
    assert len(warnings) == 2 and "2 of 24 images so far" in warnings[1], "told once, by the first"
    assert main(["prune", "--resume", "--quiet", "--out", str(two)]) == 0
    for name in ("gates", "particle-1", "reference-1"):
        found, known = (load_file(folder / f"{name}.safetensors") for folder in (two, one))
        for key in known:
            torch.testing.assert_close(found[key], known[key], rtol=1e-3, atol=1e-4)


def test_too_many_bad_images_are_one_line(photos: Path, tmp_path: Path) -> None:
    code, error = torchrun(2, photos, tmp_path / "out", *STREAMED, "--max-bad", "5%")
    lines = [line for line in told(error) if "cannot read" in line]
    assert code != 0 and len(lines) == 1 and "cannot read 2 of 24 images" in lines[0]


# ---- one line from the first process


def refused(processes: list[subprocess.Popen[str]]) -> str:
    """The one line of a run that nobody starts."""
    first, *others = many.finish(processes)
    assert [code for code, _, _ in (first, *others)] == [2] * len(processes)
    assert not any(told(error) for _, _, error in others)
    (line,) = told(first[2])
    return line


def test_particles_that_cannot_be_spread(data: Path, tmp_path: Path) -> None:
    words = ["dllp", "prune", "--data", str(data), *SHORT, "--out", str(tmp_path / "out"), "--particles", "3"]
    line = refused(many.start(2, [*words, "--parallel", "particles"]))
    assert "3 particles cannot be spread evenly over 2 processes" in line
    assert not (tmp_path / "out").exists()


def test_mixed_versions(data: Path, tmp_path: Path) -> None:
    words = ["tests.support.faulty", "prune", "--data", str(data), *SHORT, "--out", str(tmp_path / "out")]
    line = refused(many.start(2, words, environment={k: {"FAULT": "version:1"} for k in (0, 1)}))
    assert "rank 1 has dllp 0.0.1, torch" in line and "must be the same" in line


def test_a_process_without_the_data(data: Path, tmp_path: Path) -> None:
    words = ["dllp", "prune", "--data", data.name, *SHORT, "--out", str(tmp_path / "out")]
    line = refused(many.start(2, words, folders={0: data.parent, 1: tmp_path}))
    assert f"rank 1: no data set and no folder is called {data.name}" in line
    assert not (tmp_path / "out").exists()


def test_a_port_in_use(data: Path, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))  # noqa: S104
        held.listen()
        port = held.getsockname()[1]
        first, other = many.start(2, ["dllp", "prune", "--data", str(data), *SHORT, "--out", "out"], port=port)
        other.kill()  # it waits for the first
        other.communicate()
        ((code, _, error),) = many.finish([first])
    assert code == 2 and len(told(error)) == 1
    assert f"port: {port}" in error and "in use" in error and "a free --master-port" in error
