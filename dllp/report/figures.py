"""Plots and sections as plain values, and the traces, axes, colours and texts that the plots share.

Names of layers, classes and folders may be a stranger's; whatever is given to these functions is shown as text.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dllp.errors import one_line

LONGEST = 80
Trace = dict[str, Any]
# Okabe and Ito's palette, readable for the colour-blind on light and dark ground; shapes and dashes differ as well.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#888888"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
ROW = 22  # pixels of height for one layer


@dataclass(frozen=True)
class Plot:
    """One plot: data and layout as plotly takes them; colours of text and grid are the page's."""

    id: str  # unique on the page
    title: str
    caption: str  # says how to read it
    data: list[Trace]
    layout: dict[str, Any]
    height: int = 320  # in pixels
    choices: dict[str, list[Trace]] = field(default_factory=dict)  # other data by name, from which the reader chooses
    label: str = ""  # says what is chosen


@dataclass(frozen=True)
class Section:
    """A part of the page; `markup` is HTML in which all names are escaped."""

    id: str
    title: str
    lead: str = ""
    markup: str = ""
    plots: tuple[Plot, ...] = ()


def plain(text: object, longest: int = LONGEST) -> str:
    """One line without control or direction characters."""
    return one_line(text, longest)


def plot_text(text: object, longest: int = 40) -> str:
    """Escaped for plotly, which reads tags and entities in names, ticks and labels."""
    return html.escape(plain(text, longest), quote=False)


def short(values: Iterable[float | None]) -> list[float | None]:
    """Numbers of five digits, as more are not seen; None, a gap in a curve, for what is not finite."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.5g}") for v in values]


def line(name: str, x: Sequence[Any], y: Iterable[float | None], color: str, dash: str = "solid", **more: Any) -> Trace:
    style = {"color": color, "dash": dash, "width": 2}
    named = {"type": "scatter", "mode": "lines", "name": plot_text(name), "x": list(x), "y": short(y)}
    return {**named, "line": style, **more}


def band(x: Sequence[float], low: Iterable[float], high: Iterable[float], color: str) -> list[Trace]:
    """The area between two curves, pale."""
    base: Trace = {"type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}, "showlegend": False}
    base["hoverinfo"] = "skip"
    return [base | {"y": short(low)}, base | {"y": short(high), "fill": "tonexty", "fillcolor": color + "33"}]


def bars(name: str, y: list[str], x: Iterable[float | None], color: str, **more: Any) -> Trace:
    """Horizontal bars; `y` are names that were escaped."""
    named = {"type": "bar", "orientation": "h", "name": plot_text(name), "y": y, "x": short(x)}
    return {**named, "marker": {"color": color}, **more}


def marks(name: str, x: Iterable[float | None], y: list[Any], marker: dict[str, Any], **more: Any) -> Trace:
    named = {"type": "scatter", "mode": "markers", "name": plot_text(name), "x": short(x), "y": y}
    return {**named, "marker": marker, **more}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": plot_text(title)}} | more


def names_axis() -> dict[str, Any]:
    """Names from top to bottom; they are never read as numbers or dates."""
    return {"type": "category", "autorange": "reversed", "automargin": True, "ticklen": 4}


def upright(x: float, dash: str) -> dict[str, Any]:
    """A vertical line through the whole plot."""
    place = {"x0": x, "x1": x, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "line", "line": {"color": GREY, "width": 1, "dash": dash}} | place


def distinct(names: Iterable[object]) -> list[str]:
    """Names as plotly's text, made different where shortening made them equal: equal categories share a place."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        text = plot_text(name)
        seen[text] += 1
        found.append(text if seen[text] == 1 else f"{text} ({seen[text]})")
    return found
