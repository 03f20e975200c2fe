"""What the kept weights of a run look like, and whether it is what a slab has that lost nothing (Section 3.1.2)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dllp.errors import ArtifactError
from dllp.evaluation import weight_analysis
from dllp.method import weight_laws

RATIO, DIP_P, DISTANCE = (0.75, 1.3), 0.05, 0.05
"""What is wanted of a slab: near-zero ratio, p-value of one mode, distance to its Gaussian."""
NAMES = {"near_zero": "near zero", "ks": "KS", "dip_p": "dip p"}
FORMS = {"near_zero": "{:.2f}", "ks": "{:.3f}", "dip_p": "{:.2g}"}
NOTE = (
    "Kept weights of single-weight rows, layers standardised, then pooled: the mean over the particles that were "
    "looked at, and each of them, seed by seed. Near zero: weights within a tenth of a standard deviation over a "
    f"Gaussian's (wanted: within {RATIO[0]} and {RATIO[1]}); KS: distance to the Gaussian of the same mean and "
    f"deviation (wanted: at most {DISTANCE}); dip p: p-value of one mode on {weight_laws.DIP_SAMPLE:,} weights "
    f"(wanted: above {DIP_P}). Every particle has to reach it. What is fine-tuned was looked at before that."
)


def reached(shape: Mapping[str, Any]) -> dict[str, bool | None]:
    """Which targets a set of kept weights reaches; None where it was not measured."""
    return {
        "near_zero": RATIO[0] <= shape["near_zero"] <= RATIO[1],
        "dip_p": None if shape["dip_p"] is None else shape["dip_p"] > DIP_P,
        "ks": shape["ks"] <= DISTANCE,
    }


def completed(shape: Mapping[str, Any], sample: Sequence[float]) -> dict[str, Any]:
    """The figures of kept weights, the dip from their sample where whoever trained had no test for it."""
    if shape.get("dip_p") is not None or weight_laws.diptest is None:
        return dict(shape)
    statistic, p_value = weight_laws.dip(sample)
    return {**shape, "dip": statistic, "dip_p": p_value}


def of_run(line: Mapping[str, Any], place: object = "the runs") -> list[dict[str, Any]]:
    """The kept weights' figures of every particle that was looked at; `place` names the run's file."""
    found = line.get("distribution")
    if found is None:
        return []
    try:
        first = {"kept": found[weight_analysis.WHOLE]["kept"], "sample": found["sample"]}
        parts = [first, *found.get("others", [])]
        shapes = [completed(part["kept"], part["sample"]) for part in parts if part["kept"] is not None]
        for shape in shapes:
            _check(shape)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(line, place, error) from None
    return shapes


def _check(shape: Mapping[str, Any]) -> None:
    for name in NAMES:
        value = shape[name]
        if not (type(value) in (int, float) and math.isfinite(value)) and (name != "dip_p" or value is not None):
            raise ValueError(f"{name} is no number")


def damaged(line: Mapping[str, Any], place: object, error: Exception) -> ArtifactError:
    """One line for a run whose figures cannot be read."""
    way = "remove the line, and its job runs again"
    return ArtifactError(f"{place}, digest {line['digest']}: 'distribution' is damaged ({error}): {way}")


def of_row(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Each figure of every seed's particles and their mean, and how many reach what is wanted; None without any."""
    found = [(line["seed"], number, shape) for line in lines for number, shape in enumerate(of_run(line), 1)]
    if not found:
        return None
    each = {name: [shape[name] for *_, shape in found] for name in NAMES}
    verdicts = [reached(shape) for *_, shape in found]
    return {
        "seeds": [seed for seed, *_ in found],
        "particles": [number for _, number, _ in found],
        **{name: {"mean": _mean(values), "each": values} for name, values in each.items()},
        "reached": {name: _together([verdict[name] for verdict in verdicts]) for name in NAMES},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _together(verdicts: Sequence[bool | None]) -> str:
    if None in verdicts:
        return "not measured"
    missed = verdicts.count(False)
    return f"missed by {missed} of {len(verdicts)}" if missed else "reached"


def markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of a summary -> a table of those whose kept weights were looked at, and what it shows; nothing without."""
    shown = [row for row in rows if row["shapes"] is not None]
    if not shown:
        return []
    header = ["row", "looked at", *NAMES.values()]
    lines = [header, ["---"] * len(header)]
    lines += [[row["name"], _seen(row), *(_cell(row, name) for name in NAMES)] for row in shown]
    return ["\n".join("| " + " | ".join(cells) + " |" for cells in lines), NOTE]


def _seen(row: Mapping[str, Any]) -> str:
    return f"{len(row['shapes']['seeds'])} of {row['particles'] * len(row['seeds'])} particles"


def _cell(row: Mapping[str, Any], name: str) -> str:
    figures, form = row["shapes"][name], FORMS[name]
    mean, *each = ("–" if v is None else form.format(v) for v in (figures["mean"], *figures["each"]))
    single = f" ({', '.join(each)})" if len(each) > 1 else ""
    verdict = f": {row['shapes']['reached'][name]}" if row["method"] == "dllp" else ""
    return f"{mean}{single}{verdict}"
