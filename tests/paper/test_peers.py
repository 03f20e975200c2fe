"""Rows of other packages: planned, refused where a package is missing, and run where it is installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from dllp.config import Config
from dllp.errors import ConfigError
from dllp.structure.groups import discover
from dllp.zoo import build, small_cnn
from paper import tables
from paper.jobs import Job, Runner
from paper.peers import PEERS, Task, TorchPruning
from tests.support.short_runs import DIGITS

cuda = pytest.mark.cuda


def job(name: str, network: str = "small_cnn", keep: float = 0.4) -> Job:
    changes = {"batch_size": 64, "lr": 0.1}
    return Job(network, "peer", keep=keep, epochs=4, finetune=6, peer=name, changes=changes)


def test_both_tables_plan_every_peer_from_their_dense_network() -> None:
    for name, percent in (("table1", "55"), ("table2", "74.65")):
        table = tables.TABLES[name]
        rows = {row.name: row.job for row in table.rows if row.job.method == "peer"}
        assert set(rows) == {f"peer-{peer}-{percent}" for peer in PEERS}
        dense = next(row.job for row in table.rows if row.name == "dense")
        for found in rows.values():
            assert found.derived and found.dense.digest == dense.digest
            assert found.config.keep_flops == tables.kept(percent) and found.finetune == 30
        assert len({found.digest for found in rows.values()}) == len(PEERS)


def test_a_missing_package_is_named_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = TorchPruning()
    monkeypatch.setattr(type(missing), "module", "nowhere_to_be_found")
    with pytest.raises(ConfigError, match=r"MagnitudePruner is not installed .*: pip install torch-pruning"):
        missing.cut(nn.Linear(2, 2), Task(None, torch.zeros(1, 2), None, 1.0))  # pyright: ignore


def installed(name: str) -> bool:
    return importlib.util.find_spec(PEERS[name].module.partition(".")[0]) is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_a_row_on_digits(name: str, device: str) -> None:
    if not installed(name):
        pytest.skip(f"needs {PEERS[name].package}")
    runner = Runner(DIGITS, device=device, precision="float32" if device == "cpu" else "bfloat16")
    line = runner.run(job(name)).line
    assert 0.6 <= line["flops_removed"][0] < 0.8 and line["params"][0] < line["dense_params"]
    early = 2 if PEERS[name].strength else 0
    assert [record["epoch"] for record in line["history"]] == [*range(1, early + 1), *range(1, 7 - early)]
    assert line["particles"][0]["accuracy"] > max(0.7, line["before"]["accuracy"])
    dense = runner.dense_networks[job(name).dense.digest].history
    spent = sum(record["seconds"] for record in dense)
    assert line["train_seconds"] == pytest.approx(spent + line["seconds_from_dense"])
    assert line["seconds_from_dense"] > sum(record["seconds"] for record in line["history"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_regulariser_is_in_the_gradient_of_every_step() -> None:
    """That of BNScalePruner is its strength times the sign of every scale."""
    pytest.importorskip("torch_pruning")
    peer, model, seen = PEERS["bn-scale"], small_cnn(), []
    assert isinstance(peer, TorchPruning)
    x = DIGITS.test.inputs(slice(0, 2))
    config = Config(epochs=1, particles=1, batch_size=64, init="given", device="cpu")
    train = peer.regularised(Task(discover(model, x), x, None, 0.0))
    state = train(model, DIGITS.train.subset(range(128)), config, on_start=seen.append) and seen[0]
    (found,) = state.penalty(state.particles.rows)
    assert float(state.particles.networks[0].bn1.num_batches_tracked) > 0, "norms train"
    for name, parameter in state.particles.networks[0].named_parameters():
        wanted = (
            5e-4 * parameter.detach().sign() if name.startswith("bn") and name.endswith("weight") else 0 * parameter
        )
        assert torch.equal(state.particles.layout.segments[name].view(found), wanted.detach())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if isinstance(peer, TorchPruning)])
def test_networks_of_the_tables_are_cut_to_their_budgets(name: str) -> None:
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    for network, keep in (("resnet20", 0.45), ("vgg11_bn", 0.2535)):  # the first has zero-padded shortcuts
        model, x = build(network, num_classes=10).eval(), torch.randn(2, 3, 32, 32)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight)  # scales that are all alike go all together
        structure = discover(model, x)
        budget = keep * structure.flops.dense
        small = PEERS[name].cut(model, Task(structure, x, None, budget))
        assert 0.9 * budget < discover(small, x, channels=False).flops.dense <= budget
        assert small(x).shape == (2, 10)
