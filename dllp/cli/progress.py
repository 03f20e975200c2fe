"""What the command line shows: progress while a run goes on, and the table at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dllp.deploy.speed import LayerTime, headline, holding_back
from dllp.deploy.speed import Row as SpeedRow
from dllp.deploy.speed import describe as describe_speed
from dllp.evaluation.evaluate import CLEAN, OOD, TOGETHER, Evaluation, Row
from dllp.records import EpochRecord
from dllp.training.state import RunState

try:
    import resource
except ImportError:  # Windows has none
    resource = None


NAME, WIDEST = 16, 10_000
"""Columns that a name keeps in a table on a narrow terminal, and in which every table finds room."""


class Silent(AbstractContextManager["Silent"]):
    """Shows nothing; the base of what shows something."""

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        """A training run of so many epochs starts; `target` is the fraction of the cost it is to keep."""

    def step(self, state: RunState) -> None:
        """Called after each step: must not look at tensors, which would wait for the device."""

    def epoch(self, record: EpochRecord) -> None:
        """Called after each epoch."""

    def __exit__(self, *exception: object) -> None:
        """Leave the terminal as it was."""


class Lines(Silent):
    """A plain line after an epoch, for files and pipes.

    Args:
        pause: Seconds from one line to the next at least: many runs after one another would fill a file otherwise.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.pause, self.last = pause, time.monotonic()

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        self.title, self.epochs, self.target = title, epochs, target
        self.steps, self.device, self.seconds = 0, torch.device("cpu"), 0.0

    def step(self, state: RunState) -> None:
        self.steps, self.device = state.steps_per_epoch, state.particles.device
        self.epochs = state.config.epochs  # fine-tuning has its own

    def epoch(self, record: EpochRecord) -> None:
        # the first epoch also warms up; later ones tell more about those to come
        self.seconds = (self.seconds + record.seconds) / 2 if self.seconds else record.seconds
        if time.monotonic() < self.last + self.pause:
            return
        self.last = time.monotonic()
        left = timedelta(seconds=round(self.seconds * (self.epochs - record.epoch)))
        rate = f"{self.steps / record.seconds:.1f} steps/s" if record.seconds else ""
        place = f"{self.title} epoch {record.epoch}/{self.epochs} {rate} {left} left"
        print(f"{place} {describe(record, self.target)} {memory(self.device)}".rstrip(), flush=True)


