"""Displays of the command line: lines, a bar or TensorBoard while a run goes on, and the tables at its end."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dllp.deploy.speed import LayerTime, advice, headline, holding_back, truth
from dllp.deploy.speed import Row as SpeedRow
from dllp.deploy.speed import describe as describe_speed
from dllp.errors import ConfigError
from dllp.evaluation.evaluate import CLEAN, OOD, TOGETHER, Evaluation, Row
from dllp.evaluation.weight_analysis import WHOLE, tails
from dllp.method.weight_laws import FEWEST
from dllp.records import EpochRecord, best_epoch
from dllp.report.page import short_number
from dllp.training.state import RunState

WIDTH = 80  # columns in which every table finds room; on a narrower terminal its lines wrap, and no number is cut
CURVES = ("loss", "accuracy", "validation_loss", "validation_accuracy", "cost", "undecided", "multiplier", "noise",
          "lr", "temperature", "budget", "discrepancy", "seconds")  # fmt: skip
"""Fields of an epoch's record that TensorBoard shows."""


class Silent(AbstractContextManager["Silent"]):
    """Shows nothing; the base of what shows something."""

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        """A training run of so many epochs starts; `target` is the fraction of the cost it is to keep."""
        self.title, self.epochs, self.target = title, epochs, target
        self.device = torch.device("cpu")

    def step(self, state: RunState) -> None:
        """Called after each step: must not look at tensors, which would wait for the device."""
        self.device, self.epochs = state.particles.device, state.config.epochs  # fine-tuning has its own

    def epoch(self, record: EpochRecord) -> None:
        """Called after each epoch."""

    def __exit__(self, *exception: object) -> None:
        """Leave the terminal as it was."""


class Lines(Silent):
    """A plain line after an epoch, for files and pipes, with a `pause` of seconds at least from one to the next."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause, self.last = pause, time.monotonic()

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        super().begin(title, epochs, target)
        self.steps, self.seconds = 0, 0.0

    def step(self, state: RunState) -> None:
        super().step(state)
        self.steps = state.steps_per_epoch

    def epoch(self, record: EpochRecord) -> None:
        # the first epoch also warms up; later ones predict better how long those to come will take
        self.seconds = (self.seconds + record.seconds) / 2 if self.seconds else record.seconds
        if time.monotonic() < self.last + self.pause:
            return
        self.last = time.monotonic()
        left = timedelta(seconds=round(self.seconds * (self.epochs - record.epoch)))
        rate = f"{self.steps / record.seconds:.1f} steps/s" if record.seconds else ""
        place = f"{self.title} epoch {record.epoch}/{self.epochs} {rate} {left} left"
        print(f"{place} {describe(record, self.target, self.device)}", flush=True)


class Bar(Silent):
    """A live bar on standard error: epoch, rate, time left, loss, cost against target, temperature, gates, memory."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[epoch]}"), _Rate(),
            TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"),
            console=console,
        )  # fmt: skip
        self.bar.start()

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        super().begin(title, epochs, target)
        for old in self.bar.task_ids[:-2]:
            self.bar.remove_task(old)
        self.task = self.bar.add_task(title, total=None, epoch=f"epoch 1/{epochs}", numbers="")

    def step(self, state: RunState) -> None:
        super().step(state)
        self.bar.update(self.task, total=state.total_steps, completed=state.step_index)

    def epoch(self, record: EpochRecord) -> None:
        epoch = f"epoch {min(record.epoch + 1, self.epochs)}/{self.epochs}"
        self.bar.update(self.task, epoch=epoch, numbers=describe(record, self.target, self.device))

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
    return Bar(Console(stderr=True)) if sys.stderr.isatty() else Lines(pause)


@contextmanager
def download(quiet: bool) -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar for data that must be fetched; it shows nothing until bytes arrive."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    columns = "downloading", BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def report(done: int, size: int | None) -> None:
            task = bar.task_ids[0] if bar.task_ids else bar.add_task("")
            bar.update(task, completed=done, total=size)

        yield report


def warn(text: str) -> None:
    """Print one line on standard error."""
    print("dllp: warning:", " ".join(text.split()), file=sys.stderr, flush=True)


