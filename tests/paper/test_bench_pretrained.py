"""Jobs that start from a trained network: the same number of epochs in all, the last by the short preset."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import dllp
from dllp.config import Config
from dllp.data import ArrayData, Dataset
from paper import jobs, tables
from paper.jobs import Job, Runner
from paper.summary import markdown, summarise
from paper.tables import Variant

JOB = Job("small_cnn", "dllp", keep=0.5, epochs=3, pretrain=2)


def images(count: int) -> ArrayData:
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(256, (count, 3, 12, 12), generator=generator, dtype=torch.uint8)
    return ArrayData(x, torch.arange(count) % 4, (0.5,) * 3, (0.25,) * 3)


def test_its_epochs_are_shared_out() -> None:
    preset = Config.short(keep_flops=0.5, epochs=1, batch_size=512, beta=0.1)
    assert JOB.config == preset and JOB.config.init == "given"
    assert JOB.dense == Job("small_cnn", "dense", epochs=2) and not JOB.derived
    assert len({JOB.digest, replace(JOB, pretrain=1).digest, replace(JOB, pretrain=0).digest}) == 3


@pytest.mark.parametrize(("epochs", "first"), [(None, 50), (30, 25), (6, 5), (1, 0)])
def test_a_shorter_variant_keeps_the_shares(epochs: int | None, first: int) -> None:
    (row,) = tables.TABLES["pretrained"].chosen(["short-10"])
    job = Variant(epochs=epochs).of(row.job, 0)
    assert (job.epochs, job.pretrain) == (epochs or 60, first)


def test_it_starts_where_the_dense_network_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, torch.Tensor]] = []

    def watched(model: nn.Module, *rest: Any, **more: Any) -> dllp.Result:
        given.append({name: value.clone() for name, value in model.state_dict().items()})
        return dllp.prune(model, *rest, **more)

    monkeypatch.setattr(jobs, "prune", watched)
    runner = Runner(Dataset("images", images(64), images(40), tuple("abcd")), device="cpu")
    outcome = runner.run(JOB)
    trained = runner.dense_networks[JOB.dense.digest]
    assert len(trained.history) == 2 and len(outcome.line["history"]) == 1
    for name, value in trained.model.state_dict().items():
        assert torch.equal(given[0][name], value), name
    spent = [record["seconds"] for record in (*trained.history, *outcome.line["history"])]
    assert outcome.line["train_seconds"] == pytest.approx(sum(spent))


def test_its_row_says_so() -> None:
    table = tables.TABLES["pretrained"]
    figures = {"accuracy": 0.9, "nll": 0.3, "ece": 0.01}
    lines = [
        {
            "digest": planned.job.digest, "seed": 0, "epochs": 60, "pretrain": planned.job.pretrain, "macs": [1.0, 1.0],
            "particles": [figures] * 2, "ensemble": figures, "params": [1, 2], "dense_params": 10, "train_seconds": 1.5,
            "flops_removed": [0.55, 0.55], "flops_of": "it", "config": {"precision": "float32"}, "hardware": "cpu",
            "dllp": "0", "torch": "2", "python": "3", "date": "2026-11-15",
        }
        for planned in table.plan(seeds=[0])
    ]  # fmt: skip
    text = markdown(table, summarise(table, lines, Variant()))
    assert "| DLLP channel | 55.00%" in text
    assert "DLLP channel, the last 10 epochs from a trained network" in text and "the last 20 epochs" in text