class Bar(Silent):
    """A live bar on standard error: epoch, rate, time left, loss, cost against target, temperature, gates, memory."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[epoch]}"), _Rate(),
            TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"),
            console=console,
        )  # fmt: skip
        self.task, self.device = TaskID(0), torch.device("cpu")
        self.bar.start()

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        self.epochs, self.target = epochs, target
        for old in self.bar.task_ids[:-2]:
            self.bar.remove_task(old)
        self.task = self.bar.add_task(title, total=None, epoch=f"epoch 1/{epochs}", numbers="")

    def step(self, state: RunState) -> None:
        self.device, self.epochs = state.particles.device, state.config.epochs  # fine-tuning has its own
        self.bar.update(self.task, total=state.total_steps, completed=state.step_index)

    def epoch(self, record: EpochRecord) -> None:
        epoch = f"epoch {min(record.epoch + 1, self.epochs)}/{self.epochs}"
        numbers = f"{describe(record, self.target)} {memory(self.device)}"
        self.bar.update(self.task, epoch=epoch, numbers=numbers)

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()


class _Rate(ProgressColumn):
    def render(self, task: Any) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.0f} steps/s" if speed else "", style="progress.data.speed")


def reporter(quiet: bool, pause: float = 0.0) -> Silent:
    """The bar where standard error is a terminal, lines with a `pause` where it is not, nothing when quiet."""
    if quiet:
        return Silent()
    return Bar(_stderr()) if sys.stderr.isatty() else Lines(pause)


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


def warn(text: str) -> None:
    """Print one line on standard error."""
    print("dllp: warning:", " ".join(text.split()), file=sys.stderr, flush=True)


def describe(record: EpochRecord, target: float | None) -> str:
    """The numbers of one epoch, means over the particles."""
    parts = [f"loss {_mean(record.loss):.4f}"]
    if record.phase != "open":
        goal = f" (target {target:g})" if target is not None else ""
        parts.append(f"cost {_mean(record.cost):.3f}{goal}")
    if record.phase == "soft":
        parts.append(f"τ {record.temperature:.2f} undecided {100 * _mean(record.undecided):.0f}%")
    return " ".join(parts)


def memory(device: torch.device) -> str:
    """Most memory that this process has held: of the device, or of the machine."""
    if device.type == "cuda":
        return _short(torch.cuda.max_memory_allocated(device), "B")
    if resource is None:
        return ""
    unit = 1 if sys.platform == "darwin" else 1024
    return _short(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "B")


@contextmanager
def status(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done; nothing where that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    with _stderr().status("") as line:
        yield lambda text: line.update(Text(text))  # a folder's name is no markup


# ---- tables


def show(rows: Sequence[Row], title: str) -> None:
    """Print rows of an evaluation: accuracy, costs and calibration of classifiers, the error of regressions."""
    regression = "rmse" in rows[0].metrics
    quality = {"rmse": "RMSE"} if regression else {"accuracy": "accuracy"}
    calibration = {"nll": "NLL"} if regression else {"ece": "ECE", "nll": "NLL"}
    columns = ("network", *quality.values(), "FLOPs\n(MACs)", "parameters", "bytes\non disk", *calibration.values())
    sections: dict[str, list[list[str]]] = {}
    for row in rows:
        cells = [row.name, *(_number(name, row.metrics.get(name)) for name in quality)]
        cells += [_short(row.macs, ""), _short(row.params, ""), _short(row.bytes, "B")]
        cells += [_number(name, row.metrics.get(name)) for name in calibration]
        sections.setdefault("" if row.data == CLEAN else row.data, []).append(cells)
    console = Console(file=sys.stdout)
    console.print(Text(title), soft_wrap=True)  # names out of files are no markup, and may be wider than the table
    console.print(_table(None, columns, sections), crop=False)


def show_evaluation(found: Evaluation, title: str) -> None:
    """Print an evaluation: the table, out-of-distribution inputs, estimation efficiency."""
    show([row for row in found.rows if not row.data.startswith(OOD)], title)
    _show_outside([row for row in found.rows if row.data.startswith(OOD)], "rmse" in found.rows[0].metrics)
    if len(found.efficiency) > 1:
        heads = "data", "s2", "a2", "b2", "n = 1", f"n = {found.efficiency[0].particles}"
        rows = [
            [e.data, f"{e.s2:.5f}", f"{e.a2:.5f}", f"{e.b2:.5f}", f"{100 * e.one:.1f}%", f"{100 * e.together:.1f}%"]
            for e in found.efficiency
        ]
        table = _table("estimation efficiency e = s2 / (s2 + a2/n + b2)", heads, {"": rows})
        Console(file=sys.stdout).print(table, crop=False)


def _show_outside(rows: Sequence[Row], regression: bool) -> None:
    """How well uncertainty sets out-of-distribution inputs apart.

    Of a classifier by entropy, and by mutual information of several particles; of a regression by variance.
    """
    names = {"auroc": "AUROC", "fpr95": "FPR95"}
    if not regression:
        names["auroc_mutual_information"] = "AUROC\nby information"
    sections: dict[str, list[list[str]]] = {}
    for row in rows:
        values = [row.metrics.get(name) for name in names]
        cells = [row.name, *("-" if value is None else f"{100 * value:.2f}%" for value in values)]
        sections.setdefault(row.data.removeprefix(OOD), []).append(cells)
    title = f"out-of-distribution inputs,\nby the {'variance' if regression else 'entropy'} of the prediction"
    if rows:
        Console(file=sys.stdout).print(_table(title, ("network", *names.values()), sections), crop=False)


def show_speed(rows: Sequence[SpeedRow], layers: Sequence[LayerTime], title: str) -> None:
    """Print what `dllp speed` measured, how much of the saved FLOPs became time, and the layers that hold it back."""
    console = Console(file=sys.stdout)
    console.print(render_speed(rows, title), crop=False)
    console.print("time share: time saved over FLOPs saved; int8: its accuracy was not measured")
    row = headline(rows)
    if row is None or row.share is None:
        return
    console.print(f"{100 * row.share:.0f}% of the saved FLOPs became time: {describe_speed(row)}", highlight=False)
    held = holding_back(layers) if row.share < 1 else []
    if held:
        console.print("what holds it back most, milliseconds dense -> pruned (ideal):")
    for layer in held:
        ideal = layer.dense_ms * layer.kept_macs
        widths = f"{layer.dense_width} -> {layer.pruned_width} channels"
        text = f"  {layer.layer} ({widths}): {layer.dense_ms:.2f} -> {layer.pruned_ms:.2f} ({ideal:.2f})"
        console.print(text, markup=False, highlight=False)


def render_speed(rows: Sequence[SpeedRow], title: str) -> Group:
    """A small table for each setting, then one with what does not depend on it; all fit 80 columns."""
    settings: dict[str, list[list[str]]] = {}
    sizes: dict[str, list[str]] = {}
    for row in rows:
        name, runtime = row.network + " int8" * row.runtime.endswith("int8"), row.runtime.split()[0]
        threads = f" {row.threads} thread{'s' * (row.threads > 1)}" if row.device == "cpu" else ""
        spread = f"{1e3 * row.low:.2f}-{1e3 * row.high:.2f}"
        gain = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        share = "-" if row.share is None else f"{100 * row.share:.0f}%"
        cells = [name, f"{1e3 * row.median:.2f}", spread, f"{row.throughput:.0f}", gain, share]
        settings.setdefault(f"{runtime}, {row.device}{threads}, batch {row.batch}", []).append(cells)
        if row.memory is not None:
            name = f"{name}, {runtime} {row.device}"
            sizes.setdefault(name, [name, _short(row.macs, ""), _short(row.bytes, "B"), _short(row.memory, "B")])
    heads = "network", "ms", "quartiles", "examples/s", "speed-up", "time share"
    parts = [_table(name, heads, {"": cells}) for name, cells in settings.items()]
    heads = "network", "MACs", "on disk", "peak"
    parts.append(_table("sizes (peak: memory at the largest batch)", heads, {"": list(sizes.values())}))
    return Group(Text(title, style="bold"), *parts)


class _Whole(Table):
    """A table that folds long names, and is wider than a narrow terminal rather than without ends of its numbers."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(width=WIDEST)
        names = max((console.measure(cell, options=free).maximum for cell in self.columns[0].cells), default=0)
        needed = self.__rich_measure__(console, free).maximum - max(0, names - NAME)
        yield from super().__rich_console__(console, options.update(width=max(options.max_width, needed)))


def _table(title: str | None, columns: Sequence[str], sections: Mapping[str, Sequence[Sequence[str]]]) -> Table:
    """Rows of cells under the name of their section, if it has one; names to the left, numbers to the right."""
    table = _Whole(
        title=title and Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=bool(i), overflow="fold")
    for name, rows in sections.items():
        if name:
            table.add_section()
            table.add_row(Text(name), style="italic")  # a folder's name is no markup
        for cells in rows:
            table.add_row(*cells, style="bold" if cells[0] == TOGETHER else None)
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
