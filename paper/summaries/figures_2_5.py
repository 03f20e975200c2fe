"""Distributions of weights: Figures 2 and 5, and the kept weights of the tables' single-weight rows (Section 3.1.2).

Figure 2 shows the whole network, layers standardised: the reference, what magnitude pruning keeps, and DLLP's slab.
Figure 5 shows every layer after sparse training and before the cut. As in the paper, densities are counts over the
number of weights and the bin's width, and the bin nearest to zero is a circle: its height would hide the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from dllp.evaluation import weight_analysis
from dllp.method import weight_laws
from dllp.report.page import markdown_table
from paper.jobs import epochs_after_cut
from paper.store import Store
from paper.summaries import render
from paper.summaries.render import Lines, made_by, provenance
from paper.tables import Table, Variant

RATIO, DIP_P, DISTANCE = (0.75, 1.3), 0.05, 0.05
"""Targets of kept weights: near-zero ratio, p-value of one mode, distance to their Gaussian."""

# ---- kept weights of a table's rows

NAMES = {"near_zero": "near zero", "ks": "KS", "dip_p": "dip p"}
FORMS = {"near_zero": "{:.2f}", "ks": "{:.3f}", "dip_p": "{:.2g}"}
NOTE = (
    "Kept weights of single-weight rows, layers standardised, then pooled: the mean over the particles that were "
    "looked at, and each of them, seed by seed. Near zero: weights within a tenth of a standard deviation over a "
    f"Gaussian's (wanted: within {RATIO[0]} and {RATIO[1]}); KS: distance to the Gaussian of the same mean and "
    f"deviation (wanted: at most {DISTANCE}); dip p: p-value of one mode on {weight_laws.DIP_SAMPLE:,} weights "
    f"(wanted: above {DIP_P}). Every particle has to reach it. What is fine-tuned was looked at before that."
)


def reached(shape: Mapping[str, Any]) -> dict[str, bool]:
    """Targets that a set of kept weights reaches or misses."""
    return {
        "near_zero": RATIO[0] <= shape["near_zero"] <= RATIO[1],
        "dip_p": shape["dip_p"] > DIP_P,
        "ks": shape["ks"] <= DISTANCE,
    }


def kept_of_run(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figures of the kept weights of every particle that was measured."""
    if "distribution" not in line:
        return []
    found = line["distribution"]
    parts = [found[weight_analysis.WHOLE], *found.get("others", [])]
    return [part["kept"] for part in parts if part["kept"] is not None]


def kept_of_row(lines: Lines) -> dict[str, Any] | None:
    """Each figure of every seed's particles, its mean, and how many reach the target; None without any."""
    found = [(line["seed"], number, shape) for line in lines for number, shape in enumerate(kept_of_run(line), 1)]
    if not found:
        return None
    each = {name: [shape[name] for *_, shape in found] for name in NAMES}
    verdicts = [reached(shape) for *_, shape in found]
    return {
        "seeds": [seed for seed, *_ in found],
        "particles": [number for _, number, _ in found],
        **{name: {"mean": statistics.fmean(values), "each": values} for name, values in each.items()},
        "reached": {name: _verdict([verdict[name] for verdict in verdicts]) for name in NAMES},
    }


def _verdict(verdicts: Sequence[bool]) -> str:
    missed = verdicts.count(False)
    return f"missed by {missed} of {len(verdicts)}" if missed else "reached"


