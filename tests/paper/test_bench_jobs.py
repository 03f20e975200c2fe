"""Jobs and the tables that plan them."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dllp
from dllp.baselines import METHODS, find
from dllp.baselines.scaling_factors import Polarization, Slimming
from dllp.baselines.soft import GeometricMedian
from dllp.config import Config
from dllp.data import ArrayData, Dataset
from dllp.errors import ConfigError
from dllp.evaluation import metrics
from dllp.posterior import predict_data
from paper import jobs, tables
from paper.jobs import Job, Runner
from paper.summary import open_store, pretrained_markdown, summarise
from paper.tables import Quoted, Variant


def test_a_digest_names_what_is_computed() -> None:
    job = Job("resnet20", "dllp", keep=0.45)
    others = [
        replace(job, network="resnet56"), replace(job, method="thin"), replace(job, granularity="weight"),
        replace(job, keep=0.44), replace(job, seed=1), replace(job, epochs=59), replace(job, validation=5000),
        replace(job, changes={"beta": 0.2}),
    ]  # fmt: skip
    assert len({job.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert job.digest == Job("resnet20", "dllp", keep=0.45).digest and len(job.digest) == 16
    assert replace(job, changes={"beta": job.config.beta}).digest == job.digest, "a change that changes nothing"
    assert replace(job, changes={"precision": "bfloat16", "device": "cpu"}).digest == job.digest, "not what, but how"
    two = {"beta": 0.2, "lr": 0.3}
    assert replace(job, changes=two).digest == replace(job, changes=dict(reversed(two.items()))).digest


def test_fields_added_later_leave_old_digests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("resnet20", "dllp", keep=0.45)
    old = replace(job, changes={"patience": 3}).digest
    monkeypatch.setattr(jobs, "LATER", jobs.LATER | {"patience": 0})
    new = job.digest
    monkeypatch.setattr(jobs, "LATER", jobs.LATER | {"average_from": -1.0})
    assert job.digest == new, "another value than the neutral one still counts"
    assert replace(job, changes={"patience": 3}).digest == old != new


def test_a_budget_of_weights_replaces_that_of_flops() -> None:
    row = tables.TABLES["table1"].chosen(["resnet20-dllp-weight"])[0]
    config = row.job.config
    assert (config.keep_flops, config.keep_params, config.granularity) == (None, 0.0988, "weight")


# ---- tables


def test_every_row_stands_with_its_seeds_and_targets() -> None:
    one, two = tables.TABLES["table1"], tables.TABLES["table2"]
    seeds = {row.name: len(row.seeds) for row in (*one.rows, *two.rows)}
    assert {name for name, count in seeds.items() if count == 5} == {
        "dense", "dllp-channel-55", "dllp-channel-74.65", "given-channel-55",
    }  # fmt: skip
    assert set(seeds.values()) == {3, 5}
    keeps = {row.name: row.job.keep for row in (*one.rows, *two.rows)}
    assert keeps["dllp-channel-55"] == keeps["thin-55"] == keeps["magnitude-55"] == keeps["dllp-weight-55"] == 0.45
    assert (keeps["dllp-channel-70"], keeps["dllp-weight-90"], keeps["dllp-channel-74.65"]) == (0.3, 0.1, 0.2535)
    assert (keeps["tuned-fpgm-53"], keeps["tuned-sss-55"], keeps["tuned-cp-50"]) == (0.47, 0.45, 0.5)
    assert keeps["tuned-magnitude-l1-90"] == keeps["tuned-magnitude-l2-90"] == keeps["dllp-weight-90"]
    assert {row.job.network for row in one.rows} == {"resnet56", "resnet20"}
    assert {row.job.network for row in two.rows} == {"vgg16_bn"}
    for table in (one, two):
        assert all(row.job.config.batch_size == 512 for row in table.rows)
        longer = {row.name: row.job.epochs for row in table.rows if row.job.epochs != 60}
        given = {row.name: row.job.epochs for row in table.rows if row.job.pretrain}
        assert longer == given | {"dense-90": 90} and {row.job.pretrain for row in table.rows} == {0, 60}
        assert set(given.values()) == {90, 180} if table is one else {90}
        tuned = {find(row.job.baseline).name: row for row in table.rows if row.name.startswith("tuned-")}
        assert set(tuned) == set(METHODS) and {row.job.finetune for row in tuned.values()} == {30}
        percents = {name: {r.name.rpartition("-")[2] for r in table.rows if r.name.startswith(f"tuned-{name}-")}
                    for name in ("ccp", "dcp", "amc")}  # fmt: skip
        assert percents == (
            {"ccp": {"47", "55"}, "dcp": {"50", "55"}, "amc": {"50", "55"}} if table is one
            else {"ccp": {"74.65"}, "dcp": {"50", "74.65"}, "amc": {"74.65"}}
        )  # fmt: skip
        chosen = {"table1": Polarization(strength=3e-4), "table2": Polarization(strength=3e-5, least=0.2)}[table.name]
        assert find(tuned["polarization"].job.baseline) == chosen
        kept = {row.name for row in table.rows if row.predictions == "kept"}
        assert kept == {n for n in (r.name for r in table.rows) if n == "dense" or n.startswith("dllp-channel")}


def test_quoted_rows_are_the_papers() -> None:
    one, two = tables.TABLES["table1"].quoted, tables.TABLES["table2"].quoted
    assert (len(one), len(two)) == (9, 6)
    assert one[-1] == Quoted("DLLP", "resnet56", 92.80, 55, 0.04)
    assert two[-1] == Quoted("DLLP", "vgg16_bn", 92.80, 74.65, 1.24)
    assert {row.method: row.drop for row in one}["FPGM"] == 0.1 and {row.method: row.drop for row in two}["RNP"] == 0.85


@pytest.mark.parametrize("name", ["table1", "table2"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_share_the_jobs_and_keep_dense_networks_at_hand(name: str, count: int) -> None:
    table = tables.TABLES[name]
    whole = [planned.job.digest for planned in table.plan()]
    assert len(set(whole)) == len(whole) == sum(len(row.seeds) for row in table.rows)
    shards = [table.plan(shard=(i + 1, count)) for i in range(count)]
    assert sorted(planned.job.digest for shard in shards for planned in shard) == sorted(whole)
    for shard in shards:
        places = [whole.index(planned.job.digest) for planned in shard]
        assert places == sorted(places), "every share keeps the order"
        for i, planned in enumerate(shard):
            if planned.job.derived:
                before = [earlier.job.digest for earlier in shard[:i]]
                assert planned.job.dense.digest in before, "the network it starts from was trained before"
    own = [[p.job for p in shard if p.job.pretrain or not p.job.derived] for shard in shards]
    trained = [sum(job.config.particles for job in jobs) for jobs in own]
    work = [n + sum(p.job.finetune > 0 for p in shard) / 2 for n, shard in zip(trained, shards, strict=True)]
    assert max(work) - min(work) <= 3


def test_plans_follow_the_options() -> None:
    table = tables.TABLES["table1"]
    plan = table.plan(["dense", "dllp-*-55"], [4, 0, 4], Variant(epochs=2, validation=100))
    assert [(p.row.name, p.job.seed) for p in plan] == [
        (name, seed) for seed in (0, 4) for name in ("dense", "dllp-channel-55", "dllp-weight-55")
    ]
    assert all(p.job.epochs == 2 and p.job.validation == 100 for p in plan)
    assert open_store(Path("r"), table, Variant()).folder == Path("r/table1")
    names = {open_store(Path("r"), table, Variant(e, v)).folder.name for e in (None, 2) for v in (0, 100)}
    assert len(names) == 4
    with pytest.raises(ConfigError, match="no row 'nothing'"):
        table.plan(["nothing"])
    with pytest.raises(ConfigError, match="epochs = 0"):
        Variant(epochs=0)
    with pytest.raises(ConfigError, match="validation = -1"):
        Variant(validation=-1)


def test_settings_reach_the_jobs_that_have_them() -> None:
    given = tables.settings(["strength=1e-5", "network=resnet20", "slab_bounds=[1.0, 30.0]", "prior=laplace"])
    assert given == {"strength": 1e-5, "network": "resnet20", "slab_bounds": (1.0, 30.0), "prior": "laplace"}
    table = tables.TABLES["table1"]
    rows = {row.name: row.job for row in table.set({**given, "finetune_lr": 0.1}).rows}
    slimming, weight, fpgm = rows["tuned-slimming-48"], rows["dllp-weight-90"], rows["tuned-fpgm-53"]
    assert find(slimming.baseline) == Slimming(strength=1e-5) and find(fpgm.baseline) == GeometricMedian()
    assert {job.network for job in rows.values()} == {"resnet20"} and slimming.finetune_lr == 0.1
    assert weight.config.slab_bounds == (1.0, 30.0) and weight.config.prior == "laplace"
    assert slimming.dense == fpgm.dense, "the dense network has no strength"
    again = table.set({"strength": 1e-3}).set({"strength": 1e-4})
    both = {row.name: row.job for row in again.rows}
    assert both["tuned-slimming-48"].baseline == "slimming:strength=0.0001", "the last one counts, and stands alone"
    fewer = {row.name: row.job for row in table.set({"least": 0.1}).rows}
    assert find(fewer["tuned-slimming-48"].baseline) == Slimming(strength=1e-5, least=0.1)
    variant = Variant(30, 5000, given)
    assert (
        variant.suffix == "-validation5000-epochs30-network-resnet20-prior-laplace-slab_bounds-1.0_30.0-strength-1e_05"
    )
    assert Variant(30, 5000, dict(reversed(given.items()))).suffix == variant.suffix, "in whatever order they come"
    words = shlex.split(" ".join(variant.words))
    assert words[:4] == ["--epochs", "30", "--validation", "5000"] and tables.settings(words[5:]) == given
    assert table.set({}) == table and Variant().words == []


def test_no_two_jobs_of_both_tables_are_the_same() -> None:
    own = [table for table in tables.TABLES.values() if not table.sources]
    jobs = [(table.data, planned.job.digest) for table in own for planned in table.plan()]
    assert all(a != b for a, b in itertools.combinations(jobs, 2))


# ---- jobs that start from a trained network: the last epochs by the short preset

JOB = Job("small_cnn", "dllp", keep=0.5, epochs=3, pretrain=2)


def images(count: int) -> ArrayData:
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(256, (count, 3, 12, 12), generator=generator, dtype=torch.uint8)
    return ArrayData(x, torch.arange(count) % 4, (0.5,) * 3, (0.25,) * 3)


def test_its_epochs_are_shared_out() -> None:
    preset = Config.short(
        keep_flops=0.5,
        epochs=1,
        particles=2,
        batch_size=512,
        beta=0.1,
        round_to=1,
        lr=0.1,
        lr_end=0.001,
        lr_gates=0.05,
    )
    assert JOB.config == preset and JOB.config.init == "given"
    assert JOB.dense == Job("small_cnn", "dense", epochs=2) and JOB.derived
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
    predicted = predict_data(trained.posterior, runner.data.test, torch.device("cpu"))
    assert outcome.line["start"] == metrics.summary(predicted.members[0], predicted.labels)


def test_its_row_says_so() -> None:
    table = tables.TABLES["pretrained"]
    figures = {"accuracy": 0.9, "nll": 0.3, "ece": 0.01}
    lines = [
        {
            "digest": planned.job.digest, "seed": 0, "epochs": planned.job.epochs, "pretrain": planned.job.pretrain,
            "macs": [1.0, 1.0], "finetune": planned.job.finetune,
            "particles": [figures] * 2, "ensemble": figures, "params": [1, 2], "dense_params": 10, "train_seconds": 1.5,
            "flops_removed": [0.55, 0.55], "flops_of": "it", "config": {"precision": "float32"}, "hardware": "cpu",
            "dllp": "0", "torch": "2", "python": "3", "date": "2026-11-15",
        }
        for planned in table.plan(seeds=[0])
    ]  # fmt: skip
    text = pretrained_markdown(table, summarise(table, lines, Variant()))
    assert text.count("\n| DLLP, one particle | 0.00 | 0.00 | 0.00 | 0.00 |") == 5, "a table for each budget"
    assert "| DLLP channel | 55.00%" in text and "last 30 epochs" not in text, "what is above is not below"
    old = "DLLP channel, short preset of 0.1.0, the last"
    assert f"{old} 10 epochs from a trained network" in text and f"{old} 20 epochs" in text


def test_the_old_short_preset_is_spelled_out() -> None:
    rows = {row.name: row.job for row in tables.TABLES["pretrained"].rows}
    assert rows["short-10"].config == Config(
        keep_flops=0.45, epochs=10, lr=0.02, lr_end=0.0002, warmup=0.5, lr_gates=0.05, open_until=0.02, ramp_until=0.3,
        discrete_at=0.45, particles=2, batch_size=512, round_to=1, teacher="off",
    )  # fmt: skip


# ---- rows that are compared with those of a trained network


def test_what_is_given_starts_from_the_tables_own_dense_network() -> None:
    for name, given in (("table1", 8), ("table2", 2), ("table3", 2)):
        rows = tables.TABLES[name].rows
        dense = {row.job.digest for row in rows if row.job.method == "dense"}
        found = [row for row in rows if row.job.pretrain]
        assert len(found) == given and {row.job.dense.digest for row in found} <= dense
        assert all(row.job.config.teacher == "given" and row.wanted for row in found)
        assert {row.job.config.epochs for row in found} <= {30, 120}
        branches = {row.name: row.job.config.usual_units for row in found}
        assert all((units == "both") == ("-both-" in name) for name, units in branches.items())


def test_taught_methods_start_from_networks_that_nobody_taught() -> None:
    one = {row.name: row.job for row in tables.TABLES["table1"].rows}
    for name in tables.BEST:
        job = one[f"taught-{name}-55"]
        assert job.config.teacher == "given" and job.dense.digest == one["dense"].digest and job.keep == 0.45
    assert one["rewound-l1-filters-55"].finetune_lr == 1.0 and one["rewound-l1-filters-55"].config.teacher == "off"
    spent = {row.name: row.job.digest for row in tables.TABLES["pretrained"].rows}
    assert spent["dllp-55-30"] == one["given-channel-55"].digest, "one run serves both tables"
    assert spent["l1-filters-55-30"] == one["taught-l1-filters-55"].digest


@pytest.mark.parametrize("network", ["resnet56", "vgg16_bn", "vgg11_bn"])
def test_the_papers_letter_is_the_papers_preset(network: str) -> None:
    rows = [row for table in tables.TABLES.values() for row in table.rows if row.name.startswith("paper-weight")]
    (config,) = [row.job.config for row in rows if row.job.network == network]
    budget = {"keep_flops": config.keep_flops, "keep_params": config.keep_params}
    assert config == Config.paper(**budget)


@pytest.mark.parametrize(
    ("table", "parts"), [("ablation", ("channel", "weight", "resnet56")), ("ablation-digits", ("channel", "weight"))]
)
def test_an_ablation_changes_one_setting_at_a_time(table: str, parts: tuple[str, ...]) -> None:
    rows = {row.name: row.job for row in tables.TABLES[table].rows}
    for part in parts:
        own = rows[f"{part}-recipe"].config.resolved().as_dict()
        found: dict[str, set[Any]] = {}
        for name, job in rows.items():
            if name.startswith(part) and job.method == "dllp" and name != f"{part}-recipe":
                config = job.config.resolved().as_dict()
                ((factor, value),) = [(key, value) for key, value in config.items() if value != own[key]]
                found.setdefault(factor, set()).add(value)
        factors = tables.FEWER if part == "resnet56" else tables.FACTORS
        assert {name: values | {own[name]} for name, values in found.items()} == {
            name: set(tables.FACTORS[name]) for name in factors
        }


def test_the_ablation_of_the_headline_is_the_headlines_row() -> None:
    rows = {row.name: row.job for row in tables.TABLES["ablation"].rows}
    assert rows["resnet56-recipe"].digest == Job("resnet56", "dllp", keep=0.45).digest
