"""What the command line shows: progress while a run goes on, and the table at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dllp.evaluate import CLEAN, TOGETHER, Row
from dllp.train import EpochRecord, Trainer


class Silent(AbstractContextManager["Silent"]):
    """Shows nothing; the base of what shows something."""

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        """A training run of so many epochs starts; `target` is the fraction of the cost it is to keep."""

    def step(self, trainer: Trainer) -> None:
        """Called after each step: must not look at tensors, which would wait for the device."""

    def epoch(self, record: EpochRecord) -> None:
        """Called after each epoch."""

    def __exit__(self, *exception: object) -> None:
        """Leave the terminal as it was."""


class Lines(Silent):
    """One plain line for each epoch, for files and pipes."""

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        self.title, self.epochs, self.target = title, epochs, target

    def epoch(self, record: EpochRecord) -> None:
        place = f"{self.title} epoch {record.epoch}/{self.epochs}"
        print(f"{place} {record.seconds:.1f} s {describe(record, self.target)}", flush=True)


class Bar(Silent):
    """A live bar on standard error: epoch, rate, time left, loss, cost against target, temperature."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[epoch]}"), _Rate(),
            TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"),
            console=console,
        )  # fmt: skip
        self.task = TaskID(0)
        self.bar.start()

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        self.epochs, self.target = epochs, target
        for old in self.bar.task_ids[:-2]:
            self.bar.remove_task(old)
        self.task = self.bar.add_task(title, total=None, epoch=f"epoch 1/{epochs}", numbers="")

    def step(self, trainer: Trainer) -> None:
        self.bar.update(self.task, total=trainer.total_steps, completed=trainer.step_index)

    def epoch(self, record: EpochRecord) -> None:
        epoch = f"epoch {min(record.epoch + 1, self.epochs)}/{self.epochs}"
        self.bar.update(self.task, epoch=epoch, numbers=describe(record, self.target))

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()


class _Rate(ProgressColumn):
    def render(self, task: Any) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.0f} steps/s" if speed else "", style="progress.data.speed")


def reporter(quiet: bool) -> Silent:
    """The bar where standard error is a terminal, lines where it is not, nothing when quiet."""
    if quiet:
        return Silent()
    return Bar(_stderr()) if sys.stderr.isatty() else Lines()


@contextmanager
def download(quiet: bool) -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar for data that must be fetched; it shows nothing until bytes arrive."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with Progress("downloading", BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=_stderr()) as bar:

        def report(done: int, size: int | None) -> None:
            task = bar.task_ids[0] if bar.task_ids else bar.add_task("")
            bar.update(task, completed=done, total=size)

        yield report


def describe(record: EpochRecord, target: float | None) -> str:
    """The numbers of one epoch, means over the particles."""
    parts = [f"loss {_mean(record.loss):.4f}"]
    if record.phase != "open":
        goal = f" (target {target:g})" if target is not None else ""
        parts.append(f"cost {_mean(record.cost):.3f}{goal}")
    if record.phase == "soft":
        parts.append(f"τ {record.temperature:.2f}")
    return " ".join(parts)


def show(rows: Sequence[Row], title: str) -> None:
    """Print the table on standard output."""
    Console(file=sys.stdout).print(render(rows, title))


def render(rows: Sequence[Row], title: str) -> Table:
    """Rows as a table: accuracy, costs and calibration for classification, the error for regression."""
    regression = "rmse" in rows[0].metrics
    quality = {"rmse": "RMSE"} if regression else {"accuracy": "accuracy"}
    doubt = {"nll": "NLL"} if regression else {"ece": "ECE", "nll": "NLL"}
    table = Table(title=title, title_justify="left")
    table.add_column("network", no_wrap=True)
    for name in (*quality.values(), "FLOPs\n(MACs)", "parameters", "bytes\non disk", *doubt.values()):
        table.add_column(name, justify="right", no_wrap=True)
    place = CLEAN
    for row in rows:
        if row.data != place:
            place = row.data
            table.add_section()
            table.add_row(place, style="italic")
        cells = [row.name]
        cells += [_number(name, row.metrics.get(name)) for name in quality]
        cells += [_short(row.macs, ""), _short(row.params, ""), _short(row.bytes, "B")]
        cells += [_number(name, row.metrics.get(name)) for name in doubt]
        table.add_row(*cells, style="bold" if row.name == TOGETHER else None)
    return table


def _stderr() -> Console:
    return Console(stderr=True)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}%" if name in ("accuracy", "ece") else f"{value:.4f}"


def _short(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()