def kept_markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of a summary -> a table of those whose kept weights were measured, and its legend; nothing without."""
    body = [
        [
            row["name"], f"{len(row['shapes']['seeds'])} of {row['particles'] * len(row['seeds'])} particles",
            *(_kept_cell(row, name) for name in NAMES),
        ]
        for row in rows
        if row["shapes"] is not None
    ]  # fmt: skip
    head = ["row", "looked at", *NAMES.values()]
    return [markdown_table(head, body, "l" * len(head)), NOTE] if body else []


def _kept_cell(row: Mapping[str, Any], name: str) -> str:
    figures, form = row["shapes"][name], FORMS[name]
    mean, *each = map(form.format, (figures["mean"], *figures["each"]))
    single = f" ({', '.join(each)})" if len(each) > 1 else ""
    verdict = f": {row['shapes']['reached'][name]}" if row["method"] == "dllp" else ""
    return f"{mean}{single}{verdict}"


# ---- kept weights at the decision and at the end

MOMENTS = {"after": "at the decision", "end": "at the end"}
MOMENTS_NOTE = (
    "The same figures just after the gates were decided, or weights cut, and at the end of the run: means over all "
    "particles of all seeds that were measured at both."
)


def moments_of_row(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]] | None:
    """Mean figures of the kept weights at both moments; None where no line has them."""
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in MOMENTS}
    for line in lines:
        for moment in line.get("moments", []):
            if moment["name"] in found:
                found[moment["name"]] += [shape for shape in moment["shapes"] if shape is not None]
    if not all(found.values()):
        return None
    return {
        moment: {name: statistics.fmean(shape[name] for shape in shapes) for name in NAMES}
        for moment, shapes in found.items()
    }


def moments_markdown(rows: Mapping[str, Mapping[str, Mapping[str, float]] | None]) -> list[str]:
    """Figures of :func:`moments_of_row` by row -> a table of those that have any, and its legend; nothing without."""
    body = [
        [row, *(FORMS[name].format(found[moment][name]) for moment in MOMENTS for name in NAMES)]
        for row, found in rows.items()
        if found is not None
    ]
    head = ["row", *(f"{text} {when}" for when in MOMENTS.values() for text in NAMES.values())]
    return [markdown_table(head, body), MOMENTS_NOTE] if body else []


# ---- Figures 2 and 5

SHOWN = {"reference": "before", "l1": "kept", "l2": "kept", "dllp": "kept", "paper": "kept"}
"""The part of a row's weights that Figure 2 shows, by the beginning of the row's name."""
LAYERED = "figure5"
"""The figure that shows layers, and all weights as they are before the cut."""
REFERENCE = "reference"
"""The row that nothing was removed from: distances are to it."""
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
LAPLACE_POINTS = 4001
"""Quantiles at which laws are compared."""


def summarise(table: Table, lines: Lines, variant: Variant, store: Store) -> dict[str, Any]:
    """Figures and densities of every row, and which targets they reach."""
    used = {row.name: line for row in table.rows for line in table.members(row, lines, variant)}
    reference = used.get(REFERENCE)
    layered = table.name == LAYERED
    rows = {
        name: figure_row(name, line, "before" if layered else SHOWN[name.split("-")[0]], reference)
        for name, line in used.items()
    }
    return {
        "figure": table.name,
        "title": table.title,
        "rows": rows,
        "wanted": {} if layered else {"near_zero": list(RATIO), "dip_p": DIP_P, "ks": DISTANCE},
        "command": " ".join(["dllp", "bench", table.name, *variant.words]),
        **provenance(list(used.values())),
    }


def figure_row(
    name: str, line: Mapping[str, Any], part: str, reference: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The row of a figure that shows a `part` of a run's weights: before, kept."""
    found = line["distribution"]
    shape = dict(found[weight_analysis.WHOLE][part] or {})
    if shape:  # a line by itself knows nothing of the reference network
        other = None if reference is None else reference["distribution"]["sample"]
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
    own = name.startswith(("dllp", "paper"))
    if own:
        row["epochs"], row["epochs_after_cut"] = line.get("epochs"), epochs_after_cut(line)
    if own and part == "kept" and shape:
        row["reached"] = reached(shape)
    if part == "kept":
        row["tail"] = weight_analysis.tails(found["layers"])
        row["moments"] = moments_of_row([line])
    elif name.startswith("l1"):
        row["laws"] = {layer: laplace(shapes[part]) for layer, shapes in found["layers"].items()}
    return row


def laplace(shape: Mapping[str, Any]) -> dict[str, float]:
    """The Amoroso fit of a layer's magnitudes beside the Laplace law that l1 regularisation stands for.

    `laplace_ks` bounds the distance of every Laplace law to the weights from below: its distance to the fit is at most
    the sum of both. Laplace weights have alpha = power = 1.
    """
    fit = shape["fits"]["amoroso"]
    alpha, power, scale = (fit["parameters"][key] for key in ("alpha", "power", "scale"))
    at = np.linspace(0, 1, LAPLACE_POINTS)[1:-1]
    quantiles = scale * scipy.special.gammaincinv(alpha, at) ** (1 / power)

    def distance(log_scale: float) -> float:
        return float(np.abs(-np.expm1(-quantiles / math.exp(log_scale)) - at).max())

    middle = math.log(float(np.median(quantiles)))
    near = min(np.linspace(middle - 5, middle + 5, 101), key=distance)
    least: Any = scipy.optimize.minimize_scalar(distance, bounds=(near - 0.1, near + 0.1), method="bounded")
    return {"alpha": alpha, "power": power, "amoroso_ks": fit["ks"], "laplace_ks": max(least.fun - fit["ks"], 0.0)}


