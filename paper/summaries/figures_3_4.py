"""Figures 3 and 4: uncertainty of a pruned network over the quality of its inputs and the size of its training data.

A panel is a set of curves over the same places; every curve has a value for each seed at each place.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dllp.report.page import markdown_table
from paper.store import CLEAN, OUTSIDE, Store
from paper.summaries import render
from paper.summaries.prediction_metrics import PredictionMetrics, stored_metrics
from paper.summaries.render import Lines, made_by, provenance
from paper.tables import Table, Variant

QUALITIES = ("sharpen", CLEAN, "gaussian-blur:1", "gaussian-blur:2", "gaussian-blur:3", "gaussian-blur:5")
"""Versions of the data, from what the paper takes for the best to the worst."""
NOISE = "fitted noise 1/d²"
Values = Mapping[str, float]


def figure3(table: Table, lines: Lines, variant: Variant, store: Store) -> dict[str, Any]:
    """3a: aleatoric uncertainty over data quality; 3b: epistemic uncertainty over the share of the training data."""
    runs = {row.job.fraction: list(table.members(row, lines, variant)) for row in table.rows}
    found = {fraction: _by_seed(store, members) for fraction, members in runs.items() if members}
    panels = []
    if 1.0 in found:
        curves = {
            NOISE: _curve(found[1.0], QUALITIES, "fitted_noise"),
            "Σ p(1 − p)": _curve(found[1.0], QUALITIES, "aleatoric"),
        }
        wanted = "rises strictly from gaussian-blur:1 to 5, and is lowest on clean or sharpened data"
        panels.append(_panel("a", "aleatoric", "data", QUALITIES, curves, wanted, rises_with_blur))
    seeds = sorted(set.intersection(*(set(values) for values in found.values())))
    at = {f"{round(100 * fraction)}%": values for fraction, values in sorted(found.items())}
    if seeds:
        names = {"epistemic": "Σ Var p", "mutual_information": "mutual information", "fitted_noise": NOISE}
        curves = {
            label: {seed: [values[seed][CLEAN][name] for values in at.values()] for seed in seeds}
            for name, label in names.items()
        }
        wanted = "falls strictly with the share of the training data"
        panels.append(_panel("b", "epistemic", "training data", list(at), curves, wanted, falls))
    return _summary(table, variant, panels, [line for members in runs.values() for line in members])


def figure4(table: Table, lines: Lines, variant: Variant, store: Store) -> dict[str, Any]:
    """Likelihood (9) with d refitted, mean log-posterior, and the variances of both, over data quality."""
    (row,) = table.rows
    members = list(table.members(row, lines, variant))
    found = _by_seed(store, members)
    panels = [
        _panel(name, title, "data", QUALITIES, {label: _curve(found, QUALITIES, key)})
        for name, title, label, key in (
            ("a", "likelihood", "log-likelihood (nats)", "log_likelihood"),
            ("b", "posterior", "mean log-posterior (nats)", "log_posterior"),
            ("c", "variance in the likelihood", NOISE, "fitted_noise"),
            ("d", "variance in the posterior", "Σ Var p", "epistemic"),
        )
    ]
    priors = ", ".join(f"{_prior(line):.4f}" for line in members)
    seeds = ", ".join(str(line["seed"]) for line in members)
    panels[1]["verdict"] = (
        f"(b) is (a) plus the log-prior over N, which is the same for every version of the data ({priors} for seeds "
        f"{seeds}): it says nothing that (a) does not say."
    )
    panels[3]["verdict"] = _blur_verdict(panels[3]["series"]["Σ Var p"])
    return _summary(table, variant, panels, members)


def _blur_verdict(series: Mapping[str, Any]) -> str:
    """The order of epistemic uncertainty over the blur in words."""
    blurred = [series["mean"][2:], *(values[2:] for values in series["seeds"].values())]
    orders = {"falls": falls, "rises": lambda values: falls(values[::-1])}
    kept = [f"{word} strictly" for word, holds in orders.items() if all(map(holds, blurred))]
    order = f"{kept[0]}, in the mean and in every seed" if kept else "has no order that every seed keeps"
    return f"From gaussian-blur:1 to 5 (d) {order}: {blurred[0][0]:.4f} to {blurred[0][-1]:.4f} in the mean."


def _by_seed(store: Store, lines: Lines) -> dict[int, dict[str, Values]]:
    """Seed -> version of the data -> metrics of one run: means over its particles, and those of the ensemble."""
    result = {}
    for line in lines:
        found = stored_metrics(store, line)
        versions = [name for name in found.ensemble if not name.startswith(OUTSIDE)]
        result[line["seed"]] = {name: _figures(found, name, line) for name in versions}
    return result


def _figures(found: PredictionMetrics, version: str, line: Mapping[str, Any]) -> Values:
    names = ("fitted_noise", "log_likelihood")
    own = {name: statistics.fmean(values[version][name] for values in found.particles) for name in names}
    return {**found.ensemble[version], **own, "log_posterior": own["log_likelihood"] + _prior(line)}


def _prior(line: Mapping[str, Any]) -> float:
    """Log-prior of a run's particles over N, in the mean."""
    return statistics.fmean(line["log_prior"]) / line["num_data"]


