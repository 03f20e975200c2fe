"""The device of a run; modes that a program has set for PyTorch change no run, and are as they were afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dllp
from dllp import Result
from dllp.baselines import find, run
from dllp.data import ArrayData, load
from dllp.deploy.export import export
from dllp.devices import device
from dllp.devices.device import WORKSPACE, WORKSPACES, check_repeatable, find_device
from dllp.errors import ConfigError
from dllp.evaluation.evaluate import measure
from tests.support.short_runs import convolutional, mlp, pictures, quick, table

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHORT = quick(epochs=2, init="fresh")


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_type(kind: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default_type(torch.float64),
    "bfloat16": lambda: default_type(torch.bfloat16),
    "device": lambda: default_device("meta"),  # a device whose tensors hold nothing: what lands there is noticed
}


def tensors(result: Result) -> list[Tensor]:
    networks = [network for particle in result.particles for network in (particle.network, particle.reference)]
    return [value for network in networks for value in network.state_dict().values()] + list(result.gates.values())


def trained(work: Callable[..., Result], network: nn.Module, data: tuple[Tensor, Tensor]) -> list[Tensor]:
    """What becomes of the network by a pair of tensors, and by a loader that shuffles."""
    return tensors(work(network, data)) + tensors(work(network, DataLoader(TensorDataset(*data), 16, shuffle=True)))


VERBS: dict[str, Callable[..., Result]] = {
    "channel": lambda network, data: dllp.prune(network, data, SHORT),
    "weight": lambda network, data: dllp.prune(network, data, quick(epochs=2, granularity="weight", gate_linear=True)),
    "dense": lambda network, data: dllp.train_dense(network, data, quick(epochs=1)),
    "thinet": lambda network, data: run.prune(find("thinet"), network, data, quick(epochs=1), finetune_epochs=1).result,
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("verb", VERBS)
def test_training_is_the_same_whatever_is_set_around_it(name: str, verb: str) -> None:
    network, data = mlp(8), table(32)
    expected = trained(VERBS[verb], network, data)
    with AROUND[name]():
        before = _settings()
        found = trained(VERBS[verb], network, data)
        assert _settings() == before
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_wish_for_warnings_only_is_left_as_it_was(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        dllp.prune(mlp(8), table(32), quick(epochs=1, deterministic=deterministic))
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def _settings() -> list[object]:
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    return [*modes, torch.get_default_dtype(), torch.get_default_device()]


@pytest.fixture(scope="module")
def finished() -> Result:
    torch.manual_seed(0)
    return dllp.prune(convolutional(), pictures(), SHORT)


# Not within an autocast: how to predict is the caller's choice.
@pytest.mark.parametrize("name", [name for name in AROUND if name != "autocast"])
def test_what_comes_after_training_is_the_same_too(finished: Result, tmp_path: Path, name: str) -> None:
    fresh, x, split = convolutional(), pictures(6)[0], ArrayData(*pictures())

    def work(folder: Path) -> list[object]:
        finished.save(folder)
        again = dllp.load(folder, fresh)
        drawn = dllp.sample_gates(again, x, 2)
        shipped = export(again, folder / "small.pt2", (1, 7, 7), format="pt2")
        rows = measure(again, split).rows
        figures = [row.metrics for row in rows]
        return [*tensors(again), drawn.members(x), load("digits").train.x, figures, shipped.difference]

    expected = work(tmp_path / "plain")
    with AROUND[name]():
        found = work(tmp_path / name)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


@pytest.mark.parametrize("name", ["gpu", "", "cpu:x", "meta", "mps", "xpu"])
def test_a_device_of_another_kind_is_one_line(name: str) -> None:
    """PyTorch knows some of these words, and fails much later."""
    with pytest.raises(ConfigError, match=f"device = '{name}' is unknown: use auto, cpu or cuda"):
        find_device(name)
    assert find_device("cpu") == CPU


def test_deterministic_kernels_on_cuda_need_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    with pytest.raises(ConfigError, match=f"{WORKSPACE}=:4096:8"):
        check_repeatable(CUDA, deterministic=True)
    monkeypatch.setenv(WORKSPACE, ":4096:2")
    with pytest.raises(ConfigError):
        check_repeatable(CUDA, deterministic=True)
    check_repeatable(CUDA, deterministic=False)
    check_repeatable(CPU, deterministic=True)
    for value in WORKSPACES:
        monkeypatch.setenv(WORKSPACE, value)
        check_repeatable(CUDA, deterministic=True)


@pytest.mark.parametrize(("together", "chosen"), [(0.5, 2), (0.95, 1), (6.0, 1)])
def test_one_thread_or_all_by_what_is_faster_now(monkeypatch: pytest.MonkeyPatch, together: float, chosen: int) -> None:
    """By a clock of its own: all threads take `together` of the time that one takes."""
    clock = [0.0]
    monkeypatch.setattr(device.time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += 1.0 if torch.get_num_threads() == 1 else together

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert device.use_fastest_threads(work) == 2 and not clock[0], "what the user has set stays"
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert device.use_fastest_threads(work) == torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(before)