def markdown(table: Table, summary: Mapping[str, Any]) -> str:
    """One line for each row, then the targets of DLLP's."""
    layered = table.name == LAYERED
    shown = {key: form for key, form in FIGURES.items() if key != "wasserstein" or not layered}
    own = ["removed later", "accuracy after (%)"] if layered else ["removed", "accuracy (%)"]
    head = ["row", "weights", *own, "shown", *list(shown)[1:], "wanted"]
    body = []
    for name, row in summary["rows"].items():
        values = {key: row["shape"].get(key) for key in shown}
        count, *cells = ("–" if values[key] is None else form.format(values[key]) for key, form in shown.items())
        verdicts = row.get("reached", {}).items()
        wanted = "; ".join(f"{key} {'reached' if value else 'missed'}" for key, value in verdicts)
        removed, accuracy = f"{100 * row['removed']:.1f}%", f"{row['accuracy']:.2f}"
        body.append([name, count, removed, accuracy, row["part"], *cells, wanted])
    text = markdown_table(head, body, "l" + "r" * (len(head) - 2) + "l")
    note = (
        f"Layers are standardised, then pooled. {_trained(summary['rows'])} near_zero: weights within a tenth of a "
        "standard deviation over a Gaussian's; ks: distance to the Gaussian of the same mean and deviation; dip_p: "
        f"p-value of one mode on {weight_laws.DIP_SAMPLE:,} weights"
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
    more = moments_markdown({name: row.get("moments") for name, row in summary["rows"].items()})
    more += [*_tail_markdown(summary["rows"]), *_law_markdown(summary["rows"])]
    return "\n\n".join([f"**{table.title}**", text, note, *more, made_by(summary)]) + "\n"


def _trained(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """How long networks were trained after the cut."""
    cut = [row for row in rows.values() if row.get("epochs_after_cut")]
    own = (
        f"; dllp is one run, {cut[0]['epochs_after_cut']} of {cut[0]['epochs']} epochs train the cut network"
        if cut
        else ""
    )
    return f"Magnitude's networks are as they were cut, before any fine-tuning{own}."


def _tail_markdown(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The index of every layer's Pareto tail beside the one that equation 8's k = h / sigma predicts."""
    tails = {name: row["tail"] for name, row in rows.items() if row.get("tail")}
    if not tails:
        return []
    layers = dict.fromkeys(layer for tail in tails.values() for layer in tail["layers"])
    body, verdicts = [], []
    for name, tail in tails.items():
        found = tail["layers"]
        cells = (f"{found[at]['k']:.2g} / {found[at]['predicted']:.2g}" if at in found else "–" for at in layers)
        body.append([name, f"{tail['h']:.2g}", *cells])
        ratios = [row["k"] / row["predicted"] for row in found.values()]
        verdicts.append(f"{name} {min(ratios):.2f} to {max(ratios):.2f}")
    return [
        "Pareto tail of the kept weights, equation 8, layer by layer: k as fitted / h over the layer's standard "
        "deviation before the cut, with one h for all layers of a network, by least squares in log k (the paper leaves "
        "h open):",
        markdown_table(["row", "h", *layers], body),
        f"Fitted over predicted k: {', '.join(verdicts)}. One h would make all of them 1. What dllp keeps has no "
        "threshold: its tail begins at the smallest weight.",
    ]


def _law_markdown(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Layers of an l1-regularised network: Laplace, as its prior says, or not."""
    laws = {name: row["laws"] for name, row in rows.items() if "laws" in row}
    parts = []
    for name, found in laws.items():
        body = [
            [layer, *(f"{law[key]:.3f}" for key in ("alpha", "power", "amoroso_ks", "laplace_ks"))]
            for layer, law in found.items()
        ]
        worse = sum(law["laplace_ks"] > law["amoroso_ks"] for law in found.values())
        head = ["layer", "α", "power", "KS of the Amoroso fit", "KS of any Laplace law, at least"]
        parts += [
            f"Magnitudes of {name} by layer, Amoroso law with free power (Laplace weights have α = power = 1):",
            markdown_table(head, body),
            f"In {worse} of {len(found)} layers every Laplace law is farther from the weights than the Amoroso fit.",
        ]
    return parts


def draw(path: Path, summary: Mapping[str, Any]) -> None:
    """Figure 2: a panel for each row, whole networks. Figure 5: a line of panels for each row, one for each layer."""
    layered, rows = summary["figure"] == LAYERED, summary["rows"]
    shown = {
        (name, part): density
        for name, row in rows.items()
        for part, density in row["densities"].items()
        if (part != weight_analysis.WHOLE) == layered
    }
    with render.panels(path, len(shown), COLUMNS) as axes:
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
    outside = np.delete(around, range(max(middle - beside, 0), min(middle + beside + 1, len(values))))
    top = float(outside.max(initial=0.0)) or 1.0
    axis.set_ylim(0, 1.25 * top)
    share, height = peak * 2 * half, min(peak, 1.1 * top)
    axis.scatter([0], [height], s=CIRCLE * share, alpha=0.5, color=line.get_color(), zorder=3, clip_on=False)
    place = {"xytext": (14, 4), "textcoords": "offset points", "fontsize": 8}
    axis.annotate(f"{100 * share:.1f}%", (0, height), **place)
