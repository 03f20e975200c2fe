"""Coloured digits: does pruning keep or drop a spurious feature, and does the ensemble notice that it misleads?

Computed from stored predictions. Reliance on colour is what accuracy loses from colours as in training to reversed
ones; "by colour" is the share of reversed images that get the class of their colour. An ensemble notices where it is
less certain than on colours as in training: AUROC of telling both apart by entropy, or by mutual information.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dllp.evaluation.evaluate import classified, separated
from paper import render
from paper.coloured_digits import CORRELATED, RANDOM, REVERSED, RULES, mirrored
from paper.prediction_metrics import Metrics, Versions, probabilities
from paper.reliability import CLEAR, Contender, cell, mean, pairs, row
from paper.render import Lines, made_by, markdown_table, provenance
from paper.store import CLEAN, Store
from paper.tables import Table, Variant

CONTENDERS = (
    Contender("dense", "dense"),
    Contender("two dense networks", "dense", "pairs"),
    *(
        contender
        for removed in ("50", "80")
        for contender in (
            Contender(f"thin from scratch, {removed}% fewer FLOPs", f"thin-{removed}"),
            Contender(f"one particle, {removed}%", f"dllp-{removed}"),
            Contender(f"two particles, {removed}%", f"dllp-{removed}", "together"),
        )
    ),
)
NAMES = {CLEAN: "as in training", REVERSED: "reversed", RANDOM: "random"}
OTHERS = (REVERSED, RANDOM)
RELIANCE, BY_COLOUR = "reliance", "by_colour"


def summarise(table: Table, lines: Lines, variant: Variant, store: Store) -> dict[str, Any]:
    """Finished runs -> the content of summary.json; contenders without runs are left out."""
    members = {each.name: list(table.members(each, lines, variant)) for each in table.rows}
    rows = [
        row(table, contender, found, _measured(contender, found, store), variant)
        for contender in CONTENDERS
        if len(found := members.get(contender.row, [])) >= (2 if contender.how == "pairs" else 1)
    ]
    used = [line for found in members.values() for line in found]
    command = " ".join(["dllp", "bench", table.name, *variant.words])
    named = {"table": table.name, "title": table.title, "correlated": CORRELATED}
    return {**named, "rows": rows, "verdicts": _verdicts(rows), "command": command, **provenance(used)}


def _measured(contender: Contender, lines: Lines, store: Store) -> Iterator[Metrics]:
    """Metrics of each run, or pair of runs, on every version of the test set."""
    if contender.how == "pairs":
        yield from (metrics(*found) for found in pairs(lines, store))
        return
    for line in lines:
        versions, labels = probabilities(store, line["digest"])
        if contender.how == "together":
            yield metrics(versions, labels)
        else:
            alone = ({name: p[i : i + 1] for name, p in versions.items()} for i in range(len(line["particles"])))
            yield mean([metrics(each, labels) for each in alone])


def metrics(versions: Versions, labels: Tensor) -> Metrics:
    """(n, B, C) probabilities by version, (B,) -> metrics of their mean on each."""
    found = {name: classified(versions[name], labels) for name in RULES}
    for name in OTHERS:
        found[name] |= separated(versions[name], versions[CLEAN])
        found[name][RELIANCE] = found[CLEAN]["accuracy"] - found[name]["accuracy"]
    answers = versions[REVERSED].mean(0).argmax(1)
    found[REVERSED][BY_COLOUR] = float((answers == mirrored(labels)).double().mean())
    return found


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Reliance on colour of each contender against the dense network's."""
    if not rows or rows[0]["row"] != "dense":
        return []
    dense, *others = ((each["name"], each["data"][REVERSED][RELIANCE], len(each["seeds"])) for each in rows)
    found = []
    for name, value, count in others:
        difference, error = value["mean"] - dense[1]["mean"], None
        if value["std"] is not None and dense[1]["std"] is not None:
            error = math.hypot(value["std"] / math.sqrt(count), dense[1]["std"] / math.sqrt(dense[2]))
        clear = error is not None and abs(difference) > CLEAR * error
        verdict = ("more than" if difference > 0 else "less than") if clear else "not clearly other than"
        found.append({"name": name, "difference": difference, "standard_error": error, "verdict": verdict})
    return found


# ---- Markdown and picture


def markdown(table: Table, summary: Mapping[str, Any]) -> str:
    """Accuracies, then uncertainties, then the verdicts."""
    rows = summary["rows"]
    head = [
        "contender",
        "FLOPs of dense",
        *(f"accuracy, {name} (%)" for name in NAMES.values()),
        "by colour (%)",
        "seeds",
    ]
    accuracies = [
        [
            each["name"], f"{each['flops']:.2f}", *(cell(each["data"][name], "accuracy", 100) for name in RULES),
            cell(each["data"][REVERSED], BY_COLOUR, 100), str(len(each["seeds"])),
        ]
        for each in rows
    ]  # fmt: skip
    shown = {"entropy": "entropy", "epistemic": "Σ Var p"}
    uncertain = [
        [each["name"], *(cell(each["data"][name], metric) for metric in shown for name in RULES)] for each in rows
    ]
    by = {"auroc": "entropy", "auroc_mutual_information": "information"}
    noticed = [
        [each["name"], *(cell(each["data"][name], metric, 100) for name in OTHERS for metric in by)] for each in rows
    ]
    parts = [
        f"**{table.title}**; mean ± standard deviation over seeds. {summary['correlated']:.0%} of the training images "
        "are given the colour of their class, the others one of ten at random; reversed: that of class 9 − y. By "
        "colour: reversed images that get the class of their colour.",
        markdown_table(head, accuracies),
        "Uncertainty, mean over the images (nats; Σ Var p of an ensemble):",
        markdown_table(
            ["contender", *(f"{label}, {name}" for label in shown.values() for name in NAMES.values())], uncertain
        ),
        "AUROC (%) of telling these images from those with colours as in training:",
        markdown_table(
            ["contender", *(f"{NAMES[name]}, by {label}" for name in OTHERS for label in by.values())], noticed
        ),
    ]
    if summary["verdicts"]:
        parts += [
            "Accuracy lost by reversing the colours, against the dense network:",
            "\n".join(map(_told, summary["verdicts"])),
        ]
    return "\n\n".join([*parts, made_by(summary)]) + "\n"


def _told(verdict: Mapping[str, Any]) -> str:
    error = "" if verdict["standard_error"] is None else f" ± {100 * verdict['standard_error']:.2f}"
    return f"- {verdict['name']}: {verdict['verdict']} it ({100 * verdict['difference']:+.2f}{error} points)"


def draw(path: Path, summary: Mapping[str, Any]) -> None:
    """Accuracy and entropy of every contender on the three versions."""
    with render.panels(path, 2) as axes:
        for axis, metric in zip(axes, ("accuracy", "entropy"), strict=True):
            for each in summary["rows"]:
                values = [each["data"][name][metric]["mean"] for name in RULES]
                axis.plot(range(len(values)), values, marker="o", label=each["name"])
            axis.set_xticks(range(len(NAMES)), NAMES.values())
            axis.set_xlabel("colours")
            axis.set_ylabel(metric)
        axes[0].legend(frameon=False, fontsize="xx-small")
