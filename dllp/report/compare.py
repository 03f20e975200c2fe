"""Several runs beside each other: quality against cost and time with Pareto fronts, speed-ups, different settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dllp.config import COUNTED
from dllp.deploy.speed import DENSE as DENSE_SUBJECT
from dllp.deploy.speed import INT8, PRUNED, describe, headline
from dllp.errors import ArtifactError
from dllp.evaluation.evaluate import BEFORE, DENSE, TOGETHER
from dllp.report.contents import Run
from dllp.report.figures import CYCLE, GREY, MARKS, Plot, Section, axis, bars, line, marks, plot_text, short
from dllp.report.page import metric, percent, short_number, table

KINDS = (DENSE, "particle 1", TOGETHER)


@dataclass(frozen=True)
class Point:
    """One network of one run: its cost, FLOPs or time, and its quality (more is better)."""

    run: str
    network: str
    cost: float
    quality: float


def sections(runs: Sequence[Run]) -> list[Section]:
    """A table, the plots with the Pareto front, and the settings that differ."""
    if len({run.regression for run in runs}) > 1:
        raise ArtifactError("some of the runs are classifications and some regressions: compare runs of one kind")
    names = [run.name for run in runs]  # numbered where several are called the same
    named = {f"{name} ({i + 1})" if names.count(name) > 1 else name: runs[i] for i, name in enumerate(names)}
    return [
        Section("verdict", "Verdict", lead=_lead(named), markup=_table(named)),
        Section("front", "Quality against cost", plots=(_pareto(named), *latency(named), *_speedups(named))),
        Section("settings", "Where the settings differ", markup=_differences(named)),
    ]


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats, by cost: none is at least as good for at most the cost, and better in one."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.quality)):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    return best


def _measure(runs: Mapping[str, Run]) -> tuple[str, int]:
    """The metric that stands for quality, and its sign: more accuracy is better, more error is worse."""
    return ("rmse", -1) if next(iter(runs.values())).regression else ("accuracy", 1)


def _points(runs: Mapping[str, Run]) -> list[Point]:
    name, sign = _measure(runs)
    return [
        Point(label, row.name, row.macs, sign * row.metrics[name])
        for label, run in runs.items()
        for row in run.clean.values()
        if row.macs is not None and name in row.metrics
    ]


def _pareto(runs: Mapping[str, Run]) -> Plot:
    points = _points(runs)
    caption = (
        "Circles are dense networks, squares single particles, diamonds the ensembles of a run's particles, which cost "
        "the sum; triangles are further particles. On the front, nothing is both cheaper and better."
        + (" A click in the legend shows the networks as they were cut, before fine-tuning."
           * any(p.network == BEFORE for p in points))
    )  # fmt: skip
    return _against("pareto", "FLOPs", caption, runs, points, axis("multiply-accumulates of one example", type="log"))


def latency(runs: Mapping[str, Run]) -> list[Plot]:
    """Quality against time of dense and pruned networks, int8 too, in a setting in which all runs were measured."""
    times = {label: {(r.network, describe(r)): r for r in run.speed.rows} for label, run in runs.items() if run.speed}
    shared = set.intersection(*map(set, times.values())) if times else set()
    row = headline([row for key, row in next(iter(times.values()), {}).items() if key in shared])
    if row is None:
        return []
    kinds = {DENSE_SUBJECT: DENSE, PRUNED: "particle 1"}
    suffix = {describe(row): "", describe(replace(row, runtime=INT8)): " int8"}
    evaluated = {(p.run, p.network): p.quality for p in _points(runs)}
    points = []
    for label, found in times.items():
        for (network, setting), r in found.items():
            if network in kinds and setting in suffix:
                name = kinds[network] + suffix[setting]
                quality = evaluated.get((label, name)) if r.accuracy is None else r.accuracy
                if quality is not None:
                    points.append(Point(label, name, 1e3 * r.undisturbed / r.batch, quality))
    if not points:
        return []
    caption = f"Time of one example: {describe(row)}. Circles are dense networks, squares pruned ones"
    caption += ", triangles int8." if any(p.network.endswith("int8") for p in points) else "."
    return [_against("times", "measured time", caption, runs, points, axis("milliseconds of one example"))]


def _against(
    name: str, title: str, caption: str, runs: Mapping[str, Run], points: Sequence[Point], cost: dict[str, object]
) -> Plot:
    """Quality against a cost, with the front; runs of one series have one colour."""
    quality, sign = _measure(runs)
    best = front(points)
    traces = [line("Pareto front", short(p.cost for p in best), [sign * p.quality for p in best], GREY, "dash")]
    before = [p for p in points if p.network == BEFORE]
    series = {label: run.series or label for label, run in runs.items()}
    for i, label in enumerate(dict.fromkeys(series.values())):
        own = [p for p in points if series[p.run] == label and p not in before]
        symbols = [MARKS[KINDS.index(p.network) if p.network in KINDS else 3] for p in own]
        texts = [plot_text(p.network if p.run == label else f"{p.run}, {p.network}", 60) for p in own]
        traces.append(marks(
            label, [p.cost for p in own], short(sign * p.quality for p in own),
            {"color": CYCLE[i % len(CYCLE)], "size": 12, "symbol": symbols}, text=texts,
            hovertemplate="%{text}: %{x:.4s}, %{y}<extra>%{fullData.name}</extra>",
        ))  # fmt: skip
    if before:  # most are at chance: they would stretch the axis, until somebody asks for them
        traces.append(marks(
            BEFORE, [p.cost for p in before], short(sign * p.quality for p in before),
            {"color": GREY, "size": 12, "symbol": MARKS[3]}, text=[plot_text(p.run) for p in before],
            visible="legendonly",
        ))  # fmt: skip
    layout = {"xaxis": cost, "yaxis": axis(quality, tickformat=".1%" if quality == "accuracy" else "~g")}
    title = f"{'RMSE' if quality == 'rmse' else 'Accuracy'} against {title}"
    return Plot(name, title, caption, traces, layout, height=420)


def _speedups(runs: Mapping[str, Run]) -> list[Plot]:
    rows = {label: row for label, run in runs.items() if run.speed and (row := headline(run.speed.rows))}
    if not rows:
        return []
    trace = bars(
        "speed-up", [plot_text(label) for label in rows], [row.speedup for row in rows.values()], CYCLE[0],
        showlegend=False, text=[plot_text(describe(row), 60) for row in rows.values()],
        hovertemplate="%{y}: %{x:.2f}× (%{text})<extra></extra>",
    )  # fmt: skip
    layout = {"xaxis": axis("speed-up over dense"), "yaxis": {"type": "category", "automargin": True}}
    caption = "Each run's pruned network against its own dense one."
    return [Plot("speedups", "Measured speed-up", caption, [trace], layout, height=140 + 30 * len(rows))]


def _lead(runs: Mapping[str, Run]) -> str:
    best = front([p for p in _points(runs) if p.network != DENSE])
    if not best:
        return "None of these runs holds an evaluation."
    names = ", ".join(f"{p.network} of {p.run}" for p in best)
    text = f"{len(runs)} runs. Pruned networks that no other beats, the cheapest first: {names}."
    if _other_examples(list(runs.values())):
        text += " They were not evaluated on the same examples: what follows compares numbers of different tests."
    return text


def _other_examples(runs: Sequence[Run]) -> bool:
    """True where test sets differ, by their labels or, where a folder lacks those, by the settings of the others."""
    labels = [run.examples.labels.numpy().tobytes() for run in runs if run.examples is not None]
    if len(labels) == len(runs):
        return len(set(labels)) > 1
    names = ("data", "data_root", "validation", "leave_out")
    asked = [run.settings for run in runs if run.settings]
    return len({repr([*map(s.get, names), s.get("validation") and s.get("seed")]) for s in asked}) > 1


def _table(runs: Mapping[str, Run]) -> str:
    names = ["rmse", "nll"] if _measure(runs)[0] == "rmse" else ["accuracy", "ece", "nll"]
    cells = []
    for label, run in runs.items():
        units = COUNTED | {"macs": COUNTED["flops"]}
        budget = "–" if run.budget is None else f"{percent(run.budget[1], 1)} of {units[run.budget[0]]}"
        for row in run.clean.values():
            share = "–" if row.macs is None or not run.dense.macs else percent(row.macs / run.dense.macs, 1)
            costs = [short_number(row.macs), share, "–" if row.name == DENSE else budget]
            sizes = [short_number(row.params), short_number(row.bytes, "B")]
            cells.append([label, row.name, *(metric(n, row.metrics.get(n)) for n in names), *costs, *sizes])
    return table(("run", "network", *names, "FLOPs", "of dense", "budget", "parameters", "on disk"), cells)


def _differences(runs: Mapping[str, Run]) -> str:
    settings = [run.settings or run.config for run in runs.values()]
    names = [n for n in dict.fromkeys(n for s in settings for n in s) if len({str(s.get(n)) for s in settings}) > 1]
    if not names:
        return "<p>All settings are the same.</p>"
    return table(("setting", *runs), [[n, *(s.get(n, "–") for s in settings)] for n in names])
