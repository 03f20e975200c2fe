"""The verdict first: what was lost, what was gained, and whether the budget holds."""

from __future__ import annotations

import math

from dllp.deploy.speed import DENSE as DENSE_NETWORK
from dllp.deploy.speed import Row as SpeedRow
from dllp.deploy.speed import describe, headline
from dllp.evaluation.evaluate import DENSE, TOGETHER, Row
from dllp.report.contents import Run
from dllp.report.figures import Section
from dllp.report.markup import note, table
from dllp.report.names import html_text
from dllp.report.units import metric, percent, short_number


def section(run: Run) -> Section:
    """Cards for the shipped network, and a table of all of them."""
    return Section("verdict", "Verdict", lead=_lead(run), markup=f'<div class="cards">{_cards(run)}</div>{_table(run)}')


def _lead(run: Run) -> str:
    n = len(run.recipes)
    parts = [f"{n} particle{'s' * (n > 1)}, {run.config.get('granularity')}s pruned {_how(run)}."]
    if run.budget is not None:
        which, wanted = run.budget
        kept = max(getattr(size, which) for size in run.sizes) / max(getattr(run.dense, which), 1)
        what = "FLOPs" if which == "macs" else "parameters"
        parts.append(f"Budget: keep {percent(wanted, 1)} of the {what}; kept {'at most ' * (n > 1)}{percent(kept, 1)}.")
    if run.examples is not None:
        count = len(run.examples.labels)
        parts.append(f"Measured on {count} examples: one of them is {100 / count:.2f} points of accuracy.")
    return " ".join(parts)


def _how(run: Run) -> str:
    method, more = run.info.get("method"), run.info.get("finetune_epochs")
    if method is None:
        return "in one training run"
    return f"by {method} after training" + (f", and fine-tuned (epochs after the cut: {more})" if more else "")


def _cards(run: Run) -> str:
    rows = run.clean
    one, dense = rows.get("particle 1"), rows.get(DENSE)
    cards = []
    if one is not None:
        quality = "rmse" if run.regression else "accuracy"
        cards.append(_quality(run, quality, one, dense))
    for name, title in (("macs", "FLOPs (MACs)"), ("params", "Parameters")):
        new, old = getattr(run.sizes[0], name), getattr(run.dense, name)
        goal = f"budget {percent(run.budget[1], 1)}" if run.budget is not None and run.budget[0] == name else ""
        cards.append(_ratio(title, new, old, goal))
    if one is not None and one.bytes is not None:
        cards.append(_ratio("Bytes on disk", one.bytes, dense.bytes if dense else None, "", "B"))
    cards.append(_time(run))
    if one is not None and "ece" in one.metrics:
        before = f"dense {metric('ece', dense.metrics.get('ece'))}" if dense else ""
        together = rows.get(TOGETHER)
        all_ = f"all particles {metric('ece', together.metrics.get('ece'))}" if together else ""
        cards.append(_card("Calibration error (ECE)", metric("ece", one.metrics["ece"]), [before, all_]))
    return "".join(cards)


def _quality(run: Run, name: str, one: Row, dense: Row | None) -> str:
    value = one.metrics.get(name)
    notes = []
    if dense is not None and value is not None and name in dense.metrics:
        change = value - dense.metrics[name]
        shown = f"{100 * change:+.2f} points" if name == "accuracy" else f"{change:+.4f}"
        notes.append(f"dense {metric(name, dense.metrics[name])} ({shown})")
    if run.examples is not None and value is not None and name == "accuracy":
        error = 1.96 * math.sqrt(value * (1 - value) / len(run.examples.labels))
        notes.append(f"95% of repeats within ±{100 * error:.2f} points")
    return _card("Accuracy" if name == "accuracy" else "Error (RMSE)", metric(name, value), notes)


def _ratio(title: str, new: float, old: float | None, goal: str, unit: str = "") -> str:
    notes = [] if not old else [f"{percent(new / old, 1)} of {short_number(old, unit)}"]
    return _card(title, short_number(new, unit), [*notes, goal])


def _time(run: Run) -> str:
    row = headline(run.speed.rows) if run.speed is not None else None
    if row is None or row.speedup is None or run.speed is None:
        return _card("Latency", "not measured", ["dllp speed measures it"])
    before = [f"{1e3 * r.median:.2f} → " for r in run.speed.rows if r.network == DENSE_NETWORK and _same(r, row)]
    notes = ["as fast as dense", f"{''.join(before[:1])}{1e3 * row.median:.2f} ms", describe(row)]
    return _card("Latency", f"{row.speedup:.2f}×", notes)


def _same(a: SpeedRow, b: SpeedRow) -> bool:
    return (a.runtime, a.device, a.threads, a.batch) == (b.runtime, b.device, b.threads, b.batch)


def _card(title: str, value: str, notes: list[str]) -> str:
    small = "".join(f"<small>{html_text(note, 200)}</small>" for note in notes if note)
    return f'<div class="card"><span>{html_text(title)}</span><strong>{html_text(value)}</strong>{small}</div>'


def _table(run: Run) -> str:
    """Every network on clean data."""
    rows = run.clean
    if not rows:
        return note("The run holds no evaluation: dllp evaluate measures its networks.")
    names = ["rmse", "nll"] if run.regression else ["accuracy", "ece", "nll", "brier", "aurc"]
    heads = [*(n if n == "accuracy" else "Brier" if n == "brier" else n.upper() for n in names)]
    heads += ["FLOPs", "parameters", "on disk"]
    cells = [
        [row.name, *(metric(n, row.metrics.get(n)) for n in names),
         short_number(row.macs), short_number(row.params), short_number(row.bytes, "B")]
        for row in rows.values()
    ]  # fmt: skip
    return table(("network", *heads), cells)
