"""What every test shares: one thread in each process, one seed, no clock in property tests, a run to look at."""

import os
import signal
from pathlib import Path

# Before torch loads, and inherited by processes that tests start: `make test` runs several workers on few cores.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# A shell that starts something in the background tells it to ignore this signal; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Deadlines would be assertions about time; derandomised examples make a failure repeat.
settings.register_profile("dllp", deadline=None, derandomize=True)
settings.load_profile("dllp")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same torch random state, in any order and on any worker."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder, one for each file of tests."""
    from tests.commands import short_run  # not before coverage counts: it loads dllp

    return short_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with networks of a user's own, in the current folder."""
    from tests.commands import settle

    return settle(tmp_path, monkeypatch)
