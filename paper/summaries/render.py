"""Markdown tables and SVG pictures of results, and the line that says how they were made."""

from __future__ import annotations

import importlib.util
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dllp import files

Lines = Sequence[dict[str, Any]]
"""Finished runs, as :meth:`paper.store.Store.lines` gives them."""
VERSIONS = ("dllp", "torch", "python")
SHORT = 10
"""Digits of a commit in a text."""
PANEL = (3.4, 2.8)
"""Inches."""


def distinct(values: Iterable[str]) -> str:
    """Values in the order in which they come, each once."""
    return ", ".join(dict.fromkeys(values))


def provenance(used: Lines) -> dict[str, Any]:
    """Where, when and with what the runs were made; commits of those lines that have one."""
    commits = distinct(_commit(line) for line in used if line.get("commit"))
    return {
        "hardware": distinct(line["hardware"] for line in used),
        "precision": distinct(line["config"]["precision"] for line in used),
        "processes_sharing_the_device": max((line.get("processes", 1) for line in used), default=1),
        "versions": {name: distinct(line[name] for line in used) for name in VERSIONS},
        "date": max((line["date"] for line in used), default=None),
        **({"commits": commits} if commits else {}),
    }


def _commit(line: Mapping[str, Any]) -> str:
    return line["commit"][:SHORT] + (" with local changes" if line.get("dirty") else "")


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation, which a single value has none of."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def plus_minus(found: Mapping[str, Any] | None, factor: float = 1, digits: int = 2) -> str:
    """A :func:`spread` as `mean ± deviation`."""
    if found is None:
        return "–"
    return " ± ".join(f"{factor * value:.{digits}f}" for value in (found["mean"], found["std"]) if value is not None)


def made_by(summary: Mapping[str, Any]) -> str:
    """Command, hardware and versions as one line."""
    made = [
        f"`{summary['command']}`", summary["hardware"], summary["precision"],
        ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        f"finished {summary['date'][:10]}",
    ]  # fmt: skip
    if "commits" in summary:
        made.append(f"commit {summary['commits']}")
    shared = summary["processes_sharing_the_device"]
    if shared > 1:
        made.append(f"times measured while up to {shared} processes shared the device")
    return "Made by " + "; ".join(made) + "."


def matplotlib_installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def panels(path: Path, count: int, columns: int | None = None) -> Iterator[list[Any]]:
    """`count` axes in rows of `columns`, by default all in one; at the end written as a reproducible SVG file."""
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
