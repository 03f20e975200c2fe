"""From finished runs to files: summary.json, table.md and a figure's picture.svg; here for tables.

Accuracies, drops, calibration errors and FLOPs are in percent, NLL in nats, times in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dllp import files
from dllp.baselines import find_any as find_baseline
from dllp.errors import ArtifactError
from dllp.report.page import markdown_table
from paper.jobs import data_text, epochs_after_cut
from paper.store import FIGURES, SUPERSEDED, WHY, Store
from paper.summaries import ablation, colour, figures_2_5, figures_3_4, pretrained, reliability, render
from paper.summaries.render import Lines, distinct, made_by, provenance
from paper.tables import Quoted, Row, Table, Variant

SUMMARY, MARKDOWN, PICTURE = "summary.json", "table.md", "picture.svg"
UNITS = {"acc, drop, gain, flops_removed, params_kept, ece": "percent", "nll": "nats", "train_seconds": "seconds"}
STRAW = 0.5
"""A baseline within so many points of what its paper states, to either side, counts as reproduced."""
METHODS = {
    "dense": "dense",
    "dllp": "DLLP",
    "thin": "thin from scratch",
    "magnitude": "magnitude, not fine-tuned",
    "random": "random, not fine-tuned",
}
EXPLANATION = (
    "Accuracy: mean ± standard deviation over all particles of all seeds. Drop: against the network that each run "
    "started from, where it says so, else against the mean of the dense runs; ± its standard error over seeds. All: "
    "the mean prediction of a run's particles, which costs all of them. FLOPs are multiply-accumulates, of what the "
    "row names. A target counts as reached by its mean only, whatever the standard error."
)


def summarise(table: Table, lines: Lines, variant: Variant, store: Store | None = None) -> dict[str, Any]:
    """Finished runs -> the content of summary.json; runs that belong to no row, or to another recipe, are left out."""
    members = {row.name: list(table.members(row, lines, variant)) for row in table.rows}
    whole = [row for row in table.rows if row.job.method == "dense"]
    dense = {row.job.network: members[row.name] for row in reversed(whole)}  # the first of a network is the reference
    rows = [
        summarise_row(row, members[row.name], dense.get(row.job.network, []), () if variant.suffix else row.wanted)
        for row in table.rows
        if members[row.name]
    ]
    thin = {row.name: thin_behind(row, table, members) for row in table.rows if row.job.method == "thin"}
    used = [line for found in members.values() for line in found]
    data = distinct(data_text(line["data"], variant.validation) for line in used if "data" in line)
    return {
        "table": table.name,
        "title": table.title,
        "rows": rows,
        "quoted": [vars(quoted) for quoted in table.quoted],
        **({"thin": {name: found for name, found in thin.items() if found}} if any(thin.values()) else {}),
        "evaluated_on": "validation" if variant.validation else "test",
        "units": UNITS,
        **({"data": data} if data else {}),
        "command": _command(table, rows, used, variant),
        **provenance(used),
    }


def summarise_row(row: Row, lines: Lines, dense: Lines, wanted: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """One row: particles are pooled over seeds, the particles' mean prediction and the times are means over seeds."""
    job, first, dense = row.job, lines[0], starts(lines) or dense
    singles = [particle for line in lines for particle in line["particles"]]
    together = [line["ensemble"] for line in lines]
    accuracies = [100 * single["accuracy"] for single in singles]
    acc, dense_acc = statistics.fmean(accuracies), _mean(_accuracies(dense))
    ensemble = 100 * statistics.fmean(values["accuracy"] for values in together)
    return {
        "name": row.name,
        "title": row.title,
        "method": job.method,
        "baseline": job.baseline,
        "granularity": "none" if job.method == "dense" else job.granularity,
        "network": job.network,
        "keep": job.keep,
        "seeds": [line["seed"] for line in lines],
        "particles": len(first["particles"]),
        "epochs": first["epochs"],
        "dense_acc_mean": dense_acc,
        "acc_mean": acc,
        "acc_std": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "before_acc_mean": _mean([100 * line["before"]["accuracy"] for line in lines if "before" in line]),
        "finetune_epochs": first.get("finetune", 0),
        "pretrain_epochs": first.get("pretrain", 0),
        "epochs_after_cut": epochs_after_cut(first) if job.method == "dllp" else None,
        "shape": next(iter(figures_2_5.kept_of_run(first)), None),
        "shapes": figures_2_5.kept_of_row(lines),
        "moments": figures_2_5.moments_of_row(lines) if job.granularity == "weight" else None,
        "drop_mean": None if dense_acc is None else dense_acc - acc,
        "drop_se": _apart(_accuracies(lines), lines, dense) if job.method != "dense" else None,
        "flops_removed_mean": 100 * statistics.fmean(value for line in lines for value in line["flops_removed"]),
        "flops_removed_min": 100 * min(value for line in lines for value in line["flops_removed"]),
        **({"flops_removed_p95_mean": 100 * p95} if (p95 := _mean(_p95(lines))) is not None else {}),
        "flops_of": first["flops_of"],
        "params_kept_mean": 100 * statistics.fmean(p / line["dense_params"] for line in lines for p in line["params"]),
        "ensemble_acc_mean": ensemble,
        "ensemble_gain_mean": None if dense_acc is None else ensemble - dense_acc,
        "nll_mean": statistics.fmean(single["nll"] for single in singles),
        "ensemble_nll_mean": statistics.fmean(values["nll"] for values in together),
        "ece_mean": 100 * statistics.fmean(single["ece"] for single in singles),
        "ensemble_ece_mean": 100 * statistics.fmean(values["ece"] for values in together),
        "train_seconds_mean": statistics.fmean(line["train_seconds"] for line in lines),
        "wanted": [_verdict(name, value, lines, dense) for name, value in wanted],
    }


