"""Figures 2 and 5: what each way of pruning leaves of the distribution of VGG-11's weights, before any fine-tuning.

Figure 2 shows the whole network, layers standardised: the reference, what magnitude pruning keeps, and DLLP's slab.
Figure 5 shows every layer after sparse training and before the cut. As in the paper, densities are counts over the
number of weights and the bin's width, and the bin nearest to zero is a circle: its height would hide the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dllp.evaluation import weight_analysis
from dllp.method import weight_laws
from paper import pictures
from paper.plans import Table, Variant
from paper.shapes import DIP_P, DISTANCE, RATIO, completed, damaged, reached
from paper.store import Store
from paper.summary import Lines, made_by, provenance

SHOWN = {"reference": "before", "l1": "kept", "l2": "kept", "dllp": "kept"}
"""The part of a row's weights that Figure 2 shows, by the beginning of the row's name."""
LAYERED = "figure5"
"""The figure that shows layers, and all weights as they are before the cut."""
REFERENCE = "reference"
"""The row that nothing was removed from: what distances are taken to."""
COLUMNS = 4
"""Panels beside each other."""
FIGURES = {
    "count": "{:,}", "near_zero": "{:.2f}", "kurtosis": "{:.2f}", "ks": "{:.3f}", "dip_p": "{:.2f}",
    "wasserstein": "{:.3f}",
}  # fmt: skip
BESIDE = 2
"""Bins on both sides of the middle one that a spike may reach before the cut."""
CIRCLE = 600.0
"""Area of a circle that holds all weights, in square points."""


def summarise(table: Table, lines: Lines, variant: Variant, store: Store) -> dict[str, Any]:
    """Figures and densities of every row, and which of what is wanted they reach."""
    used = {row.name: line for row in table.rows for line in table.members(row, lines, variant)}
    whole = used.get(REFERENCE)
    rows = {name: _row(name, line, store, _part(table.name, name), whole) for name, line in used.items()}
    words = ["dllp", "bench", table.name, *variant.words]
    return {
        "figure": table.name,
        "title": table.title,
        "rows": rows,
        "wanted": {} if table.name == LAYERED else {"near_zero": list(RATIO), "dip_p": DIP_P, "ks": DISTANCE},
        "command": " ".join(words),
        **provenance(list(used.values())),
    }


def _part(figure: str, name: str) -> str:
    """The part of a row's weights that a figure shows."""
    return "before" if figure == LAYERED else SHOWN[name.split("-")[0]]


def _row(
    name: str, line: Mapping[str, Any], store: Store, part: str, whole: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    try:
        return _shown(name, line, part, whole)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(line, store.runs, error) from None


def _shown(name: str, line: Mapping[str, Any], part: str, whole: Mapping[str, Any] | None) -> dict[str, Any]:
    found = line["distribution"]
    shape = dict(found[weight_analysis.WHOLE][part] or {})
    shape = completed(shape, found["sample"]) if part == "kept" and shape else shape
    if shape:  # Section 9 compares with the reference network, of which a line by itself knows nothing
        other = None if whole is None else whole["distribution"]["sample"]
        shape["wasserstein"] = None if other is None else weight_laws.wasserstein(found["sample"], other)
    row = {
        "part": part,
        "removed": 1 - line["params"][0] / line["dense_params"],
        "accuracy": 100 * line["particles"][0]["accuracy"],
        "seed": line["seed"],
        "shape": shape,
        "layers": {layer: shapes[part] for layer, shapes in found["layers"].items()},
        "densities": found["densities"],
    }
    if name.startswith("dllp") and part == "kept" and shape:
        row["reached"] = reached(shape)
    return row


def markdown(table: Table, summary: Mapping[str, Any]) -> str:
    """One line for each row, then what is wanted of DLLP's."""
    layered = table.name == LAYERED
    shown = {key: form for key, form in FIGURES.items() if key != "wasserstein" or not layered}
    own = ["removed later", "accuracy after (%)"] if layered else ["removed", "accuracy (%)"]
    header = ["row", "weights", *own, "shown", *list(shown)[1:], "wanted"]
    body = []
    for name, row in summary["rows"].items():
        count, *cells = (_cell(row["shape"].get(key), form) for key, form in shown.items())
        verdicts = {True: "reached", False: "missed", None: "not measured"}
        wanted = "; ".join(f"{key} {verdicts[value]}" for key, value in row.get("reached", {}).items())
        removed, accuracy = f"{100 * row['removed']:.1f}%", f"{row['accuracy']:.2f}"
        body.append([name, count, removed, accuracy, row["part"], *cells, wanted])
    lines = [header, ["---"] + ["---:"] * (len(header) - 2) + ["---"], *body]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    note = (
        "Layers are standardised, then pooled; nothing was fine-tuned. near_zero: weights within a tenth of a standard "
        "deviation over a Gaussian's; ks: distance to the Gaussian of the same mean and deviation; dip_p: p-value of "
        f"one mode on {weight_laws.DIP_SAMPLE:,} weights"
    )
    note += (
        ". Of dllp these are the weights of M_0: those that its gates keep as they are at the end of the run, the "
        "others as they were when the gates were decided."
        if layered
        else f"; wasserstein: distance to the row {REFERENCE}, both standardised, on as many."
    )
    if summary["wanted"]:
        note += (
            f" Wanted of DLLP: near_zero within {RATIO[0]} and {RATIO[1]}, dip_p above {DIP_P}, ks at most {DISTANCE}."
        )
    return "\n\n".join([f"**{table.title}**", text, note, made_by(dict(summary))]) + "\n"


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)


def draw(path: Path, summary: Mapping[str, Any]) -> None:
    """Figure 2: a panel for each row, whole networks. Figure 5: a line of panels for each row, one for each layer."""
    layered, rows = summary["figure"] == LAYERED, summary["rows"]
    shown = {
        (name, part): density
        for name, row in rows.items()
        for part, density in row["densities"].items()
        if (part != weight_analysis.WHOLE) == layered
    }
    with pictures.panels(path, len(shown), COLUMNS) as axes:
        for axis, ((name, part), density) in zip(axes, shown.items(), strict=True):
            _curve(axis, density[rows[name]["part"]], density["limit"], BESIDE if layered else 0)
            title = f"{name}, {part}, before the cut" if layered else f"{name} ({rows[name]['part']})"
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("weight" if layered else "weight (standard deviations)")
            axis.set_ylabel("density")
            axis.locator_params(axis="x", nbins=5)


def _curve(axis: Any, values: Sequence[float], limit: float, beside: int) -> None:
    """A density without its middle bin, which becomes a circle of as much area as it has weights, at its own height
    or on top of the others, with its share. `beside` it so many bins, a spike's, do not set the panel's height.
    """
    middle, half = len(values) // 2, limit / len(values)
    centres = np.linspace(-limit + half, limit - half, len(values))
    around = np.array(values, dtype=float)
    peak = float(around[middle])
    around[middle] = np.nan
    (line,) = axis.plot(centres, around, linewidth=0.9)
    top = (
        float(np.delete(around, range(max(middle - beside, 0), min(middle + beside + 1, len(values)))).max(initial=0.0))
        or 1.0
    )
    axis.set_ylim(0, 1.25 * top)
    share, height = peak * 2 * half, min(peak, 1.1 * top)
    axis.scatter([0], [height], s=CIRCLE * share, alpha=0.5, color=line.get_color(), zorder=3, clip_on=False)
    place = {"xytext": (14, 4), "textcoords": "offset points", "fontsize": 8}
    axis.annotate(f"{100 * share:.1f}%", (0, height), **place)
