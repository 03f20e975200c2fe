"""Blocks that are computed again: the same run bit for bit, and what is not kept is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import dllp
from dllp import zoo
from dllp.config import Config
from dllp.devices.recompute import Recompute, stages
from dllp.errors import StructureError
from dllp.zoo.networks import CifarResNet
from tests.support import networks
from tests.support.commands import ENVIRONMENT

# ---- which modules are stages


def test_stages_of_the_zoo() -> None:
    with torch.device("meta"):
        found = {name: stages(zoo.build(name, 10)) for name in zoo.names()}
    assert found["resnet50"] == [f"blocks.{i}" for i in range(16)]
    assert found["small_resnet"] == [f"blocks.{i}" for i in range(3)]
    assert found["vgg11_bn"] == found["vgg16_bn"] == ["features"] and found["small_cnn"] == found["mlp"] == [""]


def test_stages_of_other_networks() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.mlp = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    class Nested(nn.Module):
        """Lists within stages within a list, as in networks that shrink their maps stage by stage."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.parts = nn.ModuleList([nn.ModuleDict({"blocks": nn.ModuleList([Layer() for _ in range(4)])})] * 2)

    assert stages(Nested()) == [f"parts.0.blocks.{k}" for k in range(4)], "shared modules have one name"
    assert stages(networks.resnet(depth=4)) == ["features.0", *(f"features.{k}" for k in range(2, 10))]
    monolith = nn.Sequential()
    monolith.add_module("only", networks.Dense())
    assert stages(monolith) == ["only"], "large, but there is nothing smaller in it"
    with pytest.raises(StructureError, match="recompute finds no blocks"):
        stages(networks.Dense())


# ---- the same run


class Memory(nn.Module):
    """Its output depends on a buffer that every pass moves, as in power iteration; and it is random."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.level.mul_(0.9).add_(0.05)
        x = self.norm(self.inner(x)) / self.level
        return F.dropout(F.relu(x), 0.3, self.training)


def odd() -> nn.Module:
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), Memory(), Memory(), *end)


def dropping() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.4), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(6, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: CifarResNet(1, 3, 3, "projection", width=4), "chain": dropping, "odd": odd,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("blocks", {"likelihood": "gaussian"}),
    ("chain", {}),
    ("odd", {"granularity": "weight", "likelihood": "gaussian", "teacher": "posterior"}),
    ("odd", {"precision": "bfloat16", "accumulate": 2}),
]


def run(network: str, **changes: Any) -> dllp.Result:
    """Two epochs of six steps through all phases."""
    torch.manual_seed(0)
    model, x = NETWORKS[network](), torch.randn(48, 3, 8, 8)
    values: dict[str, Any] = dict(
        device="cpu", epochs=2, batch_size=8, keep_flops=0.6, warmup=0, open_until=0.25, ramp_until=0.4,
        discrete_at=0.6, lr=0.02, lr_gates=0.1,
    )  # fmt: skip
    return dllp.prune(model, (x, torch.arange(48) % 3), Config(**(values | changes)))


@pytest.mark.parametrize(("network", "changes"), CASES)
def test_runs_are_equal_bit_for_bit(network: str, changes: dict[str, Any]) -> None:
    plain, again = (run(network, **changes, recompute=flag) for flag in (False, True))
    assert [record["phase"] for record in plain.history] == ["soft", "discrete"]
    for name, value in plain.gates.items():
        assert torch.equal(value, again.gates[name]), name
    for a, b in zip(plain.particles, again.particles, strict=True):
        for mine, other in ((a.network, b.network), (a.reference, b.reference)):
            known = other.state_dict()
            for name, value in mine.state_dict().items():  # running statistics and their counts among them
                assert torch.equal(value, known[name]), name
    assert [r["loss"] for r in plain.history] == [r["loss"] for r in again.history]


# ---- one pass


def kept(network: nn.Module, inner: str, recomputed: bool) -> tuple[bool, list[Tensor], int]:
    """Whether an inner activation is still there after the forward pass; gradients; and how often it was computed."""
    torch.manual_seed(0)
    seen: list[StorageWeakRef] = []
    module = network.get_submodule(inner)
    handle = module.register_forward_hook(lambda m, i, out: seen.append(StorageWeakRef(out.untyped_storage())))
    x = torch.randn(4, 3, 8, 8)
    if recomputed:
        with Recompute()(network, stages(network)):
            output = network(x)
    else:
        output = network(x)
    there = not seen[0].expired()
    gradients = list(torch.autograd.grad(output.square().sum(), list(network.parameters())))
    handle.remove()
    assert all("forward" not in part.__dict__ for part in network.modules()), "nothing is left behind"
    return there, gradients, len(seen)


@pytest.mark.parametrize(
    ("name", "inner"), [("small_resnet", "blocks.1.conv1"), ("chain", "1"), ("small_cnn", "conv1")]
)
def test_what_lies_within_a_stage_is_not_kept(name: str, inner: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [part for k in range(6) for part in (nn.Conv2d(4 if k else 3, 4, 3, padding=1), nn.Tanh())]
        return nn.Sequential(*layers) if name == "chain" else zoo.build(name, 3, 3)

    there, wanted, once = kept(build(), inner, recomputed=False)
    gone, found, twice = kept(build(), inner, recomputed=True)
    assert (there, once) == (True, 1) and (gone, twice) == (False, 2)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_without_gradients_nothing_is_computed_twice() -> None:
    network = zoo.build("small_resnet", 3)
    calls: list[int] = []
    network.get_submodule("blocks.0").register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad(), Recompute()(network, stages(network)):
        network(torch.randn(2, 3, 8, 8))
    assert len(calls) == 1


def test_a_network_without_blocks_is_refused_before_it_trains() -> None:
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 5
    with pytest.raises(StructureError, match="recompute finds no blocks"):
        dllp.prune(networks.Dense(), (x, y), Config(recompute=True, device="cpu", epochs=1, batch_size=4))


@pytest.mark.slow
def test_the_benchmark_shows_what_is_saved() -> None:
    script = Path(__file__).parents[2] / "benchmarks/large.py"
    words = ["--network", "resnet20", "--side", "32", "--batch", "32", "--classes", "10", "--steps", "1"]
    command = [sys.executable, script, *words, "--windows", "1", "--phases", "soft"]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    found = {record["setting"]: record for record in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"plain", "accumulate", "recompute", "both"}
    assert all(record["engine"] == "eager" and record["images_per_s"] > 0 for record in found.values())
    plain = found.pop("plain")["peak_gib"]
    assert all(record["peak_gib"] < 0.8 * plain for record in found.values()), (plain, found)
