"""Runs that remove whole residual branches: saved, loaded, exported, resumed, and in a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dllp
from dllp import Config, ConfigError
from dllp.baselines import find
from dllp.baselines.run import prune as prune_by
from dllp.checkpoints import Checkpoints
from dllp.evaluation.sampling import sample_gates
from tests.support.short_runs import same

WIDTH = 8


class Block(nn.Module):
    """A residual block that computes in place, with one activation for two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(WIDTH, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.conv2, self.norm2 = nn.Conv2d(12, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


def network(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), *(Block() for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10),
    )  # fmt: skip


def config(**changes: Any) -> Config:
    values: dict[str, Any] = dict(epochs=2, keep_flops=0.5, lr=0.1, warmup=0, lr_gates=0.2, device="cpu", init="given")
    return Config(**(values | changes))


def gone(result: dllp.Result) -> list[str]:
    """Modules that the first particle has lost."""
    return [name for name, entries in result.particles[0].recipe.items() if any(e.startswith("!") for e in entries)]


@pytest.mark.parametrize("units", ["both", "blocks"])
def test_a_run_on_digits_from_start_to_export(units: Any, tmp_path: Path) -> None:
    result = dllp.prune(network(), "digits", config(units=units, epochs=1), progress=False)
    share = result.sizes[0].macs / result.dense.macs
    assert 0.47 < share <= 0.5 if units == "both" else 0.3 < share <= 0.5  # a unit is 3% of the network, a branch 33%
    assert sum(p.numel() for p in result.model.parameters()) == result.sizes[0].params
    branches = {name: counts for name, counts in result.widths.items() if counts[-1] == 1}
    assert len(branches) == 3 and len(gone(result)) == 4 * sum(not kept for kept, _ in branches.values())
    assert gone(result) or units == "both"
    x = torch.randn(4, 1, 8, 8)
    result.save(tmp_path / "run")
    again = dllp.load(tmp_path / "run", network())
    with torch.no_grad():
        assert torch.equal(again.model(x), result.model(x)) and same(again.model, result.model)
        assert again.particles[0].reference(x).isfinite().all()
    assert len(sample_gates(again, x, 2).networks) == 2
    assert result.export(tmp_path / "small.onnx").difference < 1e-4
    assert again.export(tmp_path / "wide.onnx", pad_to=4).difference < 1e-4


def useless() -> nn.Sequential:
    """A network whose second block adds nothing."""
    model = network()
    nn.init.zeros_(model[4].norm2.weight)
    return model


def test_a_branch_that_does_nothing_goes_first() -> None:
    without = 1 - 2 * 9 * 64 * WIDTH * 12 / (9 * 64 * WIDTH + 3 * 2 * 9 * 64 * WIDTH * 12 + WIDTH * 10)
    budget = {"epochs": 0, "keep_flops": without + 1e-4}
    result = dllp.prune(useless(), "digits", config(units="both", **budget), progress=False)
    assert gone(result) == ["4.conv1", "4.norm1", "4.conv2", "4.norm2"]
    assert result.widths["4"] == [0, 1] and result.widths["4.conv1"] == [0, 12]
    assert isinstance(result.model[4].norm1, nn.Identity) and type(result.model[4].norm2) is nn.Threshold
    assert result.sizes[0].macs / result.dense.macs == pytest.approx(without)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(result.model(x), useless().eval()(x))


class Stopped(Exception):
    pass


@pytest.mark.parametrize("step", [4, 9])
def test_a_resumed_run_is_the_same(step: int, tmp_path: Path) -> None:
    """Stopped while gates are soft, and when branches are gone."""
    settings = config(units="blocks", particles=2, batch_size=16)
    data = torch.randn(96, 1, 8, 8), torch.arange(96) % 10
    whole = dllp.prune(network(), data, settings, progress=False)
    held = Checkpoints(tmp_path, every_steps=1)

    def stop(state: Any) -> None:
        held.flush()
        if state.step_index == step:
            raise Stopped

    with pytest.raises(Stopped):
        dllp.prune(network(), data, settings, checkpoints=held, on_step=stop, progress=False)
    again = dllp.prune(network(), data, settings, checkpoints=Checkpoints(tmp_path), progress=False)
    assert torch.equal(whole.gates["keep"], again.gates["keep"])
    for a, b in zip(whole.particles, again.particles, strict=True):
        assert a.recipe == b.recipe and same(a.network, b.network) and same(a.reference, b.reference)
    assert gone(whole)


def test_a_loop_of_ones_own() -> None:
    x, y = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    pruner = dllp.Pruner(network(), x[:2], config(units="blocks", keep_flops=0.4), num_data=16, steps=8)
    while not pruner.finished:
        F.cross_entropy(pruner.networks[0](x), y).backward()
        pruner.step()
    result = pruner.finish()
    assert len(gone(result)) == 8 and result.sizes[0].macs <= 0.4 * result.dense.macs


def test_units_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="units = both are no single weights"):
        config(units="both", granularity="weight")
    with pytest.raises(ConfigError, match="scores channels, no branches: leave out units = blocks"):
        prune_by(find("l1-filters"), network(), "digits", config(units="blocks"))
    assert config().resolved().units == "channels"
    assert config().identity() == config(units="channels").identity() != config(units="both").identity()