def describe(record: EpochRecord, target: float | None, device: torch.device) -> str:
    """The numbers of one epoch, means over the particles, and the most memory that was taken on a GPU."""
    parts = [f"loss {fmean(record.loss):.4f}"]
    if record.validation_accuracy:
        parts.append(f"validation {100 * fmean(record.validation_accuracy):.2f}%")
    elif record.validation_loss:
        parts.append(f"validation {fmean(record.validation_loss):.4f}")
    if record.phase != "open":
        goal = f" (target {target:g})" if target is not None else ""
        parts.append(f"cost {fmean(record.cost):.3f}{goal}")
    if record.phase == "soft":
        parts.append(f"τ {record.temperature:.2f} undecided {100 * fmean(record.undecided):.0f}%")
    if device.type == "cuda":
        parts.append(short_number(torch.cuda.max_memory_allocated(device), "B"))
    return " ".join(parts)


def next_step(command: str, folder: str, args: Namespace, more: str = "") -> str:
    """The line that names the command to go on with, with the network where this one was given it."""
    model = args.chosen.get("model")
    words = ["dllp", command, shlex.quote(folder), *([f"--model {shlex.quote(model)}"] if model else []), more]
    trusted = "--trust-imports" if args.trust_imports and not model else ""
    return f"next: {' '.join(filter(None, [*words, trusted]))}"


def validated(history: Sequence[Mapping[str, Any]]) -> str:
    """The last epoch's validation and the best one, in a line."""
    records = [EpochRecord(**record) for record in history]
    best, last = best_epoch(records), records[-1]

    def value(record: EpochRecord) -> str:
        if record.validation_accuracy:
            return f"{100 * fmean(record.validation_accuracy):.2f}%"
        return f"{fmean(record.validation_loss or ()):.4f}"

    return f"validation: {value(last)} in the last epoch, the result; the best was {value(best)} in epoch {best.epoch}"