def _curve(found: Mapping[int, Mapping[str, Values]], places: Sequence[str], name: str) -> dict[int, list[float]]:
    return {seed: [values[place][name] for place in places] for seed, values in found.items()}


def _panel(
    name: str, title: str, axis: str, places: Sequence[str], curves: Mapping[str, Mapping[int, Sequence[float]]],
    wanted: str = "", holds: Callable[[Sequence[float]], bool] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Means and deviations of every curve; where an order is wanted, which curves have it, in the mean and by seed."""
    series = {}
    for label, by_seed in curves.items():
        columns = list(zip(*by_seed.values(), strict=True))
        spread = [statistics.stdev(column) if len(column) > 1 else None for column in columns]
        mean = [statistics.fmean(column) for column in columns]
        series[label] = {"mean": mean, "std": spread, "seeds": {str(seed): list(v) for seed, v in by_seed.items()}}
    panel: dict[str, Any] = {"name": name, "title": title, "axis": axis, "places": list(places), "series": series}
    if holds is not None:
        panel["wanted"] = wanted
        for found in series.values():
            breaks = [seed for seed, values in found["seeds"].items() if not holds(values)]
            found |= {"reached": holds(found["mean"]), "seeds_that_break_it": breaks}
    return panel


def rises_with_blur(values: Sequence[float]) -> bool:
    """Over :data:`QUALITIES`: strictly rising with the blur, and nowhere lower than on clean or sharpened data."""
    sharp, blurred = values[:2], values[2:]
    return all(a < b for a, b in pairwise(blurred)) and min(sharp) < min(blurred)


def falls(values: Sequence[float]) -> bool:
    """Strictly."""
    return all(a > b for a, b in pairwise(values))


def _summary(table: Table, variant: Variant, panels: list[dict[str, Any]], used: Lines) -> dict[str, Any]:
    seeds = sorted({line["seed"] for line in used})
    return {
        "figure": table.name, "title": table.title, "seeds": seeds, "panels": panels,
        "command": " ".join(["dllp", "bench", table.name, *variant.words]), **provenance(used),
    }  # fmt: skip


def markdown(table: Table, summary: Mapping[str, Any]) -> str:
    """A table for each panel: mean ± standard deviation over seeds, then each seed."""
    parts = [f"**{table.title}**; mean ± standard deviation over seeds {', '.join(map(str, summary['seeds']))}."]
    for panel in summary["panels"]:
        header = [panel["axis"]]
        for label, series in panel["series"].items():
            header += [label, f"each seed ({', '.join(series['seeds'])})"]
        body = []
        for i, place in enumerate(panel["places"]):
            cells = [place]
            for series in panel["series"].values():
                spread = series["std"][i]
                cells.append(f"{series['mean'][i]:.4g}" + ("" if spread is None else f" ± {spread:.2g}"))
                cells.append(", ".join(f"{values[i]:.4g}" for values in series["seeds"].values()))
            body.append(cells)
        parts.append(f"({panel['name']}) {panel['title']}:\n\n{markdown_table(header, body)}")
        if "verdict" in panel:
            parts.append(panel["verdict"])
        if "wanted" in panel:
            parts.append(f"Wanted: {panel['wanted']}.")
            parts.append("\n".join(f"- {label}: {_verdict(series)}" for label, series in panel["series"].items()))
    return "\n\n".join([*parts, made_by(summary)]) + "\n"


def _verdict(series: Mapping[str, Any]) -> str:
    broken = series["seeds_that_break_it"]
    seeds = f"seeds that break it: {', '.join(broken)}" if broken else "every seed keeps it"
    return f"{'reached' if series['reached'] else 'missed'} in the mean; {seeds}"


def draw(path: Path, summary: Mapping[str, Any]) -> None:
    """Every panel's curves, scaled by their largest value where there are several."""
    with render.panels(path, len(summary["panels"])) as axes:
        for axis, panel in zip(axes, summary["panels"], strict=True):
            several = len(panel["series"]) > 1
            for label, series in panel["series"].items():
                scale = max(map(abs, series["mean"])) if several else 1.0
                spread = None if None in series["std"] else [value / scale for value in series["std"]]
                values = [value / scale for value in series["mean"]]
                axis.errorbar(range(len(values)), values, yerr=spread, marker="o", capsize=3, label=label)
            axis.set_title(f"({panel['name']}) {panel['title']}")
            axis.set_xticks(range(len(panel["places"])), panel["places"], rotation=30, ha="right")
            axis.set_xlabel(panel["axis"])
            if several:
                axis.set_ylabel("share of the largest")
                axis.legend(frameon=False, fontsize="x-small")
            else:
                axis.set_ylabel(next(iter(panel["series"])))
