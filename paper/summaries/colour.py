"""Coloured digits: does pruning keep or drop a spurious feature, and does the ensemble notice that it misleads?

Computed from stored predictions. Reliance on colour is what accuracy loses from colours as in training to reversed
ones; "by colour" is the share of reversed images that get the class of their colour. An ensemble notices where it is
less certain than on colours as in training: AUROC of telling both apart by entropy, or by mutual information. The unit
of every mean is a painting.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllp.evaluation.evaluate import class_uncertainty, classified, separation
from dllp.report.page import markdown_table
from paper.coloured_digits import CORRELATED, RANDOM, REVERSED, RULES, mirrored, painting
from paper.store import CLEAN, Store
from paper.summaries import render
from paper.summaries.prediction_metrics import Metrics, Versions, probabilities
from paper.summaries.reliability import CLEAR, Contender, cell, mean, row
from paper.summaries.render import Lines, made_by, provenance
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
    rows = []
    for contender in CONTENDERS:
        measured = _measured(contender, members.get(contender.row, []), store)
        if measured:
            found = row(table, contender, members[contender.row], measured.values(), variant)
            lost = {str(number): values[REVERSED][RELIANCE] for number, values in measured.items()}
            rows.append({**found, "lost_by_painting": lost})
    used = [line for found in members.values() for line in found]
    command = " ".join(["dllp", "bench", table.name, *variant.words])
    named = {"table": table.name, "title": table.title, "correlated": CORRELATED}
    return {**named, "rows": rows, "verdicts": _verdicts(rows), "command": command, **provenance(used)}


def _measured(contender: Contender, lines: Lines, store: Store) -> dict[int, Metrics]:
    """Painting -> metrics on every version of its test set, means over the networks or ensembles that saw it."""
    found = {}
    for number, group in groupby(lines, lambda line: painting(line["seed"])):
        runs, labels = [], torch.empty(0)
        for line in group:
            versions, labels = probabilities(store, line["digest"])
            runs.append(versions)
        if contender.how == "pairs":
            runs = [{name: torch.cat([each[name] for each in runs]) for name in RULES}] if len(runs) > 1 else []
        elif contender.how == "alone":
            runs = [{name: each[name][i : i + 1] for name in RULES} for each in runs for i in range(len(each[CLEAN]))]
        if runs:
            found[number] = mean([metrics(each, labels) for each in runs])
    return found


def metrics(versions: Versions, labels: Tensor) -> Metrics:
    """(n, B, C) probabilities by version, (B,) -> metrics of their mean on each."""
    found = {name: classified(versions[name], labels) for name in RULES}
    for name in OTHERS:
        found[name] |= separation(class_uncertainty(versions[name]), class_uncertainty(versions[CLEAN]))
        found[name][RELIANCE] = found[CLEAN]["accuracy"] - found[name]["accuracy"]
    answers = versions[REVERSED].mean(0).argmax(1)
    found[REVERSED][BY_COLOUR] = float((answers == mirrored(labels)).double().mean())
    return found


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Reliance on colour of each contender less the dense network's, over the paintings that both saw."""
    if not rows or rows[0]["row"] != "dense":
        return []
    dense, found = rows[0]["lost_by_painting"], []
    for each in rows[1:]:
        own = each["lost_by_painting"]
        differences = [own[number] - dense[number] for number in own if number in dense]
        if len(differences) > 1:
            difference = statistics.fmean(differences)
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            side = "more" if difference > 0 else "less"
            verdict = side if abs(difference) > CLEAR * error else "not clearly other"
            named = {"name": each["name"], "paintings": len(differences)}
            found.append({**named, "difference": difference, "standard_error": error, "verdict": verdict})
    return found


# ---- Markdown and picture


def markdown(table: Table, summary: Mapping[str, Any]) -> str:
    """Accuracies, then uncertainties, then the verdicts."""
    rows = summary["rows"]
    head = [
        "contender", "FLOPs of dense", *(f"accuracy, {name} (%)" for name in NAMES.values()), "by colour (%)",
        "signed ECE, reversed (%)", "paintings",
    ]  # fmt: skip
    accuracies = [
        [
            each["name"], f"{each['flops']:.2f}", *(cell(each["data"][name], "accuracy", 100) for name in RULES),
            *(cell(each["data"][REVERSED], metric, 100) for metric in (BY_COLOUR, "signed_ece")),
            str(len(each["lost_by_painting"])),
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
        f"**{table.title}**; mean ± standard deviation over paintings, each with colours of its own for the classes. "
        f"{summary['correlated']:.0%} of the training images are given the colour of their class, the others one of "
        "ten at random; reversed: that of class 9 − y. By colour: reversed images that get the class of their colour.",
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
        text = (
            "Accuracy lost by reversing the colours, against the dense network of the same painting (± standard error):"
        )
        parts += [text, "\n".join(map(_told, summary["verdicts"]))]
    return "\n\n".join([*parts, made_by(summary)]) + "\n"


def _told(verdict: Mapping[str, Any]) -> str:
    points = f"{100 * verdict['difference']:+.2f} ± {100 * verdict['standard_error']:.2f} points"
    return f"- {verdict['name']}: {verdict['verdict']} ({points})"


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
