"""Training curves: loss, accuracy, cost against the budget, temperature, Stein discrepancy, gates over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dllp.config import COUNTED
from dllp.records import GATE_BINS, EpochRecord, best_epoch
from dllp.report import figures
from dllp.report.contents import Run
from dllp.report.figures import BLUE, GREEN, GREY, ORANGE, VERMILION, Plot, Section, Trace, axis, band, line, upright

PHASES = {"soft": "gates close", "discrete": "gates discrete"}


def section(run: Run) -> Section | None:
    """The curves of one run; None where it kept no history."""
    history, budget = run.history, run.budget
    if not history:
        return None
    x = [record.epoch for record in history]
    gated = any(record.phase != "open" for record in history)  # other methods have no gates, and cut after training
    label, seen = ("pruned", "gates and augmentation") if gated else ("network", "augmentation")

    def both(name: str) -> list[Trace]:
        return _values(history, name, label, BLUE) + _values(run.dense_history, name, "dense", ORANGE, "dash")

    plots = [Plot(
        "loss", "Training loss",
        "Mean over the particles; the band reaches from the best to the worst of them. "
        f"{'Loss is' if run.regression else 'Loss and accuracy are'} of the training batches as they were seen, "
        f"with {seen}.",
        both("loss"), _layout(run, "squared error" if run.regression else "loss in nats", type="log"),
    )]  # fmt: skip
    if all(record.accuracy is not None for record in history):
        plots.append(Plot(
            "accuracy", "Training accuracy",
            "The dense network is trained by the same recipe, without gates." if gated and run.dense_history else "",
            both("accuracy"), _layout(run, "accuracy", tickformat=".0%"),
        ))  # fmt: skip
    if any(record.validation_loss for record in history):
        plots += _validation(run, label)
    if gated:
        costs = _values(history, "cost", "cost", BLUE)
        if budget is not None:
            costs.append(line("ramp", x, [record.budget for record in history], GREY, "dot"))
            costs.append(line("budget", [x[0], x[-1]], [budget[1]] * 2, VERMILION, "dash"))
        which = COUNTED[budget[0] if budget and budget[0] in COUNTED else "flops"]
        plots += [
            Plot(
                "cost", f"{which} against the budget",
                "Expected cost while the gates are soft, true cost once they are discrete, over the dense network's.",
                costs, _layout(run, f"share of the {which}", tickformat=".0%", rangemode="tozero"),
            ),
            Plot(
                "temperature", "Temperature and undecided gates",
                "Undecided are gates with a probability between 5% and 95%; a cold temperature makes them choose.",
                [line("temperature", x, [record.temperature for record in history], ORANGE),
                 *_values(history, "undecided", "undecided gates", GREEN, "dash")],
                _layout(run, "share, temperature", rangemode="tozero"),
            ),
        ]  # fmt: skip
    known = [record for record in history if record.discrepancy is not None]
    if known:
        plots.append(Plot(
            "discrepancy", "Stein discrepancy of the particles",
            "The rate at which a step can still bring the particles nearer to the posterior, as one batch shows it: "
            "its noise is part of it. It falls while they learn, to no less than a few particles allow; as long as "
            "gates are soft, and where they become discrete, the posterior itself changes.",
            [line("discrepancy", [record.epoch for record in known], [record.discrepancy for record in known], BLUE)],
            _layout(run, "discrepancy", type="log"),
        ))  # fmt: skip
    return Section("training", "Training", plots=(*plots, *_gates(run)))


def _values(history: Sequence[EpochRecord], name: str, label: str, color: str, dash: str = "solid") -> list[Trace]:
    """Mean over the particles, with a band where there are several."""
    parts = [(record.epoch, getattr(record, name)) for record in history if getattr(record, name)]
    if not parts:
        return []
    x, values = zip(*parts, strict=True)
    several = band(x, map(min, values), map(max, values), color) if len(values[0]) > 1 else []
    return [*several, line(label, x, [sum(part) / len(part) for part in values], color, dash)]


def _validation(run: Run, label: str) -> list[Plot]:
    """Loss and accuracy on the data that was held out, at the end of each epoch."""
    names = {"validation_loss": ("loss", "mean squared error" if run.regression else "loss in nats", {"type": "log"})}
    if not run.regression:
        names["validation_accuracy"] = ("accuracy", "accuracy", {"tickformat": ".0%"})
    text = "Measured at the end of each epoch on data that no step learns from. The last epoch is the result, "
    text += f"the best is epoch {best_epoch(run.history).epoch}."
    return [
        Plot(name.replace("_", "-"), f"Validation {word}", text, _values(run.history, name, label, BLUE),
             _layout(run, title, **more))
        for name, (word, title, more) in names.items()
    ]  # fmt: skip


def _layout(run: Run, title: str, **more: Any) -> dict[str, Any]:
    """Axes, with lines where the run entered a new phase, or was cut."""
    marks = [
        (after.epoch - 0.5, PHASES[after.phase])
        for before, after in pairwise(run.history)
        if after.phase != before.phase and after.phase in PHASES
    ]
    tuned = run.info.get("finetune_epochs")
    if type(tuned) is int and 0 < tuned < len(run.history):
        marks.append((run.history[-tuned].epoch - 0.5, "cut, then fine-tuned"))
    place = {"y": 1, "xref": "x", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    notes = [{"x": x, "text": text, "showarrow": False, "font": {"size": 11}} | place for x, text in marks]
    shapes = [upright(x, "dot") for x, _ in marks]
    return {"xaxis": axis("epoch"), "yaxis": axis(title, **more), "shapes": shapes, "annotations": notes}


def _gates(run: Run) -> list[Plot]:
    """Share of gates by probability and epoch, over all layers and for each."""
    wanted = [GATE_BINS] * len(run.widths)
    kept = [record for record in run.history if list(map(len, record.gates)) == wanted]
    if not kept or not run.widths:
        return []
    counts = np.asarray([record.gates for record in kept], dtype=float)  # (epochs, modules, GATE_BINS)
    x = [record.epoch for record in kept]

    def picture(part: np.ndarray) -> list[Trace]:
        share = 100 * part / np.maximum(part.sum(1, keepdims=True), 1)
        return [{
            "type": "heatmap", "x": x, "y": [(k + 0.5) / GATE_BINS for k in range(GATE_BINS)],
            "z": share.T.round(2).tolist(), "zmin": 0, "zmax": 100,
            "colorscale": "Cividis", "colorbar": {"title": {"text": "% of gates"}, "thickness": 12},
            "hovertemplate": "epoch %{x}, probability about %{y:.2f}: %{z}% of the gates<extra></extra>",
        }]  # fmt: skip

    choices = {"all layers": picture(counts.sum(1))}
    choices |= {figures.plain(name): picture(counts[:, i]) for i, name in enumerate(run.widths)}
    return [Plot(
        "gates", "Gate probabilities over time",
        "Bright is where many gates are. They start open, spread while the budget tightens, and end at 0 or 1: "
        "a gate that stays in between was decided by the budget alone.",
        choices["all layers"], {"xaxis": axis("epoch"), "yaxis": axis("probability", range=[0, 1])},
        choices=choices, label="Layer",
    )]  # fmt: skip
