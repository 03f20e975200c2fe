"""Accuracy and calibration under corruption, where `dllp evaluate --corrupt` measured it."""

from __future__ import annotations

from dllp.evaluation.evaluate import CLEAN
from dllp.report.contents import Run
from dllp.report.figures import DASHES, MARKS, Plot, Section, Trace, axis, distinct, line
from dllp.report.trust import NETWORKS

METRICS = {
    "accuracy": ("Accuracy under corruption", ".0%"),
    "ece": ("Calibration error (ECE) under corruption", ".1%"),
    "rmse": ("Error (RMSE) under corruption", "~g"),
}


def section(run: Run) -> Section | None:
    """Curves over the corruptions; None where none was evaluated."""
    versions = list(dict.fromkeys(row.data for row in run.rows))
    if versions == [CLEAN] or not versions:
        return None
    plots = []
    for metric, (title, form) in METRICS.items():
        traces = [trace for network in NETWORKS for trace in _curves(run, network, metric, versions)]
        if traces:
            layout = {
                "xaxis": axis("", type="category", automargin=True, categoryarray=distinct(versions)),
                "yaxis": axis(metric, tickformat=form),
                "legend": {"y": 1.02, "yref": "paper"},  # the names of corruptions need the room below
            }
            caption = "The first point is the clean test data; lines join the levels of one corruption."
            plots.append(Plot(f"corrupted-{metric}", title, caption, traces, layout))
    return Section("robustness", "Robustness", plots=tuple(plots))


def _curves(run: Run, network: str, metric: str, versions: list[str]) -> list[Trace]:
    """One network: a trace for each kind of corruption, which share a place in the legend."""
    found = {row.data: row.metrics[metric] for row in run.rows if row.name == network and metric in row.metrics}
    i, names = list(NETWORKS).index(network), dict(zip(versions, distinct(versions), strict=True))
    kinds: dict[str, list[str]] = {}
    for version in found:
        kinds.setdefault(version.partition(":")[0], []).append(version)
    shared = {"mode": "lines+markers", "marker": {"symbol": MARKS[i], "size": 9}, "legendgroup": network}
    return [
        line(network, [names[v] for v in part], [found[v] for v in part], NETWORKS[network], DASHES[i],
             showlegend=not k, **shared)
        for k, part in enumerate(kinds.values())
    ]  # fmt: skip
