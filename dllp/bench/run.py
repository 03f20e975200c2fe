"""Run what a table still lacks, and write down what is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dllp import artifacts
from dllp.bench import densities, doubt, pictures, reliability
from dllp.bench.jobs import Runner
from dllp.bench.store import LABELS, Store
from dllp.bench.summary import check, data_text, is_data, markdown, summarise
from dllp.bench.tables import Planned, Table, Variant
from dllp.errors import ArtifactError, DllpError

SUMMARY, MARKDOWN, PICTURE = "summary.json", "table.md", "picture.svg"
SUMMARIES = {"figure3": doubt.figure3, "figure4": doubt.figure4, "reliability": reliability.summarise}
TEXTS = {"figure3": doubt.markdown, "figure4": doubt.markdown, "reliability": reliability.markdown}
DENSITIES = ("figure2", "figure5")
SUMMARIES |= dict.fromkeys(DENSITIES, densities.summarise)
TEXTS |= dict.fromkeys(DENSITIES, densities.markdown)
PICTURES = {"figure3": doubt.draw, "figure4": doubt.draw, "reliability": reliability.draw}
PICTURES |= dict.fromkeys(DENSITIES, densities.draw)
"""What is no table has a summary, a text and a picture of its own."""


def open_store(out: Path, table: Table, variant: Variant) -> Store:
    """The table's results, with those of its sources at hand; a variant sees the same variant of them."""
    sources = [Store(out / f"{name}{variant.suffix}") for name in table.sources]
    return Store(folder_of(out, table, variant), sources)


def folder_of(out: Path, table: Table, variant: Variant) -> Path:
    """The table's own folder, or another one for runs that depart from the table."""
    return out / f"{table.name}{variant.suffix}"


def finish(
    plan: Sequence[Planned],
    store: Store,
    runner: Runner,
    *,
    note: Mapping[str, Any] | None = None,
    begin: Callable[[Planned], None] = lambda planned: None,
    done: Callable[[Planned, dict[str, Any]], None] = lambda planned, line: None,
) -> None:
    """Run the jobs that are not yet in the store; one that fails is reported after all others have run.

    Args:
        note: What every line is to say besides, for example the command.
        begin, done: Called before a job is run, and with its line after it was stored.
    """
    check_data(store, runner)
    failures: list[tuple[Planned, DllpError]] = []
    for planned in plan:
        if planned.job.digest in store.digests():  # another process may have finished it meanwhile
            continue
        begin(planned)
        try:
            outcome = runner.run(planned.job)
        except DllpError as error:
            failures.append((planned, error))
            continue
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"row": planned.row.name, **outcome.line, "date": now, **(note or {})}
        keep = planned.row.keep_probabilities and not planned.job.validation
        store.add(line, {**outcome.probabilities, LABELS: outcome.labels} if keep else None)
        done(planned, line)
    if failures:
        (planned, error), more = failures[0], len(failures) - 1
        others = f" ({more} more failed)" if more else ""
        raise type(error)(f"{planned.row.name}, seed {planned.job.seed}: {error}{others}")


def check_data(store: Store, runner: Runner) -> None:
    """Raise where finished runs saw other data than the runner has, whatever its folder is called."""
    mine = {**runner.splits.described, "name": ""}
    for line in store.lines():
        if is_data(line.get("data")) and {**line["data"], "name": ""} != mine:
            raise ArtifactError(
                f"{store.runs} holds runs on other data ({data_text(line['data'])}) than "
                f"{data_text(runner.splits.described)}: give another --out"
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
        raise ArtifactError(
            f"{store.runs}: a run is not one of {table.name} ({error!r}): remove its line, and its job runs again"
        ) from None
    artifacts.write_json(store.folder / SUMMARY, summary)
    artifacts.write_bytes(store.folder / MARKDOWN, TEXTS.get(table.name, markdown)(table, summary).encode())
    if table.name in PICTURES and pictures.installed():
        PICTURES[table.name](store.folder / PICTURE, summary)
    return summary
