"""Several runs beside each other: quality against cost, with the Pareto front, and where their settings differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dllp.deploy.speed import describe, headline
from dllp.errors import ArtifactError
from dllp.evaluation.evaluate import DENSE, TOGETHER
from dllp.report.contents import Run
from dllp.report.figures import CYCLE, GREY, MARKS, Plot, Section, axis, line, short
from dllp.report.markup import table
from dllp.report.names import plot_text
from dllp.report.units import metric, percent, short_number

KINDS = (DENSE, "particle 1", TOGETHER)


@dataclass(frozen=True)
class Point:
    """One network of one run: its cost, and how good it is (more is better)."""

    run: str
    network: str
    macs: float
    quality: float


def sections(runs: Sequence[Run]) -> list[Section]:
    """A table, the picture with the front, and the differences."""
    if len({run.regression for run in runs}) > 1:
        raise ArtifactError("some of the runs are classifications and some regressions: compare runs of one kind")
    return [
        Section("verdict", "Verdict", lead=_lead(runs), markup=_table(runs)),
        Section("front", "Quality against cost", plots=tuple(_plots(runs))),
        Section("settings", "Where the settings differ", markup=_differences(runs)),
    ]


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' names, numbered where several are called the same."""
    names = [run.name for run in runs]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats: none is at least as good for at most the cost, and better in one; by cost."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.macs, -p.quality)):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    return best


def _points(runs: Sequence[Run], name: str) -> list[Point]:
    sign = -1 if name == "rmse" else 1
    return [
        Point(label, row.name, row.macs, sign * row.metrics[name])
        for label, run in zip(labels(runs), runs, strict=True)
        for row in run.clean.values()
        if row.macs is not None and name in row.metrics
    ]


def _plots(runs: Sequence[Run]) -> list[Plot]:
    name = "rmse" if runs[0].regression else "accuracy"
    sign = -1 if name == "rmse" else 1
    points = _points(runs, name)
    best = front(points)
    traces = [line("Pareto front", short(p.macs for p in best), [sign * p.quality for p in best], GREY, "dash")]
    for i, label in enumerate(labels(runs)):
        own = [p for p in points if p.run == label]
        traces.append({
            "type": "scatter", "mode": "markers", "name": plot_text(label), "x": short(p.macs for p in own),
            "y": short(sign * p.quality for p in own), "text": [plot_text(p.network) for p in own],
            "marker": {"color": CYCLE[i % len(CYCLE)], "size": 12,
                       "symbol": [MARKS[KINDS.index(p.network) if p.network in KINDS else 3] for p in own]},
            "hovertemplate": "%{text}: %{x:.4s} MACs, %{y}<extra>%{fullData.name}</extra>",
        })  # fmt: skip
    layout = {
        "xaxis": axis("multiply-accumulates of one example", type="log"),
        "yaxis": axis(name, tickformat=".1%" if name == "accuracy" else "~g"),
    }
    caption = (
        "Circles are dense networks, squares single particles, diamonds all particles of a run together, which cost "
        "the sum; triangles are further particles, or networks as they were cut, before fine-tuning. On the front, "
        "nothing is both cheaper and better."
    )
    found = [
        Plot("pareto", f"{name.upper() if sign < 0 else 'Accuracy'} against FLOPs", caption, traces, layout, height=420)
    ]
    timed = [(label, run, headline(run.speed.rows)) for label, run in zip(labels(runs), runs, strict=True) if run.speed]
    if timed:
        bars = [{
            "type": "bar", "orientation": "h", "y": [plot_text(label) for label, _, row in timed if row],
            "x": short(row.speedup for _, _, row in timed if row), "showlegend": False,
            "text": [plot_text(describe(row), 60) for _, _, row in timed if row],
            "marker": {"color": CYCLE[0]}, "hovertemplate": "%{y}: %{x:.2f}× (%{text})<extra></extra>",
        }]  # fmt: skip
        place = {"xaxis": axis("speed-up over dense"), "yaxis": {"type": "category", "automargin": True}}
        found.append(Plot("speedups", "Measured speed-up", "Each run's pruned network against its own dense one.",
                          bars, place, height=140 + 30 * len(timed)))  # fmt: skip
    return found


def _lead(runs: Sequence[Run]) -> str:
    name = "rmse" if runs[0].regression else "accuracy"
    best = front([p for p in _points(runs, name) if p.network != DENSE])
    if not best:
        return "None of these runs holds an evaluation."
    names = ", ".join(f"{p.network} of {p.run}" for p in best)
    beware = " They were not evaluated on the same examples: what follows compares numbers of different tests."
    found = f"{len(runs)} runs. Pruned networks that no other beats, the cheapest first: {names}."
    return found + (beware if _unlike(runs) else "")


def _unlike(runs: Sequence[Run]) -> bool:
    """Whether test sets differ: by their labels, or where some folder lacks those by how the others asked for them."""
    answers = [run.examples for run in runs if run.examples is not None]
    if len(answers) == len(runs):
        return len({found.labels.numpy().tobytes() for found in answers}) > 1
    names = ("data", "data_root", "validation", "leave_out")
    asked = [run.settings for run in runs if run.settings]
    return len({repr([*map(s.get, names), s.get("validation") and s.get("seed")]) for s in asked}) > 1


def _table(runs: Sequence[Run]) -> str:
    names = ["rmse", "nll"] if runs[0].regression else ["accuracy", "ece", "nll"]
    cells = []
    for label, run in zip(labels(runs), runs, strict=True):
        units = {"macs": "FLOPs", "params": "parameters"}
        budget = "–" if run.budget is None else f"{percent(run.budget[1], 1)} of {units[run.budget[0]]}"
        for row in run.clean.values():
            share = "–" if row.macs is None or not run.dense.macs else percent(row.macs / run.dense.macs, 1)
            costs = [short_number(row.macs), share, "–" if row.name == DENSE else budget]
            sizes = [short_number(row.params), short_number(row.bytes, "B")]
            cells.append([label, row.name, *(metric(n, row.metrics.get(n)) for n in names), *costs, *sizes])
    return table(("run", "network", *names, "FLOPs", "of dense", "budget", "parameters", "on disk"), cells)


def _differences(runs: Sequence[Run]) -> str:
    settings = [run.settings or run.config for run in runs]
    names = [n for n in dict.fromkeys(n for s in settings for n in s) if len({str(s.get(n)) for s in settings}) > 1]
    if not names:
        return "<p>All settings are the same.</p>"
    return table(("setting", *labels(runs)), [[n, *(s.get(n, "–") for s in settings)] for n in names])
