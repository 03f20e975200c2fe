"""Reliability of dense networks, ensembles of them and pruned ones, on clean, corrupted and out-of-distribution data.

Everything is computed from stored predictions. A contender is a way to read a row's runs: each network alone, a run's
particles as an ensemble, or the dense networks of neighbouring seeds as ensembles of two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dllp.report.page import markdown_table
from paper.store import CLEAN, OUTSIDE, Store
from paper.summaries import render
from paper.summaries.figures_3_4 import QUALITIES
from paper.summaries.prediction_metrics import Metrics, Versions, from_probabilities, probabilities, stored_metrics
from paper.summaries.render import Lines, made_by, provenance
from paper.tables import Table, Variant

SHOWN = {
    "accuracy": ("accuracy (%)", 100), "nll": ("NLL", 1), "nll_after_temperature": ("NLL, tempered", 1),
    "brier": ("Brier", 1), "ece": ("ECE (%)", 100), "signed_ece": ("signed ECE (%)", 100), "aurc": ("AURC (%)", 100),
    "mutual_information": ("mutual information", 1), "disagreement": ("disagreement (%)", 100),
    "efficiency": ("efficiency e (%)", 100),
}  # fmt: skip
"""Columns of the first table of each network: heading and factor."""
OUTSIDE_SHOWN = {"auroc": "AUROC (%)", "fpr95": "FPR95 (%)", "auroc_mutual_information": "AUROC by information (%)"}


@dataclass(frozen=True)
class Contender:
    """A line of the comparison."""

    name: str
    row: str
    how: Literal["alone", "together", "pairs"] = "alone"


@dataclass(frozen=True)
class Contest:
    """Contenders on one task; `headline` is the one with targets, measured against the first."""

    title: str
    contenders: tuple[Contender, ...]
    headline: str = ""


CONTESTS = (
    Contest(
        "ResNet-56 at 55% fewer FLOPs",
        (
            Contender("dense", "resnet56-dense"),
            Contender("two dense networks", "resnet56-dense", "pairs"),
            Contender("l1-norm filters, fine-tuned", "resnet56-l1-55"),
            Contender("one DLLP particle", "resnet56-dllp-55"),
            Contender("DLLP, n = 2", "resnet56-dllp-55", "together"),
            Contender("DLLP, n = 4", "resnet56-dllp-55-n4", "together"),
        ),
        "DLLP, n = 2",
    ),
    Contest(
        "VGG-16 at 74.65% fewer FLOPs",
        (
            Contender("dense", "vgg16-dense"),
            Contender("two dense networks", "vgg16-dense", "pairs"),
            Contender("l1-norm filters, fine-tuned", "vgg16-l1-74.65"),
            Contender("one DLLP particle", "vgg16-dllp-74.65"),
            Contender("DLLP, n = 2", "vgg16-dllp-74.65", "together"),
        ),
    ),
    Contest(
        "VGG-11 at 50% fewer FLOPs, trained on six animals; the four vehicles are left out",
        (
            Contender("dense", "animals-dense"),
            Contender("two dense networks", "animals-dense", "pairs"),
            Contender("one DLLP particle", "animals-dllp-50"),
            Contender("DLLP, n = 2", "animals-dllp-50", "together"),
        ),
    ),
)
AIMS = {"ece": 0.01, "nll": 0.205}
"""Targets of the headline without temperature scaling."""
BETTER = ("nll", "ece", "aurc")
"""Metrics in which it should be below the dense network."""


def summarise(table: Table, lines: Lines, variant: Variant, store: Store) -> dict[str, Any]:
    """Finished runs -> the content of summary.json; contenders without runs are left out."""
    members = {row.name: list(table.members(row, lines, variant)) for row in table.rows}
    contests = []
    for contest in CONTESTS:
        rows = [
            row(table, contender, members[contender.row], _measured(contender, members[contender.row], store), variant)
            for contender in contest.contenders
            if len(members.get(contender.row, [])) >= (2 if contender.how == "pairs" else 1)
        ]
        if rows:
            verdicts = {"wanted": _verdicts(contest, rows), "efficiency": _efficiency(rows)}
            contests.append({"title": contest.title, "rows": rows, **verdicts})
    used = [line for found in members.values() for line in found]
    command = " ".join(["dllp", "bench", table.name, *variant.words])
    return {"table": table.name, "title": table.title, "contests": contests, "command": command, **provenance(used)}


def row(
    table: Table, contender: Contender, lines: Lines, measured: Iterable[Metrics], variant: Variant
) -> dict[str, Any]:
    """One contender: mean and standard deviation of every metric over its units, on every version of the data."""
    found = list(measured)
    size = 2 if contender.how == "pairs" else len(lines[0]["macs"]) if contender.how == "together" else 1
    return {
        "name": contender.name,
        "row": contender.row,
        "how": contender.how,
        "networks": size,
        "flops": size * statistics.fmean(m / line["dense_macs"] for line in lines for m in line["macs"]),
        "seeds": [line["seed"] for line in lines],
        "data": {version: _spread([values[version] for values in found]) for version in found[0]},
        "command": " ".join(["dllp", "bench", table.name, "--rows", contender.row, *variant.words]),
    }


def _measured(contender: Contender, lines: Lines, store: Store) -> Iterator[Metrics]:
    """Metrics of each run, or pair of runs, on every version of the data."""
    if contender.how == "pairs":
        for versions, labels in pairs(lines, store):
            yield from_probabilities(versions, labels).ensemble
        return
    for line in lines:
        found = stored_metrics(store, line)
        yield found.ensemble if contender.how == "together" else mean(found.particles)


def pairs(lines: Lines, store: Store) -> Iterator[tuple[Versions, Tensor]]:
    """Predictions of two runs as one ensemble: neighbours in a ring use every run twice; two runs are one pair."""
    runs = [probabilities(store, line["digest"]) for line in lines]
    partners = runs[1:] + runs[:1] if len(runs) > 2 else runs[1:2]
    for (one, labels), (two, _) in zip(runs, partners, strict=False):
        yield {name: torch.cat([one[name], two[name]]) for name in one}, labels


def mean(found: Sequence[Metrics]) -> Metrics:
    """Means over networks of the same run."""
    return {
        version: {name: statistics.fmean(f[version][name] for f in found) for name in found[0][version]}
        for version in found[0]
    }


def _spread(values: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """Mean and standard deviation of every figure that all have."""
    names = [name for name in values[0] if all(name in other for other in values)]
    return {name: render.spread([each[name] for each in values]) for name in names}


def _verdicts(contest: Contest, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts on the headline: its targets, and whether it is better than the first contender."""
    by_name = {row["name"]: row["data"][CLEAN] for row in rows}
    own, dense = by_name.get(contest.headline), by_name.get(contest.contenders[0].name)
    if own is None:
        return []
    aims = [(name, aim, f"{name.upper()} ≤ {aim:g}") for name, aim in AIMS.items()]
    if dense is not None:
        aims += [(name, dense[name]["mean"], f"{name.upper()} below the dense network's") for name in BETTER]
    return [
        {"figure": name, "aim": text, "limit": limit, "found": own[name]["mean"], "reached": own[name]["mean"] <= limit}
        for name, limit, text in aims
    ]


