"""Plots and sections as plain values: what plotly draws, and what a reader who cannot see it is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dllp.report.names import plot_text

Trace = dict[str, Any]
# Okabe and Ito's palette: told apart by all readers, on light and dark ground. Shapes and dashes tell the same.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#888888"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


@dataclass(frozen=True)
class Plot:
    """One picture.

    Attributes:
        id: Unique on the page.
        title, caption: Shown around it; the caption says in words how to read it.
        data, layout: As plotly takes them; colours of text and grid are the page's.
        height: In pixels.
        choices: Other `data` by name, from which the reader chooses; `label` says what is chosen.
    """

    id: str
    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 320
    choices: dict[str, list[Trace]] = field(default_factory=dict)
    label: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page; `markup` is HTML whose names were escaped by whoever wrote it."""

    id: str
    title: str
    lead: str = ""
    markup: str = ""
    plots: tuple[Plot, ...] = ()


def short(values: Iterable[float | None]) -> list[float | None]:
    """Five digits: more are not seen. What is not finite is left out of a curve."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.5g}") for v in values]


def line(name: str, x: Sequence[Any], y: Iterable[float | None], color: str, dash: str = "solid", **more: Any) -> Trace:
    style = {"color": color, "dash": dash, "width": 2}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plot_text(name),
        "x": list(x),
        "y": short(y),
        "line": style,
    } | more


def band(x: Sequence[float], low: Iterable[float], high: Iterable[float], color: str) -> list[Trace]:
    """What lies between two curves, pale."""
    base: Trace = {"type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}, "showlegend": False}
    base["hoverinfo"] = "skip"
    fill = {"fill": "tonexty", "fillcolor": color + "33"}
    return [base | {"y": short(low)}, base | {"y": short(high)} | fill]


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": plot_text(title)}} | more


def names_axis(**more: Any) -> dict[str, Any]:
    """Names from top to bottom; they are never read as numbers or dates."""
    return {"type": "category", "autorange": "reversed", "automargin": True, "ticklen": 4} | more


def distinct(names: Iterable[object]) -> list[str]:
    """Names as plotly's text, made different where shortening made them equal: equal categories share a place."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        text = plot_text(name)
        seen[text] = seen.get(text, 0) + 1
        found.append(text if seen[text] == 1 else f"{text} ({seen[text]})")
    return found
