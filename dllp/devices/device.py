"""The device of a run and PyTorch's modes on it: found, checked, described, and independent of the caller's."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from dllp import __version__
from dllp.errors import ConfigError

WORKSPACE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""cuBLAS is deterministic with these workspaces only, and reads the variable when it starts."""
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Precisions that autocast."""
AUTOCAST_ONLY = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Modules whose weight goes into one operation that autocast casts it for, and nowhere else; not their subclasses."""
TRIES, WORTH = 5, 0.9  # repeats that compare one thread with all, and the share of time at which all are worth it


def find_device(name: str, local: int | None = None) -> torch.device:
    """The device called `name`; `auto` is CUDA if available, and `local` the rank on this host that chooses a GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local is not None:
        name = f"cuda:{local}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):  # others of PyTorch would fail later
        raise ConfigError(f"device = {name!r} is unknown: use auto, cpu or cuda")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"device = {name!r} is not there: use device='cpu', or 'auto' to take what there is")
    return device


def check_repeatable(device: torch.device, deterministic: bool) -> None:
    """Raise if deterministic kernels are wanted and the environment does not allow them."""
    if deterministic and device.type == "cuda" and os.environ.get(WORKSPACE) not in WORKSPACES:
        raise ConfigError(f"deterministic on CUDA needs {WORKSPACE}={WORKSPACES[0]}: set it before Python starts")


def check_precision(device: torch.device, precision: str) -> None:
    """Raise if float16 is wanted where nothing is faster for it."""
    if precision == "float16" and device.type != "cuda":
        raise ConfigError(f"precision = float16 needs CUDA, not {device.type}: use bfloat16 or float32")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, recorded with every measurement."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    versions = {"dllp": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**versions, "device": str(device), "hardware": accelerator}


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def use_fastest_threads(work: Callable[[], object]) -> int:
    """Set PyTorch to one CPU thread or to all it has, whichever runs `work` faster now; return their number.

    On a busy machine threads that wait for each other take several times as long as one. A number that the user has
    set by OMP_NUM_THREADS stays.
    """
    every = torch.get_num_threads()
    if every == 1 or "OMP_NUM_THREADS" in os.environ:
        return every
    times: dict[int, list[float]] = {1: [], every: []}
    for repeat in range(TRIES + 1):
        for count, found in times.items():
            torch.set_num_threads(count)
            began = time.perf_counter()
            work()
            if repeat:  # the first one warms up
                found.append(time.perf_counter() - began)
    best = every if median(times[every]) < WORTH * median(times[1]) else 1
    torch.set_num_threads(best)
    return best


@contextmanager
def undisturbed() -> Iterator[None]:
    """PyTorch's default modes (gradients, no autocast, float32, CPU) inside, and the caller's again afterwards.

    A run chooses gradients, precision and devices itself. Within a caller's `no_grad` it could not learn, an
    `autocast` would round what must be exact, and a default device would part tensors from their generators.
    """
    with ExitStack() as held:
        held.enter_context(torch.inference_mode(False))
        held.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                held.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # the context has a price: every call passes through it
            held.enter_context(torch.device("cpu"))
        held.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield


def cast_like_autocast(network: nn.Module, weights: dict[str, Tensor], half: torch.dtype) -> dict[str, Tensor]:
    """Gated weights by name in half precision where autocast would cast them later: float32 ones need not be kept."""
    owners = {name: network.get_submodule(name.rpartition(".")[0]) for name in weights}
    return {
        name: weight.to(half) if type(owners[name]) in AUTOCAST_ONLY else weight for name, weight in weights.items()
    }