CLEAR = 2.0
"""Standard errors by which a difference counts as one."""


def _efficiency(rows: Sequence[dict[str, Any]]) -> dict[str, float | str | None] | None:
    """Estimation efficiency of two particles against that of two dense networks, which cost more, on clean data.

    The standard error is that of independent values, though each dense network is in two pairs.
    """
    both = {row["how"]: row for row in rows if row["networks"] == 2 and row["how"] != "alone"}
    if set(both) != {"together", "pairs"}:
        return None
    ours, theirs = (both[how]["data"][CLEAN]["efficiency"] for how in ("together", "pairs"))
    difference, errors = ours["mean"] - theirs["mean"], None
    if ours["std"] is not None and theirs["std"] is not None:
        counts = (len(both[how]["seeds"]) for how in ("together", "pairs"))
        errors = math.hypot(*(std / math.sqrt(n) for std, n in zip((ours["std"], theirs["std"]), counts, strict=True)))
    improved = errors is not None and difference > CLEAR * errors
    return {
        "particles": ours["mean"],
        "dense": theirs["mean"],
        "difference": difference,
        "standard_error": errors,
        "verdict": "improved" if improved else "not improved",
    }


def markdown(table: Table, summary: Mapping[str, Any]) -> str:
    """Three tables for each contest: clean data, NLL and ECE under corruption, out-of-distribution inputs."""
    parts = [f"**{table.title}**; mean ± standard deviation over seeds."]
    for contest in summary["contests"]:
        rows = contest["rows"]
        parts.append(f"## {contest['title']}")
        head = ["contender", "FLOPs of dense", *(heading for heading, _ in SHOWN.values()), "seeds", "command"]
        body = [
            [
                row["name"], f"{row['flops']:.2f}",
                *(cell(row["data"][CLEAN], name, factor) for name, (_, factor) in SHOWN.items()),
                str(len(row["seeds"])), f"`{row['command']}`",
            ]
            for row in rows
        ]  # fmt: skip
        parts.append("Clean test data:\n\n" + markdown_table(head, body))
        corrupted = [name for name in QUALITIES if name != CLEAN and name in rows[0]["data"]]
        if corrupted:
            head = ["NLL / ECE (%)", *corrupted]
            body = [[row["name"], *(_both(row["data"][name]) for name in corrupted)] for row in rows]
            parts.append("Corrupted test data:\n\n" + markdown_table(head, body))
        outside = [name for name in rows[0]["data"] if name.startswith(OUTSIDE)]
        if outside:
            names = [name.removeprefix(OUTSIDE) for name in outside]
            head = ["contender", *(f"{name}: {heading}" for name in names for heading in OUTSIDE_SHOWN.values())]
            body = [
                [row["name"], *(cell(row["data"].get(o, {}), key, 100) for o in outside for key in OUTSIDE_SHOWN)]
                for row in rows
            ]
            parts.append(
                "Inputs from elsewhere, told apart by the entropy of the prediction:\n\n" + markdown_table(head, body)
            )
        if contest["efficiency"]:
            parts.append(_efficiency_text(contest["efficiency"]))
        for aim in contest["wanted"]:
            parts.append(f"- {aim['aim']}: {aim['found']:.4f}, {'reached' if aim['reached'] else 'missed'}")
    return "\n\n".join([*parts, made_by(summary)]) + "\n"


