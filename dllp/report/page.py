"""Text and tables in HTML, and the one file with style, plots and plotly itself.

Whatever is given to these functions is shown as text, and a content security policy forbids all that is not the page's.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from dllp.errors import ConfigError
from dllp.report.figures import LONGEST, Plot, Section, plain


def html_text(text: object, longest: int = LONGEST) -> str:
    """Escaped for element content and quoted attributes."""
    return html.escape(plain(text, longest))


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


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "", *, space: str = " ") -> str:
    """A Markdown table; `align` is l or r for each column (the first left by default), `space` is around dashes."""
    align = align or "l" + "r" * (len(head) - 1)
    rule = "|".join(space + {"l": "---", "r": "---:"}[side] + space for side in align)
    head_line, *lines = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return "\n".join([head_line, f"|{rule}|", *lines])


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


def require_plotly() -> Path:
    """The file of plotly's JavaScript; the package itself is not imported."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ConfigError("the report needs plotly: pip install 'dllp[report]'")
    return Path(found.origin).with_name("package_data") / "plotly.min.js"


def render(title: str, sections: Sequence[Section]) -> bytes:
    """The page.

    Only two scripts may run, named by their hashes: the page's own, and plotly as it is unpacked. Names in a run
    folder are data whatever they hold, and the page can reach no address.
    """
    library = require_plotly().read_bytes()
    script = _part("draw.js")
    plots = {plot.id: _plot(plot) for section in sections for plot in section.plots}
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s).digest()).decode()}'" for s in (script, library))
    text = Template(_part("page.html").decode()).substitute(
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'",
        title=html_text(title),
        style=_part("style.css").decode(),
        navigation="".join(f'<a href="#{s.id}">{html_text(s.title)}</a>' for s in sections),
        sections="".join(map(_section, sections)),
        plots=_embedded(plots),
        # level 9 takes four times as long to save a hundredth
        library=base64.b64encode(gzip.compress(library, 6, mtime=0)).decode(),
        script=script.decode(),
    )
    return text.encode("utf-8", "backslashreplace")


def _part(name: str) -> bytes:
    return (resources.files("dllp.report") / name).read_bytes()


def _embedded(value: object) -> str:
    """JSON inside a script element, which no text in it can close."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plot(plot: Plot) -> dict[str, object]:
    if not plot.choices:
        return {"data": plot.data, "layout": plot.layout}
    return {"layout": plot.layout, "choices": [{"name": plain(n), "data": data} for n, data in plot.choices.items()]}


def _section(section: Section) -> str:
    lead = f"<p>{html_text(section.lead, 2000)}</p>" if section.lead else ""
    figures = f'<div class="figures">{"".join(map(_figure, section.plots))}</div>' if section.plots else ""
    head = f'<h2 id="{section.id}-title">{html_text(section.title)}</h2>'
    body = head + lead + section.markup + figures
    return f'<section id="{section.id}" aria-labelledby="{section.id}-title">{body}</section>'


def _figure(plot: Plot) -> str:
    title, caption = html_text(plot.title), html_text(plot.caption, 2000)
    choice = f'<label>{html_text(plot.label)} <select data-chooses="{plot.id}"></select></label>' * bool(plot.choices)
    return (
        f"<figure><h3>{title}</h3>{choice}"
        f'<div class="plot" id="plot-{plot.id}" data-plot="{plot.id}" role="img" tabindex="0" '
        f'aria-label="{title}. {caption}" style="height:{plot.height}px"></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )
