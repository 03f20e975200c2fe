"""Pictures of results, by matplotlib where it is installed: the figures themselves are in summary.json."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dllp import files

PANEL = (3.4, 2.8)
"""Inches."""


def installed() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def panels(path: Path, count: int, columns: int | None = None) -> Iterator[list[Any]]:
    """`count` axes, side by side or in rows of so many columns; when the block ends they are written as an SVG file
    that only its content decides.
    """
    import matplotlib
    from matplotlib.figure import Figure

    columns = columns or count
    rows = -(-count // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for unused in axes[count:]:
        unused.remove()
    yield list(axes[:count])
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dllp", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    files.write_bytes(path, buffer.getvalue())