def starts(lines: Lines) -> Lines:
    """The trained network that each run began with, as the lines of dense runs; none where a run does not say it."""
    known = [line["start"] for line in lines if "start" in line]
    return [{"particles": [start]} for start in known] if len(known) == len(lines) else []


def thin_behind(row: Row, table: Table, members: Mapping[str, Lines]) -> dict[str, Any] | None:
    """How far a thin network, trained from scratch, is behind one particle at the same FLOPs; None without runs."""
    channel = replace(row.job, method="dllp")
    partner = next((other.name for other in table.rows if other.job == channel), None)
    if partner is None or not members[partner] or not members[row.name]:
        return None
    ours, theirs = _accuracies(members[partner]), _accuracies(members[row.name])
    points = statistics.fmean(ours) - statistics.fmean(theirs)
    return {"row": partner, "points": points, "standard_error": _both(_error(ours), _error(theirs))}


def _verdict(name: str, wanted: float, lines: Lines, dense: Lines) -> dict[str, Any]:
    """A target reached or missed by its mean."""
    reference, ensembles = _accuracies(dense), [100 * line["ensemble"]["accuracy"] for line in lines]
    values = ensembles if name == "gain" else _accuracies(lines)
    value, error = statistics.fmean(values), _error(values)
    if name != "acc":
        if not reference:
            return {"figure": name, "wanted": wanted, "found": None, "verdict": "no dense runs"}
        value, error = value - statistics.fmean(reference), _apart(values, lines, dense)
    if name in ("published", "re-run"):
        apart = -value - wanted
        verdict = f"{abs(apart):.2f} points {'worse' if apart > 0 else 'better'}"
        verdict += f", within {STRAW}" if abs(apart) <= STRAW else ""
        return {"figure": name, "wanted": wanted, "found": -value, "standard_error": error, "verdict": verdict}
    short = value + wanted if name == "drop" else value - wanted  # below zero by what is missing
    verdict = "reached" if short >= 0 else "missed"
    found = -value if name == "drop" else value
    return {"figure": name, "wanted": wanted, "found": found, "standard_error": error, "verdict": verdict}


def _command(table: Table, rows: Lines, used: Lines, variant: Variant) -> str:
    """The command that makes these rows again; every line of runs.jsonl has the one that made it."""
    words = ["dllp", "bench", table.name, *([] if table.data else ["--data", "FOLDER"])]
    own = {row.name: list(row.seeds) for row in table.rows}
    found = {tuple(row["seeds"]) for row in rows}
    if len(found) == 1 and any(row["seeds"] != own[row["name"]] for row in rows):  # otherwise some rows are unfinished
        words += ["--seeds", *map(str, *found)]
    if len(rows) < len(table.rows):
        words += ["--rows", *(row["name"] for row in rows)]
    precisions = {line["config"]["precision"] for line in used}
    words += ["--precision", *precisions] if len(precisions) == 1 else []
    return " ".join([*words, *variant.words])


# ---- Markdown


HEAD = (
    "method", "FLOPs removed", "counted on", "accuracy (%)", "drop", "all: accuracy", "NLL", "all: NLL", "ECE (%)",
    "all: ECE", "training (s)", "seeds", "wanted",
)  # fmt: skip
ALIGN = "lrlrrrrrrrrrl"


