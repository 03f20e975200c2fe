"""One self-contained HTML page from run folders: the verdict first, then the evidence."""

from __future__ import annotations

from collections.abc import Sequence

from dllp.report import compare, latency, training, trust, verdict, weights
from dllp.report.contents import Run
from dllp.report.figures import Section
from dllp.report.page import render, require_plotly

__all__ = ["build", "require_plotly"]

SECTIONS = (
    verdict.section, training.section, weights.channels, weights.histograms, trust.section, trust.robustness,
    latency.section, verdict.configuration,
)  # fmt: skip


def build(runs: Sequence[Run], first: Sequence[Section] = ()) -> bytes:
    """The page of one run, or of several compared, with sections that come `first` on it."""
    if len(runs) > 1 or first:
        return render(f"{len(runs)} runs compared", [*first, *compare.sections(runs)])
    (run,) = runs
    return render(f"dllp report: {run.name}", [found for section in SECTIONS if (found := section(run)) is not None])
