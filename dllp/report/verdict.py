"""The first and the last section: what was lost and gained within the budget, and how to repeat the run."""

from __future__ import annotations

import math

from dllp.deploy.speed import describe, headline
from dllp.evaluation.evaluate import DENSE, TOGETHER, Row
from dllp.report.contents import Run
from dllp.report.figures import Section
from dllp.report.page import definitions, folded, html_text, metric, note, percent, short_number, table


def section(run: Run) -> Section:
    """Cards for the shipped network, particle 1, and a table of all networks."""
    return Section("verdict", "Verdict", lead=_lead(run), markup=f'<div class="cards">{_cards(run)}</div>{_table(run)}')


def configuration(run: Run) -> Section:
    """The command that repeats the run, every setting, versions and hardware."""
    command = f'<pre tabindex="0"><code>{html_text(run.command, 4000)}</code></pre>' if run.command else ""
    known = {name: value for name, value in run.info.items() if not isinstance(value, (dict, list))}
    settings = folded("Every setting", definitions(run.settings or run.config))
    place = folded("Versions and hardware", definitions(known))
    return Section("configuration", "Configuration", markup=command + settings + place)


def _lead(run: Run) -> str:
    n, method, more = len(run.recipes), run.info.get("method"), run.info.get("finetune_epochs")
    how = f"by {method} after training" if method else "in one training run"
    tuned = f", and fine-tuned (epochs after the cut: {more})" if method and more else ""
    parts = [f"{n} particle{'s' * (n > 1)}, {run.config['granularity']}s pruned {how}{tuned}."]
    if run.budget is not None and run.budget[0] == "latency":
        outcome = run.info.get("latency", {}).get("text", "not measured")
        parts.append(f"Budget: keep {percent(run.budget[1], 1)} of the time; {outcome}.")
    elif run.budget is not None:
        which, wanted = run.budget
        kept = max(getattr(size, which) for size in run.sizes) / max(getattr(run.dense, which), 1)
        what = "FLOPs" if which == "macs" else "parameters"
        parts.append(f"Budget: keep {percent(wanted, 1)} of the {what}; kept {'at most ' * (n > 1)}{percent(kept, 1)}.")
    if run.examples is not None:
        count = len(run.examples.labels)
        parts.append(f"Measured on {count} examples: one of them is {100 / count:.2f} points of accuracy.")
    return " ".join(parts)


def _cards(run: Run) -> str:
    one, dense, ensemble = map(run.clean.get, ("particle 1", DENSE, TOGETHER))
    quality = "rmse" if run.regression else "accuracy"
    cards = [] if one is None or quality not in one.metrics else [_quality(run, quality, one, dense)]
    for name, title in (("macs", "FLOPs (MACs)"), ("params", "Parameters")):
        goal = f"budget {percent(run.budget[1], 1)}" if run.budget is not None and run.budget[0] == name else ""
        cards.append(_ratio(title, getattr(run.sizes[0], name), getattr(run.dense, name), goal))
    if one is not None and one.bytes is not None:
        cards.append(_ratio("Bytes on disk", one.bytes, dense.bytes if dense else None, "", "B"))
    cards.append(_latency(run))
    if one is not None and "ece" in one.metrics:
        others = [f"{name} {metric('ece', row.metrics.get('ece'))}"
                  for name, row in (("dense", dense), ("ensemble", ensemble)) if row is not None]  # fmt: skip
        cards.append(_card("Calibration error (ECE)", metric("ece", one.metrics["ece"]), others))
    return "".join(cards)


def _quality(run: Run, name: str, one: Row, dense: Row | None) -> str:
    value, notes = one.metrics[name], []
    if dense is not None and name in dense.metrics:
        change = value - dense.metrics[name]
        shown = f"{100 * change:+.2f} points" if name == "accuracy" else f"{change:+.4f}"
        notes.append(f"dense {metric(name, dense.metrics[name])} ({shown})")
    if run.examples is not None and name == "accuracy":
        error = 1.96 * math.sqrt(max(value * (1 - value), 0) / len(run.examples.labels))
        notes.append(f"95% of repeats within ±{100 * error:.2f} points")
    return _card("Accuracy" if name == "accuracy" else "Error (RMSE)", metric(name, value), notes)


def _ratio(title: str, new: float, old: float | None, goal: str, unit: str = "") -> str:
    notes = [f"{percent(new / old, 1)} of {short_number(old, unit)}"] if old else []
    return _card(title, short_number(new, unit), [*notes, goal])


def _latency(run: Run) -> str:
    row = headline(run.speed.rows) if run.speed else None
    if row is None or row.speedup is None:
        return _card("Latency", "not measured", ["dllp speed measures it"])
    after = 1e3 * row.median
    times = f"{row.speedup * after:.2f} → {after:.2f} ms"
    return _card("Latency", f"{row.speedup:.2f}×", ["as fast as dense", times, describe(row)])


def _card(title: str, value: str, notes: list[str]) -> str:
    small = "".join(f"<small>{html_text(note, 200)}</small>" for note in notes if note)
    return f'<div class="card"><span>{html_text(title)}</span><strong>{html_text(value)}</strong>{small}</div>'


def _table(run: Run) -> str:
    """Every network on clean data."""
    if not run.clean:
        return note("The run holds no evaluation: dllp evaluate measures its networks.")
    heads = {"rmse": "RMSE", "nll": "NLL"}
    if not run.regression:
        heads = {"accuracy": "accuracy", "ece": "ECE", "nll": "NLL", "brier": "Brier", "aurc": "AURC"}
    cells = [
        [row.name, *(metric(name, row.metrics.get(name)) for name in heads),
         short_number(row.macs), short_number(row.params), short_number(row.bytes, "B")]
        for row in run.clean.values()
    ]  # fmt: skip
    return table(("network", *heads.values(), "FLOPs", "parameters", "on disk"), cells)
