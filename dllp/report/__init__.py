"""One self-contained HTML page from run folders: the verdict first, then why it can be believed."""

from __future__ import annotations

from collections.abc import Sequence

from dllp.report import channels, compare, configuration, latency, robustness, training, trust, verdict, weights
from dllp.report.contents import Run, Speed, read
from dllp.report.page import render, require_plotly

__all__ = ["Run", "Speed", "build", "read", "require_plotly"]

PARTS = (verdict, training, channels, weights, trust, robustness, latency, configuration)


def build(runs: Sequence[Run]) -> bytes:
    """The page of one run, or of several compared."""
    if len(runs) > 1:
        return render(f"{len(runs)} runs compared", compare.sections(runs))
    (run,) = runs
    return render(f"dllp report: {run.name}", [found for part in PARTS if (found := part.section(run)) is not None])
