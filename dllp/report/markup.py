"""Text of the page: names escaped for HTML and for plotly, numbers as people read them, tables and lists.

Names of layers, classes and folders may be a stranger's; whatever is given to these functions is shown as text.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LONGEST = 80

# ---- names


def plain(text: object, longest: int = LONGEST) -> str:
    """One line without control or direction characters, of limited length."""
    line = " ".join(str(text).split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in line)
    return line if len(line) <= longest else line[: longest - 1] + "…"


def html_text(text: object, longest: int = LONGEST) -> str:
    """Escaped for element content and quoted attributes."""
    return html.escape(plain(text, longest))


def plot_text(text: object, longest: int = 40) -> str:
    """Escaped for plotly, which reads tags and entities in names, ticks and labels."""
    return html.escape(plain(text, longest), quote=False)


# ---- numbers


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f}%"


def short_number(value: float | None, unit: str = "") -> str:
    """1234567 -> 1.23 M."""
    if value is None:
        return "–"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def metric(name: str, value: float | None) -> str:
    """Accuracy and calibration error in percent, all others as they are."""
    if value is None:
        return "–"
    return percent(value) if name in ("accuracy", "ece") else f"{value:.4f}"


# ---- elements


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table whose first column names the rows; wide tables scroll by themselves."""
    head = "".join(f'<th scope="col"><bdi>{html_text(name)}</bdi></th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row"><bdi>{html_text(name)}</bdi></th>'
        + "".join(f"<td><bdi>{html_text(cell)}</bdi></td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    content = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{content}</div>'


def note(text: str) -> str:
    """A sentence in place of something that is missing."""
    return f'<p class="note">{html_text(text, 400)}</p>' if text else ""


def folded(title: str, content: str) -> str:
    """Content that opens on request."""
    return f"<details><summary>{html_text(title)}</summary>{content}</details>"


def definitions(values: Mapping[str, Any]) -> str:
    """A list of names and values."""
    items = "".join(f"<dt>{html_text(name)}</dt><dd>{html_text(value, 400)}</dd>" for name, value in values.items())
    return f"<dl>{items}</dl>"
