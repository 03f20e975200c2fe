"""Tables, notes and lists as HTML; whatever they are given is text and is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dllp.report.names import html_text


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """The first cell of each row is its name; wide tables scroll by themselves."""
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
    """A sentence that stands where something is missing."""
    return f'<p class="note">{html_text(text, 400)}</p>' if text else ""


def folded(title: str, content: str) -> str:
    """Content that opens on request."""
    return f"<details><summary>{html_text(title)}</summary>{content}</details>"


def definitions(values: Mapping[str, Any]) -> str:
    """Names and values."""
    items = "".join(f"<dt>{html_text(name)}</dt><dd>{html_text(value, 400)}</dd>" for name, value in values.items())
    return f"<dl>{items}</dl>"
