"""What every test shares: one thread a process, one seed, no clock in property tests, runs and images to look at."""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch loads, and inherited by processes that tests start: `make test` runs several workers on few cores.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# `device = "auto"` is the CPU, where bits are fixed, on every machine; `make test-cuda` says otherwise.
if "DLLP_TEST_CUDA" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    import dllp

torch.set_num_threads(1)
# A shell that starts something in the background tells it to ignore this signal; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Deadlines would be assertions about time; derandomised examples make a failure repeat.
settings.register_profile("dllp", deadline=None, derandomize=True)
settings.load_profile("dllp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-cuda"))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same torch random state, in any order and on any worker."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the user that are forgotten after the test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


# Helpers are imported late: they load dllp, which coverage would not count from here on.


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder that nobody changes."""
    from tests.support.commands import once, short_run

    return once(tmp_path_factory, "finished", short_run) / "first"


@pytest.fixture(scope="module")
def run(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder, one for each file of tests."""
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("runs") / finished.name))


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A finished run folder that a test may bend."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture
def result(run: Path) -> "dllp.Result":
    """The result that such a folder holds."""
    import dllp
    from dllp.zoo import build

    return dllp.load(run, build("small_cnn", num_classes=10, in_channels=1, image_size=8))


@pytest.fixture(scope="session")
def report_page(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a finished run."""
    from tests.support.commands import PAGE, once, write_page

    return (once(tmp_path_factory, "page", lambda folder: write_page(finished, folder)) / PAGE).read_text("utf-8")


@pytest.fixture(scope="module", params=["channel", "weight"])
def saved_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple["dllp.Result", Path]:
    """What pruning has found, of either granularity, and the folder where Python has saved it."""
    from tests.support.short_runs import pruned

    result = pruned(request.param)
    return result, result.save(tmp_path_factory.mktemp("run") / request.param)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images that nobody changes."""
    from tests.support import pictures

    return pictures.folder(tmp_path_factory.mktemp("pictures") / "set")


@pytest.fixture
def own_photographs(photographs: Path, tmp_path: Path) -> Path:
    """A folder of images that a test may spoil."""
    return Path(shutil.copytree(photographs, tmp_path / "set"))


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with networks of a user's own, in the current folder."""
    from tests.support.commands import settle

    return settle(tmp_path, monkeypatch)


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """What limits the bytes of every file that is written from then on, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
