"""Accuracy and calibration under corruption, where `dllp evaluate --corrupt` measured it."""

from __future__ import annotations

from dllp.evaluate import CLEAN
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
    names = distinct(versions)
    plots = []
    for metric, (title, form) in METRICS.items():
        traces: list[Trace] = []
        for i, (network, color) in enumerate(NETWORKS.items()):
            found = {row.data: row.metrics[metric] for row in run.rows if row.name == network and metric in row.metrics}
            if found:
                y = [found.get(version) for version in versions]
                mark = {"mode": "lines+markers", "marker": {"symbol": MARKS[i], "size": 9}}
                traces.append(line(network, names, y, color, DASHES[i], **mark))
        if traces:
            layout = {"xaxis": axis("", type="category"), "yaxis": axis(metric, tickformat=form)}
            caption = "The first point is the clean test data; corruptions follow as they were evaluated."
            plots.append(Plot(f"corrupted-{metric}", title, caption, traces, layout))
    return Section("robustness", "Robustness", plots=tuple(plots))
