"""Pictures of results, by matplotlib where it is installed: the figures themselves are in summary.json."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dllp import writing

HINT = "no picture: pip install 'dllp[figures]', then the same command with --summary-only"
PANEL = (3.4, 2.8)
"""Inches."""


def installed() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def panels(path: Path, count: int) -> Iterator[list[Any]]:
    """`count` axes side by side; when the block ends they are written as an SVG file that only its content decides."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PANEL[0] * count, PANEL[1]), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    yield list(axes)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dllp", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    writing.write_bytes(path, buffer.getvalue())