@contextmanager
def status(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done; nothing where that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status("") as line:
        yield lambda text: line.update(Text(text))  # a folder's name is no markup


# ---- TensorBoard


def require_tensorboard() -> None:
    """Raise where it is not installed, with the way to get it."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs tensorboard: pip install 'dllp[tensorboard]'")


class Board:
    """The curves and histograms of one training for TensorBoard, in a folder; nothing without one."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.writer: Any = None

    def start(self, state: RunState) -> None:
        """Begin, or begin again after a rollback: what was written of later epochs is purged."""
        if self.folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self.state = state
        self.writer = SummaryWriter(str(self.folder), purge_step=len(state.history) + 1)

    def epoch(self, record: EpochRecord) -> None:
        """The curves, one for each particle where there are several, and the histograms."""
        if self.writer is None:
            return
        for name in CURVES:
            value = getattr(record, name)
            parts = value if isinstance(value, list) else [] if value is None else [value]
            for i, part in enumerate(parts):
                self.writer.add_scalar(name if len(parts) == 1 else f"{name}/particle {i + 1}", part, record.epoch)
        logits = self.state.latents.logits
        if logits.numel():
            self.writer.add_histogram("gates", logits.sigmoid(), record.epoch)
        for name, parameter in self.state.particles.networks[0].named_parameters():
            if parameter.dim() > 1:
                self.writer.add_histogram(f"weights/{name}", parameter.detach(), record.epoch)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


# ---- tables


def show(rows: Sequence[Row], title: str) -> None:
    """Print rows of an evaluation: accuracy, costs and calibration of classifiers, the error of regressions."""
    regression = "rmse" in rows[0].metrics
    quality = {"rmse": "RMSE"} if regression else {"accuracy": "accuracy"}
    calibration = {"nll": "NLL"} if regression else {"ece": "ECE", "nll": "NLL"}
    columns = ("network", *quality.values(), "FLOPs\n(MACs)", "parameters", "bytes\non disk", *calibration.values())
    sections: dict[str, list[list[str]]] = {}
    for row in rows:
        size = "-" if row.bytes is None else short_number(row.bytes, "B")
        costs = short_number(row.macs), short_number(row.params), size
        cells = [row.name, *_numbers(row, quality), *costs, *_numbers(row, calibration)]
        sections.setdefault("" if row.data == CLEAN else row.data, []).append(cells)
    console = _stdout()
    console.print(Text(title), soft_wrap=True)  # names out of files are no markup, and may be wider than the table
    console.print(_table(None, columns, sections))


def show_evaluation(found: Evaluation, title: str) -> None:
    """Print an evaluation: the table, out-of-distribution inputs, estimation efficiency."""
    show([row for row in found.rows if not row.data.startswith(OOD)], title)
    outside = [row for row in found.rows if row.data.startswith(OOD)]
    if outside:
        _show_outside(outside, "rmse" in found.rows[0].metrics)
    if len(found.efficiency) > 1:
        heads = "data", "s2", "a2", "b2", "n = 1", f"n = {found.efficiency[0].particles}"
        rows = [
            [e.data, f"{e.s2:.5f}", f"{e.a2:.5f}", f"{e.b2:.5f}", f"{100 * e.one:.1f}%", f"{100 * e.together:.1f}%"]
            for e in found.efficiency
        ]
        _stdout().print(_table("estimation efficiency e = s2 / (s2 + a2/n + b2)", heads, {"": rows}))


def _show_outside(rows: Sequence[Row], regression: bool) -> None:
    """How well uncertainty sets out-of-distribution inputs apart: entropy and mutual information, or variance."""
    names = {"auroc": "AUROC", "fpr95": "FPR95"}
    names |= {} if regression else {"auroc_mutual_information": "AUROC\nby information"}
    sections: dict[str, list[list[str]]] = {}
    for row in rows:
        sections.setdefault(row.data.removeprefix(OOD), []).append([row.name, *_numbers(row, names)])
    title = f"out-of-distribution inputs,\nby the {'variance' if regression else 'entropy'} of the prediction"
    _stdout().print(_table(title, ("network", *names.values()), sections))


WEIGHTS = {
    "count": ("weights", ","), "std": ("std", "#.3g"), "near_zero": ("near\nzero", ".2f"),
    "kurtosis": ("excess\nkurt.", ".2f"), "ks": ("KS", ".3f"), "dip_p": ("dip\np", ".2f"),
    "wasserstein": ("W", ".3f"), "law": ("best\nlaw", ""), "law_ks": ("its\nKS", ".3f"),
}  # fmt: skip
"""Head and format of each figure of a set of weights."""
LAWS = {"amoroso": "amoroso", "amoroso_2": "amoroso 2", "pareto": "pareto", "generalised_pareto": "GPD"}


def show_weights(report: Mapping[str, Any]) -> None:
    """Print the figures of `weight_analysis.analyze`: all layers pooled, then each, and how to read them."""

    def row(part: str, shape: Mapping[str, Any]) -> list[str]:
        fits = shape["fits"]
        best = max(fits, key=lambda law: fits[law]["log_likelihood"]) if fits else None
        values = {**shape, "law": best and LAWS[best], "law_ks": best and fits[best]["ks"]}
        return [part, *(_cell(values[key], form) for key, (_, form) in WEIGHTS.items())]

    named = {WHOLE: report[WHOLE], **report["layers"]}
    sections = {name: [row(part, shape) for part, shape in parts.items() if shape] for name, parts in named.items()}
    heads = "", *(head for head, _ in WEIGHTS.values())
    console = _stdout()
    console.print(_table(None, heads, {name: rows for name, rows in sections.items() if rows}))
    if report.get("moments"):
        heads = "", "near zero", "KS", "dip p", "accuracy", "NLL"
        forms = {"near_zero": ".2f", "ks": ".3f", "dip_p": ".2f", "accuracy": ".2%", "nll": ".4f"}
        rows = [[m["name"], *(_cell(m.get(name), form) for name, form in forms.items())] for m in report["moments"]]
        title = "kept weights before and after the gates were decided, and at the end"
        console.print(_table(title, heads, {"": rows}))
    tail = tails(report["layers"])
    if tail is not None:
        rows = [[name, f"{found['k']:.3g}", f"{found['predicted']:.3g}"] for name, found in tail["layers"].items()]
        title = f"Pareto tail of the kept weights, equation 8, with one h = {tail['h']:.3g} for all layers"
        console.print(_table(title, ("", "k as fitted", "h / std before"), {"": rows}))
    console.print(
        "near zero: weights within a tenth of a standard deviation, over what a Gaussian has there (1: as a Gaussian; "
        "0: cut away). KS: distance to the Gaussian of the same mean and deviation. dip p: below 0.05 there is more "
        f"than one mode. W: Wasserstein distance to the weights of {report['reference']}, standardised. best law: of "
        "the magnitudes, by likelihood, and its KS distance to them; GPD: generalised Pareto. whole: layers "
        f"standardised, then pooled. Parts of fewer than {FEWEST} weights, or of equal ones, have no row.",
        highlight=False,
    )


def show_speed(rows: Sequence[SpeedRow], layers: Sequence[LayerTime], title: str, int8: str = "") -> None:
    """Print what `dllp speed` measured, how much of the saved FLOPs became time, and the layers that hold it back."""
    settings: dict[str, list[list[str]]] = {}
    sizes: dict[str, list[str]] = {}
    for row in rows:
        name, runtime = row.network + " int8" * row.runtime.endswith("int8"), row.runtime.split()[0]
        threads = f" {row.threads} thread{'s' * (row.threads > 1)}" if row.device == "cpu" else ""
        spread = f"{1e3 * row.low:.2f}-{1e3 * row.high:.2f}"
        gain = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        share = "-" if row.share is None else f"{100 * row.share:.0f}%"
        right = "-" if row.accuracy is None else f"{row.accuracy:.2%}"
        cells = [name, f"{1e3 * row.median:.2f}", spread, f"{row.throughput:.0f}", gain, share, right]
        settings.setdefault(f"{runtime}, {row.device}{threads}, batch {row.batch}", []).append(cells)
        if row.memory is not None:
            name = f"{name}, {runtime} {row.device}"
            sizes.setdefault(name, [name, *map(short_number, (row.macs, row.bytes, row.memory), ("", "B", "B"))])
    console = _stdout()
    console.print(Text(title, style="bold"))
    heads = "network", "ms", "quartiles", "examples/s", "speed-up", "time share", "accuracy"
    for name, cells in settings.items():
        console.print(_table(name, heads, {"": cells}))
    heads = "network", "MACs", "on disk", "peak"
    console.print(_table("sizes (peak: memory at the largest batch)", heads, {"": list(sizes.values())}))
    console.print("time share: time saved over FLOPs saved")
    if int8:
        console.print(int8, markup=False, highlight=False, soft_wrap=True)
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
    console.print(truth(rows, layers), markup=False, highlight=False, soft_wrap=True)
    if advice(rows):
        console.print(advice(rows), markup=False, highlight=False, soft_wrap=True)


def show_structure(report: Mapping[str, Any]) -> None:
    """Print what `dllp structure` found: a row for each kind of unit, and each reason with the layers it holds for."""
    console = _stdout()
    macs, params = short_number(report["macs"]), short_number(report["params"])
    console.print(Text(f"{report['model']}: {macs} MACs, {params} parameters"))
    units = sum(group["units"] for group in report["groups"])
    every = {"groups": len(report["groups"]), "units": units, "least": report["least"]}
    rows = [
        [kind, str(found["groups"]), str(found["units"]), *(f"{1 - found['least'][c]:.1%}" for c in ("macs", "params"))]
        for kind, found in {**report["kinds"], "all of them": every}.items()
    ]
    columns = ("kind of unit", "groups", "units", "MACs that\ncan go", "parameters\nthat can go")
    console.print(_table(None, columns, {"": rows}))
    reasons: dict[str, list[str]] = {}
    for name, why in report["whole"].items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        console.print(Text(f"whole: {', '.join(names[:3])}{more}: {why}"), soft_wrap=True)


def _stdout() -> Console:
    console = Console(file=sys.stdout)
    console.width = max(console.width, WIDTH)
    return console


def _table(title: str | None, columns: Sequence[str], sections: Mapping[str, Sequence[Sequence[str]]]) -> Table:
    """Rows of cells under the name of their section, if it has one; names to the left, numbers to the right."""
    heading = title and Text(title)
    table = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=bool(i), overflow="fold")
    for name, rows in sections.items():
        if name:
            table.add_section()
            table.add_row(Text(name), style="italic")  # a folder's name is no markup
        for cells in rows:
            table.add_row(*cells, style="bold" if cells[0] == TOGETHER else None)
    return table


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _numbers(row: Row, names: Iterable[str]) -> list[str]:
    """Metrics of a row: likelihood and error as they are, all others in percent."""
    forms = {"nll": ".4f", "rmse": ".4f"}
    return [format(row.metrics[name], forms.get(name, ".2%")) if name in row.metrics else "-" for name in names]
