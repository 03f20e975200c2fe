"""The device of a run: found by name, checked for deterministic kernels, described for records."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from dllp import __version__
from dllp.errors import ConfigError

WORKSPACE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""cuBLAS is deterministic with these workspaces only, and reads the variable when it starts."""


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


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, recorded with every measurement."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {
        "dllp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "hardware": accelerator,
    }
