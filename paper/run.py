"""Run what a table still lacks, and write down what is finished."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dllp import files
from dllp.errors import ArtifactError, DllpError
from paper import figures_2_5, figures_3_4, pictures, reliability
from paper.attempt import attempt
from paper.jobs import Outcome, Runner
from paper.plans import Planned, Table, Variant
from paper.store import FIGURES, LABELS, Store
from paper.summary import check, data_text, is_data, markdown, summarise

SUMMARY, MARKDOWN, PICTURE = "summary.json", "table.md", "picture.svg"
SUMMARIES = {"figure3": figures_3_4.figure3, "figure4": figures_3_4.figure4, "reliability": reliability.summarise}
TEXTS = {"figure3": figures_3_4.markdown, "figure4": figures_3_4.markdown, "reliability": reliability.markdown}
OF_PREDICTIONS = tuple(SUMMARIES)
"""What is computed from predictions on the test set and its versions."""
DENSITIES = ("figure2", "figure5")
SUMMARIES |= dict.fromkeys(DENSITIES, figures_2_5.summarise)
TEXTS |= dict.fromkeys(DENSITIES, figures_2_5.markdown)
PICTURES = {"figure3": figures_3_4.draw, "figure4": figures_3_4.draw, "reliability": reliability.draw}
PICTURES |= dict.fromkeys(DENSITIES, figures_2_5.draw)
"""What is no table has a summary, a text and a picture of its own."""


def open_store(out: Path, table: Table, variant: Variant) -> Store:
    """The table's results, with those of its sources at hand; a variant sees the same variant of them."""
    sources = [Store(out / f"{name}{variant.suffix}") for name in table.sources]
    return Store(folder_of(out, table, variant), sources)


def folder_of(out: Path, table: Table, variant: Variant) -> Path:
    """The table's own folder, or another one for runs that depart from the table."""
    return out / f"{table.name}{variant.suffix}"


class Book:
    """Writes down what is finished, and remembers what failed.

    Args:
        store: Where results lie; others may add to it meanwhile.
        note: What every line is to say besides, for example the command.
        done: Called with a job's line after it was stored.
    """

    def __init__(
        self,
        store: Store,
        note: Mapping[str, Any] | None = None,
        done: Callable[[Planned, dict[str, Any]], None] = lambda planned, line: None,
    ) -> None:
        self.store, self.note, self.done = store, note or {}, done
        self.failures: list[tuple[Planned, DllpError]] = []

    def lacks(self, planned: Planned) -> bool:
        """Whether the job is still to be run: another process may have finished it meanwhile."""
        return planned.job.digest not in self.store.digests()

    def keep(self, planned: Planned, outcome: Outcome) -> None:
        """The job is finished."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"row": planned.row.name, **outcome.line, "date": now, **self.note}
        keep = planned.row.predictions != "none" and not planned.job.validation
        if self.store.add(line, {**outcome.probabilities, LABELS: outcome.labels} if keep else None):
            self.done(planned, line)

    def failed(self, planned: Planned, error: DllpError) -> None:
        """The job will not be finished."""
        self.failures.append((planned, error))

    def close(self) -> None:
        """Raise what failed, after all other jobs have run."""
        if self.failures:
            (planned, error), more = self.failures[0], len(self.failures) - 1
            others = f" ({more} more failed)" if more else ""
            raise type(error)(f"{planned.row.name}, seed {planned.job.seed}: {error}{others}")


def finish(
    plan: Sequence[Planned],
    book: Book,
    runner: Runner,
    *,
    begin: Callable[[Planned], None] = lambda planned: None,
) -> None:
    """Run the jobs that are not yet finished, one after another; `begin` is called before each."""
    check_data(seen_data(book.store), runner)
    for planned in plan:
        if not book.lacks(planned):
            continue
        begin(planned)
        found = attempt(runner, planned.job)
        if isinstance(found, Outcome):
            book.keep(planned, found)
            continue
        book.failed(planned, found.error)
        if found.trace:
            print(found.trace, file=sys.stderr)
    book.close()


def seen_data(store: Store) -> list[dict[str, Any]]:
    """What finished runs were trained on, as far as they say it."""
    found = {json.dumps(line["data"]): line["data"] for line in store.lines() if is_data(line.get("data"))}
    return list(found.values())


def check_data(seen: Sequence[dict[str, Any]], runner: Runner) -> None:
    """Raise where finished runs saw other data than the runner has, whatever its folder is called."""
    mine = runner.splits.described
    for data in seen:
        if {**data, "name": ""} != {**mine, "name": ""}:
            raise ArtifactError(
                f"the results hold runs on other data ({data_text(data)}) than {data_text(mine)}: give another --out"
            )


def describe(planned: Planned) -> str:
    """A job in words."""
    return f"{planned.row.name} seed {planned.job.seed}"


def figures(line: Mapping[str, Any]) -> str:
    """The line of a finished job in short."""
    particles, together = line["particles"], line["ensemble"]
    parts = ["accuracy " + " / ".join(f"{100 * particle['accuracy']:.2f}" for particle in particles)]
    if len(particles) > 1:
        parts.append(f"all {100 * together['accuracy']:.2f}")
    parts += [f"NLL {together['nll']:.3f}", f"ECE {100 * together['ece']:.2f}"]
    parts += [f"{100 * min(line['flops_removed']):.2f}% of FLOPs removed", f"{line['train_seconds']:.0f} s"]
    return ", ".join(parts)


def write_summary(table: Table, store: Store, variant: Variant) -> dict[str, Any] | None:
    """Write summary.json and table.md from whatever is finished, and a figure's picture; nothing where nothing is."""
    lines = store.lines()
    used = [line for row in table.rows for line in table.members(row, lines, variant)]
    for line in used:
        check(line, store.runs)
    if not used:
        return None
    try:
        summary = SUMMARIES.get(table.name, summarise)(table, lines, variant, store)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # lines and arrays may be by anyone
        where = f"{store.runs} or {FIGURES}" if store.judged.exists() else f"{store.runs}"
        way = "remove its line, and its job runs again"
        raise ArtifactError(f"{where}: a run is not one of {table.name} ({error!r}): {way}") from None
    files.write_json(store.folder / SUMMARY, summary)
    files.write_bytes(store.folder / MARKDOWN, TEXTS.get(table.name, markdown)(table, summary).encode())
    for row in table.rows:
        if row.predictions == "judged":
            for line in table.members(row, lines, variant):
                store.forget(line["digest"])
    if table.name in PICTURES and pictures.installed():
        PICTURES[table.name](store.folder / PICTURE, summary)
    return summary
