"""Controls of the tables: masks by hand, masked and independent networks, moments of a run, drops over epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dllp import zoo
from dllp.structure.groups import discover
from dllp.training.gating import WeightGating
from dllp.training.particles import Particles
from paper import jobs, masks, summary, tables
from paper.jobs import Job, Runner
from paper.summaries import figures_2_5, pretrained
from paper.tables import Row, Table, Variant
from tests.support.short_runs import DIGITS

DATA = replace(DIGITS, train=DIGITS.train.subset(range(512)))
CHANGES = {"batch_size": 128}
MASKED = Job("small_cnn", "masked", "weight", 0.3, epochs=1, changes=CHANGES)

# ---- masks

SHAPES = ((4, 1, 3, 3), (32, 4, 3, 3), (64, 32, 3, 3))
SIZES = (36, 1152, 18432)


def counts(keep: torch.Tensor) -> list[int]:
    return [int(part.sum()) for part in keep.split(list(SIZES))]


def best(scores: torch.Tensor, number: int) -> torch.Tensor:
    keep = torch.zeros(len(scores), dtype=torch.bool)
    keep[scores.argsort(descending=True, stable=True)[:number]] = True
    return keep


def test_a_uniform_mask_has_the_same_density_in_every_layer() -> None:
    scores = masks.random_scores(SHAPES, "uniform", torch.Generator().manual_seed(0))
    assert counts(best(scores, sum(SIZES) // 4)) == [9, 288, 4608]
    other = masks.random_scores(SHAPES, "uniform", torch.Generator().manual_seed(1))
    assert not torch.equal(best(scores, 4905), best(other, 4905))


def test_erk_densities_by_hand() -> None:
    """r = 11/36, 42/1152 and 102/18432: with s = 50 the first layer is whole, by s r > 1, and so is the second."""
    scores = masks.random_scores(SHAPES, "erk", torch.Generator().manual_seed(0))
    for s in (1, 2, 10, 20, 50):
        expected = [min(size, s * sum(shape)) for size, shape in zip(SIZES, SHAPES, strict=True)]
        assert counts(best(scores, sum(expected))) == expected, s


@pytest.mark.parametrize("mask", masks.RANDOM)
@pytest.mark.parametrize(("budget", "keep"), [("flops", 0.45), ("flops", 0.1), ("params", 0.1)])
def test_random_masks_fill_the_budget(mask: masks.Mask, budget: Any, keep: float) -> None:
    network = zoo.build("resnet20", 10)
    structure = discover(network, torch.zeros(2, 3, 32, 32), channels=False)
    particles = Particles([network])
    gating = WeightGating(network, structure, particles.layout, particles.device)
    scores = masks.random_scores(list(gating.fold.shapes.values()), mask, torch.Generator().manual_seed(0))
    chosen = gating.select(scores, budget, keep)
    cost = getattr(gating, budget)
    assert keep - 1e-3 < float(cost.expected(chosen.double())) / cost.dense <= keep
    density = [float(part.double().mean()) for part in chosen.split(gating.fold.sizes)]
    if mask == "uniform":
        assert max(density) - min(density) < 0.01
    else:
        raw = [sum(shape) / shape.numel() for shape in gating.fold.shapes.values()]
        scale = max(d / r for d, r in zip(density, raw, strict=True))
        assert density == pytest.approx([min(1, scale * r) for r in raw], abs=0.01)


def test_a_shuffled_mask_keeps_the_counts_of_every_layer() -> None:
    keep = torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(0)) < 0.3
    moved = masks.shuffled(keep, SIZES, torch.Generator().manual_seed(1))
    assert counts(moved) == counts(keep) and not torch.equal(moved, keep)


# ---- jobs


def test_masked_weights_are_zero_from_the_first_step_to_the_last() -> None:
    zeros: list[int] = []

    def watch(state: Any) -> None:
        zeros.append(sum(int((p == 0).sum()) for p in state.particles.networks[0].parameters() if p.dim() == 4))

    runner = Runner(DATA, on_step=watch, device="cpu")
    for mask in masks.RANDOM:
        zeros.clear()
        line = runner.run(replace(MASKED, mask=mask)).line
        removed = sum(total - kept for kept, total in line["widths"].values())
        assert set(zeros) == {removed} and line["flops_removed"][0] >= 0.7
        assert line["config"]["weight_decay"] == 5e-4 and line["mask"] == mask


def test_a_runs_own_mask_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[torch.Tensor] = []
    started: list[torch.Tensor] = []
    real = jobs.prune

    def watched(*args: Any, **more: Any) -> Any:
        result = real(*args, **more)
        learned.append(result.gates["keep"][0])
        return result

    def masked(present: dict[str, torch.Tensor]) -> Any:
        started.append(torch.cat([mask.flatten() for mask in present.values()]))
        return real_masked(present)

    real_masked = jobs.masked
    monkeypatch.setattr(jobs, "prune", watched)
    monkeypatch.setattr(jobs, "masked", masked)
    runner = Runner(DATA, device="cpu")
    own, moved = (runner.run(replace(MASKED, mask=mask)).line for mask in ("own", "shuffled"))
    assert torch.equal(learned[0], learned[1]), "the run of the same seed"
    assert torch.equal(started[0], learned[0]) and not torch.equal(started[1], learned[1])
    assert own["widths"] == moved["widths"] and len(own["particles"]) == 1
    assert own["digest"] != moved["digest"]


def test_an_ensemble_costs_as_much_as_its_members() -> None:
    thin = Job("small_cnn", "thin", keep=0.5, epochs=1, changes=CHANGES)
    runner = Runner(DATA, device="cpu")
    alone, pair = (runner.run(replace(thin, changes={**CHANGES, "particles": n})).line for n in (1, 2))
    assert pair["macs"] == alone["macs"] * 2 and len(pair["particles"]) == 2
    assert pair["particles"][0] == alone["particles"][0], "they do not interact"
    assert pair["particles"][1]["nll"] != pair["particles"][0]["nll"]
    dense = runner.run(Job("small_cnn", "dense", epochs=1, changes={**CHANGES, "particles": 2})).line
    assert dense["flops_removed"] == [0, 0]


def test_the_first_dense_row_of_a_network_is_the_reference() -> None:
    table = tables.TABLES["table1"]
    lines = []
    for name, accuracy in (("dense", 0.9), ("dense-90", 0.95), ("dense-n2", 0.91), ("given-channel-55", 0.89)):
        (row,) = table.chosen([name])
        figures = {"accuracy": accuracy, "nll": 1.0, "ece": 0.1}
        lines.append({
            "digest": row.job.digest, "seed": 0, "epochs": row.job.epochs, "particles": [figures], "ensemble": figures,
            "flops_removed": [0.5], "params": [1], "dense_params": 2, "flops_of": "it", "train_seconds": 1.0,
            "config": {"precision": "float32"}, "hardware": "cpu", "dllp": "0", "torch": "2", "python": "3",
            "date": "2026-11-17", "pretrain": row.job.pretrain,
        })  # fmt: skip
    rows = {row["name"]: row for row in summary.summarise(table, lines, Variant())["rows"]}
    assert {row["dense_acc_mean"] for row in rows.values()} == {90.0}
    assert rows["given-channel-55"]["drop_mean"] == pytest.approx(1.0)


# ---- moments


def test_lines_of_single_weights_have_their_moments() -> None:
    runner = Runner(DATA, device="cpu")
    job = Job("small_cnn", "dllp", "weight", 0.3, epochs=2, changes=CHANGES)
    ours = runner.run(job).line
    assert [moment["name"] for moment in ours["moments"]] == ["before", "after", "end"]
    assert ours["moments"][-1]["accuracy"] == pytest.approx([p["accuracy"] for p in ours["particles"]])
    other = replace(job, method="baseline", baseline="magnitude-l2", finetune=3)
    theirs = runner.run(other).line
    cut, end = (moment["shapes"][0] for moment in theirs["moments"])
    assert cut["near_zero"] == 0 and cut["kept"] == end["kept"] and cut["ks"] != end["ks"]
    assert cut["ks"] == theirs["distribution"]["whole"]["kept"]["ks"], "distributions are from before fine-tuning"
    table = Table("hand", "By hand", (Row("ours", job, (0,)), Row("theirs", other, (0,))))
    made = summary.summarise(table, [{**line, "date": "2026-11-17"} for line in (ours, theirs)], Variant())
    text = summary.markdown(table, made)
    mean = np.mean([shape["ks"] for shape in ours["moments"][1]["shapes"]])
    assert made["rows"][0]["moments"]["after"]["ks"] == pytest.approx(mean)
    assert f"| theirs | 0.00 | {cut['ks']:.3f} |" in text and "KS at the end" in text
    assert figures_2_5.moments_of_row([{"moments": ours["moments"][:2]}, {}]) is None, "no end, no pair"


# ---- drops over epochs


def test_drops_stand_by_budget_and_epochs() -> None:
    def row(method: str, epochs: int, drop: float, keep: float = 0.45, **more: Any) -> dict[str, Any]:
        own = {"baseline": {"finetune_epochs": epochs, "epochs": 60, "pretrain_epochs": 0},
               "dllp": {"finetune_epochs": 0, "epochs": 60 + epochs, "pretrain_epochs": 60}}[method]  # fmt: skip
        fixed = {"network": "resnet56", "baseline": "l1-filters", "ensemble_gain_mean": 0.25, "drop_se": None}
        return {"method": method, "keep": keep, "drop_mean": drop, **fixed, **own, **more}

    rows = [
        row("dllp", 5, 1.0, drop_se=0.125),
        row("dllp", 30, 0.5),
        row("baseline", 30, 0.75),
        row("dllp", 10, 2, 0.2),
    ]
    first, second, _ = pretrained.grids(rows)
    assert first.splitlines()[0] == "resnet56, 55% of the FLOPs removed:"
    assert first.splitlines()[4:] == [
        "| DLLP, one particle | 1.00 ± 0.12 | – | 0.50 | – |",
        "| DLLP, all particles | -0.25 | – | -0.25 | – |",
        "| L1-norm filters | – | – | 0.75 | – |",
    ]
    assert second.startswith("resnet56, 80% of") and "| DLLP, one particle | – | 2.00 | – | – |" in second
    assert pretrained.grids([row("dllp", 5, 1.0, pretrain_epochs=50)]) == []
