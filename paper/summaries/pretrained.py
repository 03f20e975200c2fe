"""Drops over the epochs that were spent on a trained network: a table for each budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dllp.baselines import find
from dllp.report.page import markdown_table
from paper.tables import SPENT, WHOLE

Row = Mapping[str, Any]
NOTE = (
    "Points of accuracy lost against the trained network, ± standard error over seeds, by the epochs that follow its "
    f"{WHOLE}: DLLP by the short preset, other methods as fine-tuning after their cut. The trained network teaches all."
)


def spent(row: Row) -> int | None:
    """Epochs on a trained network; None for a row of another kind."""
    if row["method"] == "baseline":
        return row["finetune_epochs"]
    return row["epochs"] - WHOLE if row["pretrain_epochs"] == WHOLE else None


def grids(rows: Sequence[Row]) -> list[str]:
    """Rows of a summary -> a table for each budget that has any, methods by epochs, and the legend."""
    found = [row for row in rows if spent(row) is not None]
    parts = []
    for network, keep in dict.fromkeys((row["network"], row["keep"]) for row in found):
        here = [row for row in found if (row["network"], row["keep"]) == (network, keep)]
        body: dict[str, dict[int | None, str]] = {}
        for row in here:
            for name, cell in _cells(row).items():
                body.setdefault(name, {})[spent(row)] = cell
        head = ["method", *(f"{epochs} epochs" for epochs in SPENT)]
        lines = [[name, *(cells.get(epochs, "–") for epochs in SPENT)] for name, cells in body.items()]
        parts.append(f"{network}, {100 * (1 - keep):g}% of the FLOPs removed:\n\n{markdown_table(head, lines)}")
    return [*parts, NOTE] if parts else []


def _cells(row: Row) -> dict[str, str]:
    """The drop of one network; of DLLP also that of all particles together."""
    if row["drop_mean"] is None:
        return {}
    error = "" if row["drop_se"] is None else f" ± {row['drop_se']:.2f}"
    cell = f"{row['drop_mean']:.2f}{error}"
    if row["method"] == "baseline":
        return {find(row["baseline"]).title: cell}
    return {"DLLP, one particle": cell, "DLLP, all particles": f"{-row['ensemble_gain_mean']:.2f}"}