def markdown(table: Table, summary: dict[str, Any]) -> str:
    """The summary as text: a table for each network, then how it was made."""
    parts = [f"**{table.title}**, evaluated on the {summary['evaluated_on']} set."]
    networks = dict.fromkeys(row["network"] for row in summary["rows"])
    for network in networks:
        rows = [row for row in summary["rows"] if row["network"] == network]
        quoted = [quoted for quoted in table.quoted if quoted.network == network]
        epochs, dense = distinct(str(row["epochs"]) for row in rows), rows[0]["dense_acc_mean"]
        heading = f"{network}, {epochs} epochs" + ("" if dense is None else f", dense accuracy {dense:.2f}")
        body = [*map(_measured, rows), *map(_printed, quoted)]
        parts.append(f"{heading}:\n\n{markdown_table(HEAD, body, ALIGN, space='')}")
    parts += [_thin_text(name, found) for name, found in summary.get("thin", {}).items()]
    parts += figures_2_5.kept_markdown(summary["rows"])
    parts += figures_2_5.moments_markdown({row["name"]: row["moments"] for row in summary["rows"]})
    if not table.data and "data" in summary:
        parts.append(f"Measured on {summary['data']}.")
    shown = {row["name"] for row in summary["rows"]}
    notes = dict.fromkeys([table.note, *(row.note for row in table.rows if row.name in shown)])
    parts += [EXPLANATION, *filter(None, notes), made_by(summary)]
    return "\n\n".join(parts) + "\n"


def pretrained_markdown(table: Table, summary: dict[str, Any]) -> str:
    """Drops over epochs spent, then the other rows as in any table."""
    others = [row for row in summary["rows"] if pretrained.spent(row) is None]
    title, *rest = markdown(table, {**summary, "rows": others}).split("\n\n")
    return "\n\n".join([title, *pretrained.grids(summary["rows"]), *rest])


def summarise_ablation(table: Table, lines: Lines, variant: Variant, store: Store) -> dict[str, Any]:
    """Any table's summary, and what each departure from the recipe is worth."""
    members = {row.name: list(table.members(row, lines, variant)) for row in table.rows}
    return {**summarise(table, lines, variant, store), "worth": ablation.worth(members)}


def ablation_markdown(table: Table, summary: dict[str, Any]) -> str:
    """Differences to the recipe, then the rows as in any table."""
    title, *rest = markdown(table, summary).split("\n\n")
    titles = {row.name: row.title or row.name for row in table.rows}
    return "\n\n".join([title, *ablation.differences(summary["worth"], titles), *rest])


def _measured(row: dict[str, Any]) -> list[str]:
    several = row["particles"] > 1
    method = row["title"] or METHODS.get(row["method"]) or find_baseline(row["baseline"]).title
    method += f" {row['granularity']}" if row["method"] == "dllp" and not row["title"] else ""
    if row["pretrain_epochs"]:
        method += f", the last {row['epochs'] - row['pretrain_epochs']} epochs from a trained network"
    if row["epochs_after_cut"]:
        run, whole = ("", "them") if row["pretrain_epochs"] else (", one run", f"{row['epochs']} epochs")
        method += f"{run}; {row['epochs_after_cut']} of {whole} train the cut network"
    if "flops_removed_p95_mean" in row:
        method += f", by image, {row['finetune_epochs']} epochs with gates"
    if row["before_acc_mean"] is not None:
        method += f", {row['finetune_epochs']} epochs of fine-tuning (before it {row['before_acc_mean']:.2f}%)"
    kept = f", {row['params_kept_mean']:.2f}% of weights kept" if row["granularity"] == "weight" else ""
    std = "" if row["acc_std"] is None else f" ± {row['acc_std']:.2f}"
    error = "" if row["drop_se"] is None else f" ± {row['drop_se']:.2f}"
    drop = "–" if row["method"] == "dense" or row["drop_mean"] is None else f"{row['drop_mean']:.2f}{error}"
    together = [f"{row['ensemble_acc_mean']:.2f}", f"{row['ensemble_nll_mean']:.3f}", f"{row['ensemble_ece_mean']:.2f}"]
    acc, nll, ece = together if several else ["–"] * 3
    wanted = "; ".join(f"{_aim(w['figure'], w['wanted'])}: {w['verdict']}" for w in row["wanted"])
    flops = " / ".join(f"{row[name]:.2f}%" for name in ("flops_removed_mean", "flops_removed_p95_mean") if name in row)
    return [
        method, flops, row["flops_of"] + kept, f"{row['acc_mean']:.2f}{std}", drop, acc,
        f"{row['nll_mean']:.3f}", nll, f"{row['ece_mean']:.2f}", ece, f"{row['train_seconds_mean']:.0f}",
        str(len(row["seeds"])), wanted,
    ]  # fmt: skip


