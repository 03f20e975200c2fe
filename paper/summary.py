"""What a table's finished runs amount to: summary.json, and the same as Markdown.

Accuracies, drops, calibration errors and FLOPs are in percent, NLL in nats, times in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dllp.baselines import find as find_baseline
from dllp.errors import ArtifactError
from paper import shapes
from paper.plans import Quoted, Row, Table, Variant
from paper.store import Store

Lines = Sequence[dict[str, Any]]
"""Finished runs, as :meth:`paper.store.Store.lines` gives them."""
UNITS = {"acc, drop, gain, flops_removed, params_kept, ece": "percent", "nll": "nats", "train_seconds": "seconds"}
VERSIONS = ("dllp", "torch", "python")
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
    "Accuracy: mean ± standard deviation over all particles of all seeds. Drop: against the mean of the dense runs, "
    "± its standard error over seeds. All: the mean prediction of a run's particles, which costs all of them. "
    "FLOPs are multiply-accumulates, of what the row names. A target counts as reached within one standard error."
)


def check(line: dict[str, Any], place: object) -> None:
    """Raise unless a finished run has the fields that a summary reads; `place` names its file."""
    texts = ("hardware", "date", "flops_of", *VERSIONS)
    tests: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(texts, lambda v: isinstance(v, str) and v.isprintable() and len(v) <= 200),
        **dict.fromkeys(("params", "flops_removed"), lambda v: _numbers(v) and bool(v)),
        "dense_params": lambda v: _number(v) and v >= 1,
        "train_seconds": _number,
        "epochs": lambda v: type(v) is int,
        "config": lambda v: isinstance(v, dict) and v.get("precision") in ("float32", "bfloat16"),
        "ensemble": _figures,
        "particles": lambda v: isinstance(v, list) and bool(v) and all(map(_figures, v)),
    }
    for name, fits in tests.items():
        if not fits(line.get(name)):
            raise ArtifactError(
                f"{place}, digest {line['digest']}: {name!r} is missing or of the wrong kind: "
                "remove the line, and its job runs again"
            )
    if "before" in line and not _figures(line["before"]):
        raise ArtifactError(f"{place}, digest {line['digest']}: 'before' is of the wrong kind")
    if "data" in line and not is_data(line["data"]):
        raise ArtifactError(f"{place}, digest {line['digest']}: 'data' is of the wrong kind")
    for name in ("processes", "pretrain", "finetune"):
        if type(line.get(name, 0)) is not int:
            raise ArtifactError(f"{place}, digest {line['digest']}: {name!r} is no whole number")
    shapes.of_run(line, place)


def _number(value: Any) -> bool:
    """A number that stays finite when it is averaged and made a percentage."""
    return type(value) in (int, float) and abs(value) < 1e18


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _figures(value: Any) -> bool:
    return isinstance(value, dict) and all(_number(value.get(name)) for name in ("accuracy", "nll", "ece"))


def is_data(value: Any) -> bool:
    """Whether it is what :attr:`paper.splits.Splits.described` gives."""
    if not isinstance(value, dict) or set(value) != {"name", "train", "classes", "shape"}:
        return False
    name, sizes = value["name"], value["shape"]
    numbers = [value["train"], value["classes"], *(sizes if isinstance(sizes, list) else [None])]
    return isinstance(name, str) and name.isprintable() and len(name) <= 200 and all(type(n) is int for n in numbers)


def data_text(data: dict[str, Any], held_out: int = 0) -> str:
    """What a run was trained on, in words."""
    size = "x".join(map(str, data["shape"][1:] or data["shape"]))
    less = f" ({held_out:,} of them held out)" if held_out else ""
    return f"{data['name']}: {data['train']:,} training examples{less} of {size} in {data['classes']} classes"


def summarise(table: Table, lines: Lines, variant: Variant, store: Store | None = None) -> dict[str, Any]:
    """Finished runs -> the content of summary.json; runs that belong to no row, or to another recipe, are left out."""
    members = {row.name: list(table.members(row, lines, variant)) for row in table.rows}
    dense = {row.job.network: members[row.name] for row in table.rows if row.job.method == "dense"}
    rows = [
        summarise_row(row, members[row.name], dense.get(row.job.network, []), () if variant.suffix else row.wanted)
        for row in table.rows
        if members[row.name]
    ]
    used = [line for found in members.values() for line in found]
    return {
        "table": table.name,
        "title": table.title,
        "rows": rows,
        "quoted": [vars(quoted) for quoted in table.quoted],
        "evaluated_on": "validation" if variant.validation else "test",
        "units": UNITS,
        **_data(used, variant),
        "command": _command(table, rows, used, variant),
        **provenance(used),
    }


def _data(used: Lines, variant: Variant) -> dict[str, str]:
    """What the runs were trained on, where they say it."""
    text = _distinct(data_text(line["data"], variant.validation) for line in used if "data" in line)
    return {"data": text} if text else {}


def provenance(used: Lines) -> dict[str, Any]:
    """Where, when and with what the runs were made."""
    return {
        "hardware": _distinct(line["hardware"] for line in used),
        "precision": _distinct(line["config"]["precision"] for line in used),
        "processes_sharing_the_device": max((line.get("processes", 1) for line in used), default=1),
        "versions": {name: _distinct(line[name] for line in used) for name in VERSIONS},
        "date": max((line["date"] for line in used), default=None),
    }


def summarise_row(row: Row, lines: Lines, dense: Lines, wanted: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """One row: particles are pooled over seeds, the particles' mean prediction and the times are means over seeds."""
    job, first = row.job, lines[0]
    singles = [particle for line in lines for particle in line["particles"]]
    together = [line["ensemble"] for line in lines]
    accuracies = [100 * single["accuracy"] for single in singles]
    acc, dense_acc = statistics.fmean(accuracies), _mean(_accuracies(dense))
    ensemble = 100 * statistics.fmean(values["accuracy"] for values in together)
    return {
        "name": row.name,
        "method": job.method,
        "baseline": job.baseline,
        "granularity": "none" if job.method == "dense" else job.granularity,
        "network": job.network,
        "seeds": [line["seed"] for line in lines],
        "particles": len(first["particles"]),
        "epochs": first["epochs"],
        "dense_acc_mean": dense_acc,
        "acc_mean": acc,
        "acc_std": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "before_acc_mean": _mean([100 * line["before"]["accuracy"] for line in lines if "before" in line]),
        "finetune_epochs": first.get("finetune", 0),
        "pretrain_epochs": first.get("pretrain", 0),
        "shape": next(iter(shapes.of_run(first)), None),
        "shapes": shapes.of_row(lines),
        "drop_mean": None if dense_acc is None else dense_acc - acc,
        "drop_se": _both(_error(_accuracies(lines)), _error(_accuracies(dense))) if job.method != "dense" else None,
        "flops_removed_mean": 100 * statistics.fmean(value for line in lines for value in line["flops_removed"]),
        "flops_removed_min": 100 * min(value for line in lines for value in line["flops_removed"]),
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


def _verdict(name: str, wanted: float, lines: Lines, dense: Lines) -> dict[str, Any]:
    """Whether a figure reaches what was wanted, or misses it by less than its own standard error."""
    reference, ensembles = _accuracies(dense), [100 * line["ensemble"]["accuracy"] for line in lines]
    values = ensembles if name == "gain" else _accuracies(lines)
    value, error = statistics.fmean(values), _error(values)
    if name != "acc":
        if not reference:
            return {"figure": name, "wanted": wanted, "found": None, "verdict": "no dense runs"}
        value, error = value - statistics.fmean(reference), _both(error, _error(reference))
    if name == "published":
        apart = -value - wanted
        verdict = f"{abs(apart):.2f} points {'worse' if apart > 0 else 'better'}"
        verdict += f", within {STRAW}" if abs(apart) <= STRAW else ""
        return {"figure": name, "wanted": wanted, "found": -value, "standard_error": error, "verdict": verdict}
    short = value + wanted if name == "drop" else value - wanted  # below zero by what is missing
    if short >= 0:
        verdict = "reached"
    else:
        verdict = "reached within its standard error" if error is not None and -short <= error else "missed"
    found = -value if name == "drop" else value
    return {"figure": name, "wanted": wanted, "found": found, "standard_error": error, "verdict": verdict}


def _command(table: Table, rows: Lines, used: Lines, variant: Variant) -> str:
    """What makes these rows again; every line of runs.jsonl has the command that made it."""
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


HEADER = (
    "| method | FLOPs removed | counted on | accuracy (%) | drop | all: accuracy | NLL | all: NLL | ECE (%) "
    "| all: ECE | training (s) | seeds | wanted |\n|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
)
_CELLS = 13


def markdown(table: Table, summary: dict[str, Any]) -> str:
    """The summary as text: a table for each network, then how it was made."""
    parts = [f"**{table.title}**, evaluated on the {summary['evaluated_on']} set."]
    networks = dict.fromkeys(row["network"] for row in summary["rows"])
    for network in networks:
        rows = [row for row in summary["rows"] if row["network"] == network]
        quoted = [quoted for quoted in table.quoted if quoted.network == network]
        epochs = _distinct(str(row["epochs"]) for row in rows)
        heading = f"{network}, {epochs} epochs" + (f", dense accuracy {_dense(rows)}" if _dense(rows) else "")
        body = [_line(_measured(row)) for row in rows] + [_line(_printed(row)) for row in quoted]
        parts.append("\n".join([f"{heading}:\n", HEADER, *body]))
    parts += shapes.markdown(summary["rows"])
    if not table.data and "data" in summary:
        parts.append(f"Measured on {summary['data']}.")
    parts += [EXPLANATION, *filter(None, [table.note]), made_by(summary)]
    return "\n\n".join(parts) + "\n"


def made_by(summary: dict[str, Any]) -> str:
    """Command, hardware and versions as one line."""
    made = [
        f"`{summary['command']}`", summary["hardware"], summary["precision"],
        ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        f"finished {summary['date'][:10]}",
    ]  # fmt: skip
    shared = summary["processes_sharing_the_device"]
    if shared > 1:
        made.append(f"times measured while up to {shared} processes shared the device")
    return "Made by " + "; ".join(made) + "."


def _measured(row: dict[str, Any]) -> list[str]:
    several = row["particles"] > 1
    method = METHODS.get(row["method"]) or find_baseline(row["baseline"]).title
    method += f" {row['granularity']}" if row["method"] == "dllp" else ""
    if row["pretrain_epochs"]:
        method += f", the last {row['epochs'] - row['pretrain_epochs']} epochs from a trained network"
    if row["before_acc_mean"] is not None:
        method += f", {row['finetune_epochs']} epochs of fine-tuning (before it {row['before_acc_mean']:.2f}%)"
    kept = f", {row['params_kept_mean']:.2f}% of weights kept" if row["granularity"] == "weight" else ""
    std = "" if row["acc_std"] is None else f" ± {row['acc_std']:.2f}"
    error = "" if row["drop_se"] is None else f" ± {row['drop_se']:.2f}"
    drop = "–" if row["method"] == "dense" or row["drop_mean"] is None else f"{row['drop_mean']:.2f}{error}"
    together = [f"{row['ensemble_acc_mean']:.2f}", f"{row['ensemble_nll_mean']:.3f}", f"{row['ensemble_ece_mean']:.2f}"]
    acc, nll, ece = together if several else ["–"] * 3
    wanted = "; ".join(f"{_aim(w['figure'], w['wanted'])}: {w['verdict']}" for w in row["wanted"])
    return [
        method, f"{row['flops_removed_mean']:.2f}%", row["flops_of"] + kept, f"{row['acc_mean']:.2f}{std}", drop, acc,
        f"{row['nll_mean']:.3f}", nll, f"{row['ece_mean']:.2f}", ece, f"{row['train_seconds_mean']:.0f}",
        str(len(row["seeds"])), wanted,
    ]  # fmt: skip


def _printed(row: Quoted) -> list[str]:
    """A quoted row: what the paper prints, and a mark."""
    accuracy = f"{row.dense_acc - row.drop:.2f} (dense {row.dense_acc:.2f})"
    method, removed = f"*{row.method}, quoted from the paper*", f"{row.flops_removed:g}%"
    cells = [method, removed, "not stated", accuracy, f"{row.drop:g}"]
    return cells + ["–"] * (_CELLS - len(cells) - 1) + [""]


def _aim(figure: str, value: float) -> str:
    return {"drop": f"drop ≤ {value:g}", "acc": f"accuracy ≥ {value:g}", "gain": f"all − dense ≥ {value:g}",
            "published": f"published drop {value:g}"}[figure]  # fmt: skip


def _dense(rows: Sequence[dict[str, Any]]) -> str:
    value = rows[0]["dense_acc_mean"]
    return "" if value is None else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# ---- small statistics


def _accuracies(lines: Lines) -> list[float]:
    """Mean accuracy of each run's particles, in percent: runs are independent, a run's particles are not quite."""
    return [100 * statistics.fmean(particle["accuracy"] for particle in line["particles"]) for line in lines]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _error(values: Sequence[float]) -> float | None:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _both(a: float | None, b: float | None) -> float | None:
    """Standard error of a difference of independent means."""
    return None if a is None or b is None else math.hypot(a, b)


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
