"""Names out of files as text: for HTML, for plotly's own markup, and never as anything else."""

from __future__ import annotations

import html

LONGEST = 80


def plain(text: object, longest: int = LONGEST) -> str:
    """One line without control or direction characters, of limited length."""
    line = " ".join(str(text).split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in line)
    return line if len(line) <= longest else line[: longest - 1] + "…"


def html_text(text: object, longest: int = LONGEST) -> str:
    """For element content and quoted attributes."""
    return html.escape(plain(text, longest))


def plot_text(text: object, longest: int = 40) -> str:
    """For plotly, which reads tags and entities in names, ticks and labels."""
    return html.escape(plain(text, longest), quote=False)