def _thin_text(name: str, found: Mapping[str, Any]) -> str:
    error = "" if found["standard_error"] is None else f" ± {found['standard_error']:.2f}"
    side = "behind" if found["points"] >= 0 else "ahead of"
    points = f"{abs(found['points']):.2f}{error} points {side} one particle of {found['row']}"
    return f"A thin network trained from scratch ({name}) is {points}."


def _printed(row: Quoted) -> list[str]:
    """A quoted row: what the paper prints, and a mark."""
    accuracy = f"{row.dense_acc - row.drop:.2f} (dense {row.dense_acc:.2f})"
    method, removed = f"*{row.method}, quoted from the paper*", f"{row.flops_removed:g}%"
    cells = [method, removed, "not stated", accuracy, f"{row.drop:g}"]
    return cells + ["–"] * (len(HEAD) - len(cells) - 1) + [""]


def _aim(figure: str, value: float) -> str:
    return {"drop": f"drop ≤ {value:g}", "acc": f"accuracy ≥ {value:g}", "gain": f"all − dense ≥ {value:g}",
            "published": f"published drop {value:g}", "re-run": f"others' re-run: drop {value:g}"}[figure]  # fmt: skip


# ---- small statistics


def _accuracies(lines: Lines) -> list[float]:
    """Mean accuracy of each run's particles, in percent: runs are independent, a run's particles are not quite."""
    return [100 * statistics.fmean(particle["accuracy"] for particle in line["particles"]) for line in lines]


def _p95(lines: Lines) -> list[float]:
    """Share of FLOPs removed at the 95th percentile of images, of methods that choose by image."""
    return [value for line in lines for value in line.get("flops_removed_p95", ())]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _error(values: Sequence[float]) -> float | None:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _both(a: float | None, b: float | None) -> float | None:
    """Standard error of a difference of independent means."""
    return None if a is None or b is None else math.hypot(a, b)


def _apart(values: Sequence[float], lines: Lines, dense: Lines) -> float | None:
    """Standard error of the difference from dense networks: of pairs, where each run says which it began with."""
    reference = _accuracies(dense)
    if starts(lines):
        return _error([value - other for value, other in zip(values, reference, strict=True)])
    return _both(_error(values), _error(reference))


# ---- files

KINDS = {
    "figure2": (figures_2_5.summarise, figures_2_5.markdown, figures_2_5.draw),
    "figure3": (figures_3_4.figure3, figures_3_4.markdown, figures_3_4.draw),
    "figure4": (figures_3_4.figure4, figures_3_4.markdown, figures_3_4.draw),
    "figure5": (figures_2_5.summarise, figures_2_5.markdown, figures_2_5.draw),
    "reliability": (reliability.summarise, reliability.markdown, reliability.draw),
    **dict.fromkeys(("ablation", "ablation-digits"), (summarise_ablation, ablation_markdown, None)),
    "colour": (colour.summarise, colour.markdown, colour.draw),
    "pretrained": (summarise, pretrained_markdown, None),
}
"""Summary, text and picture of everything that is no plain table."""
OF_PREDICTIONS = ("figure3", "figure4", "reliability", "colour")
"""Computed from predictions on the test set and its versions."""
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""Errors of a summary whose lines or arrays hold something else than a run of this table."""


def open_store(out: Path, table: Table, variant: Variant, note: Mapping[str, Any] | None = None) -> Store:
    """The table's results, with those of its sources at hand; a variant sees the same variant of them."""
    folder, *sources = (out / f"{name}{variant.suffix}" for name in (table.name, *table.sources))
    return Store(folder, [Store(source) for source in sources], note)


def write_summary(table: Table, store: Store, variant: Variant) -> dict[str, Any] | None:
    """Write summary.json and table.md from whatever is finished, and a figure's picture; nothing where nothing is."""
    lines = store.lines()
    used = [line for row in table.rows for line in table.members(row, lines, variant)]
    if not used:
        return None
    to_summary, to_text, draw = KINDS.get(table.name, (summarise, markdown, None))

    try:
        summary = to_summary(table, lines, variant, store)
        text = to_text(table, summary)
        files.write_json(store.folder / SUMMARY, summary)
    except UNREADABLE as error:
        way = f"append a line with its digest as {SUPERSEDED!r} and a reason as {WHY!r}, and its job runs again"
        raise ArtifactError(f"{store.runs} or {FIGURES}: a run is not one of {table.name} ({error!r}): {way}") from None
    files.write_bytes(store.folder / MARKDOWN, text.encode())
    for row in table.rows:
        if row.predictions == "measured":
            for line in table.members(row, lines, variant):
                store.forget(line["digest"])
    if draw is not None and render.matplotlib_installed():
        draw(store.folder / PICTURE, summary)
    return summary
