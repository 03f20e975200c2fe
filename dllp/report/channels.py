"""What was kept in each layer."""

from __future__ import annotations

from dllp.report.contents import Run
from dllp.report.figures import BLUE, MARKS, VERMILION, Plot, Section, axis, distinct, names_axis
from dllp.report.markup import definitions, folded
from dllp.report.names import plot_text

ROW = 22
"""Pixels of height for one layer."""


def section(run: Run) -> Section | None:
    """Kept channels (or weights) of each group; None for a dense run."""
    if not run.widths:
        return None
    what = "weights" if run.config.get("granularity") == "weight" else "channels"
    names = distinct(run.widths)
    counts = list(run.widths.values())
    n = len(run.recipes)
    mean = [100 * sum(c[:-1]) / n / c[-1] for c in counts]
    traces = [{
        "type": "bar", "orientation": "h", "y": names, "x": [round(m, 2) for m in mean], "name": "mean",
        "marker": {"color": BLUE}, "hovertemplate": "%{y}: %{x:.1f}%<extra></extra>",
    }]  # fmt: skip
    if n > 1:
        traces += [{
            "type": "scatter", "mode": "markers", "y": names, "x": [round(100 * c[i] / c[-1], 2) for c in counts],
            "name": plot_text(f"particle {i + 1}"), "text": [f"{c[i]} of {c[-1]}" for c in counts],
            "marker": {"symbol": MARKS[i % len(MARKS)] + ("-open" if i else ""), "size": 9, "color": VERMILION},
            "hovertemplate": "%{y}: %{text}<extra>%{fullData.name}</extra>",
        } for i in range(n)]  # fmt: skip
    plot = Plot(
        "channels", f"{what.capitalize()} kept in each layer",
        f"Share of the {what} of each coupled group that is left, as a mean and for each particle; "
        "groups are called by their first layer.",
        traces,
        {"xaxis": axis(f"% of the {what}", range=[0, 101]), "yaxis": names_axis()},
        height=120 + ROW * max(len(names), 4),
    )  # fmt: skip
    whole = folded(f"Kept whole: {len(run.whole)}", definitions(run.whole)) if run.whole else ""
    return Section("channels-kept", f"{what.capitalize()} kept", markup=whole, plots=(plot,))
