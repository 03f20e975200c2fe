"""The table of the transformer bench from the lines of its finished jobs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dllp import files
from dllp.report.page import markdown_table
from paper.store import Store
from paper.summaries.render import made_by, plus_minus, provenance, spread
from paper.summary import MARKDOWN, SUMMARY
from paper.tables import Variant
from paper.transformers.rows import NAME, TASKS, Row, digest, rows

TITLE = "Transformers and a U-Net: DLLP against other methods at equal training"


def write_summary(store: Store, variant: Variant) -> bool:
    """Write summary.json and table.md from the lines of this variant; False where there is none."""
    known = {digest(row, line["seed"], variant): row for line in store.lines() for row in rows()}
    lines = [line for line in store.lines() if line["digest"] in known]
    if not lines:
        return False
    found = [row_summary(row, [line for line in lines if line["row"] == row.name], lines) for row in rows()]
    command = " ".join(["dllp bench", NAME, *variant.words])
    summary = {"title": TITLE, "rows": [each for each in found if each], "command": command, **provenance(lines)}
    files.write_json(store.folder / SUMMARY, summary)
    files.write_bytes(store.folder / MARKDOWN, markdown(summary).encode())
    return True


def row_summary(row: Row, lines: Sequence[Mapping[str, Any]], every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds; differences from the dense network are those of the same seed. Empty without a line."""
    if not lines:
        return {}
    dense = {line["seed"]: line["ensemble"] for line in every if line["row"] == f"{row.task}-dense"}
    quality = "perplexity" if TASKS[row.task].perplexity else "accuracy"
    values = {name: [line["ensemble"][name] for line in lines] for name in lines[0]["ensemble"]}
    pairs = [(line["ensemble"][quality], dense[line["seed"]][quality]) for line in lines if line["seed"] in dense]
    against = [own / other if quality == "perplexity" else 100 * (own - other) for own, other in pairs]
    return {
        "row": row.name, "task": row.task, "quality": quality, "seeds": [line["seed"] for line in lines],
        "macs": statistics.fmean(sum(line["macs"]) / line["dense_macs"] for line in lines),
        "seconds": statistics.fmean(line["train_seconds"] for line in lines),
        "values": {name: spread(found) for name, found in values.items()},
        "against_dense": spread(against) if against else None,
    }  # fmt: skip


def markdown(summary: Mapping[str, Any]) -> str:
    """A table for each task."""
    parts = [f"**{summary['title']}**; mean ± standard deviation over seeds."]
    for name, task in TASKS.items():
        here = [row for row in summary["rows"] if row["task"] == name]
        if not here:
            continue
        word, factor, digits = ("perplexity", 1, 3) if task.perplexity else ("accuracy (%)", 100, 2)
        against = "over dense" if task.perplexity else "against dense (points)"
        head = ["row", "MACs of dense", word, against, "NLL", "ECE (%)", "seconds", "seeds"]
        body = [
            [
                row["row"], f"{row['macs']:.3f}", plus_minus(row["values"][row["quality"]], factor),
                plus_minus(row["against_dense"], digits=digits),
                plus_minus(row["values"]["nll"], digits=4), plus_minus(row["values"].get("ece"), 100),
                f"{row['seconds']:.0f}", str(len(row["seeds"])),
            ]
            for row in here
        ]  # fmt: skip
        parts.append(f"{task.title}:\n\n{markdown_table(head, body)}")
    return "\n\n".join([*parts, made_by(summary)]) + "\n"
