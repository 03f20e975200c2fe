"""What an ingredient is worth: each row of an ablation less the recipe it departs from, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import t as student

from dllp.report.page import markdown_table
from paper.summaries.render import Lines
from paper.tables import RECIPE

FIGURES = {"accuracy": (100, 2), "nll": (1, 4)}
"""Metric -> what it is shown in, and digits."""
WHO = ("one", "all")
RARE = 0.05
"""Probability by which a difference counts as one: Student's t over the seeds, two-sided."""
NOTE = (
    "Differences to the recipe, ± standard error over seeds that both have: of the mean over a run's networks (one), "
    f"and of their mean prediction (all). **Bold**: a probability below {RARE:g} by a t-test, as one difference in "
    f"{1 / RARE:.0f} has by chance where nothing differs."
)


def worth(members: Mapping[str, Lines]) -> list[dict[str, Any]]:
    """Runs by row, the recipe's before those that depart from it -> differences of accuracy and NLL."""
    found = []
    for name, lines in members.items():
        recipe = members.get(f"{name.partition('-')[0]}-{RECIPE}", ())
        pairs = [(line, other) for line in lines for other in recipe if line["seed"] == other["seed"]]
        if pairs and lines is not recipe:
            differences = {
                f"{who}_{figure}": _difference([_figure(a, who, figure) - _figure(b, who, figure) for a, b in pairs])
                for who in WHO
                for figure in FIGURES
            }
            found.append({"name": name, "seeds": [line["seed"] for line, _ in pairs], **differences})
    return found


def _figure(line: Mapping[str, Any], who: str, figure: str) -> float:
    """Of a run: the mean over its networks, or that of their mean prediction."""
    if who == "all":
        return line["ensemble"][figure]
    return statistics.fmean(particle[figure] for particle in line["particles"])


def _difference(values: Sequence[float]) -> dict[str, float | None]:
    mean, count = statistics.fmean(values), len(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else None
    chance = 2 * float(student.sf(abs(mean) / error, count - 1)) if error else None
    return {"mean": mean, "standard_error": error, "p": chance}


def differences(found: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> list[str]:
    """A table of what was found, and its legend; nothing where no row has a recipe's seeds."""
    if not found:
        return []
    head = ["departure", *(f"{who}: {label}" for who in WHO for label in ("accuracy (points)", "NLL")), "seeds"]
    body = [
        [titles[each["name"]], *(_cell(each[f"{who}_{f}"], *FIGURES[f]) for who in WHO for f in FIGURES),
         str(len(each["seeds"]))]
        for each in found
    ]  # fmt: skip
    return [markdown_table(head, body), NOTE]


def _cell(difference: Mapping[str, float | None], factor: float, digits: int) -> str:
    values = (difference["mean"], difference["standard_error"])
    text = " ± ".join(
        f"{factor * value:{sign}.{digits}f}" for value, sign in zip(values, "+-", strict=True) if value is not None
    )
    chance = difference["p"]
    return f"**{text}**" if chance is not None and chance < RARE else text
