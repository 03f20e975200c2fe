"""Where a run computes, and what exact repetition needs there."""

from __future__ import annotations

import pytest
import torch

from dllp.devices.device import WORKSPACE, WORKSPACES, check_repeatable, find_device
from dllp.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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