def _efficiency_text(found: Mapping[str, Any]) -> str:
    spread = "" if found["standard_error"] is None else f" ± {100 * found['standard_error']:.2f}"
    return (
        f"Estimation efficiency of two particles against two dense networks: {100 * found['particles']:.1f} against "
        f"{100 * found['dense']:.1f}%, {100 * found['difference']:+.2f}{spread} points: {found['verdict']}."
    )


def cell(figures: Mapping[str, Any], name: str, factor: float = 1) -> str:
    return render.plus_minus(figures.get(name), factor, 2 if factor == 100 else 4)


def _both(figures: Mapping[str, Any]) -> str:
    return f"{cell(figures, 'nll')} / {cell(figures, 'ece', 100)}"


def draw(path: Path, summary: Mapping[str, Any]) -> None:
    """NLL and ECE over data quality, a pair of panels for each contest that has corrupted data."""
    contests = [contest for contest in summary["contests"] if QUALITIES[0] in contest["rows"][0]["data"]]
    if not contests:
        return
    with render.panels(path, 2 * len(contests)) as axes:
        for k, contest in enumerate(contests):
            for axis, (name, label) in zip(axes[2 * k : 2 * k + 2], (("nll", "NLL"), ("ece", "ECE")), strict=True):
                for row in contest["rows"]:
                    values = [row["data"][quality][name]["mean"] for quality in QUALITIES]
                    axis.plot(range(len(values)), values, marker="o", label=row["name"])
                axis.set_xticks(range(len(QUALITIES)), QUALITIES, rotation=30, ha="right")
                axis.set_ylabel(label)
                axis.set_title(contest["title"].partition(" at ")[0])
            axes[2 * k].legend(frameon=False, fontsize="x-small")
