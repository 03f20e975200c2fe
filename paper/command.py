"""`dllp bench`: run what a table or figure lacks, and write it from everything that is finished.

Knows nothing of the terminal: whoever calls it hands over what shows progress.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dllp.data import Dataset, names
from dllp.data.cifar10 import Progress
from dllp.data.unreadable import SkippedImage
from dllp.devices.device import environment, find_device
from dllp.errors import ConfigError
from dllp.records import EpochRecord
from dllp.runs.launch import Spread, check_launcher, finish, opened_pool
from dllp.training.state import RunState
from paper import summary, tables
from paper.coloured_digits import DATA, load_data
from paper.jobs import Runner
from paper.launch import Book, Settings, in_short, say_left_out, seen_data
from paper.provenance import source
from paper.store import Store
from paper.transformers import command as transformers

RESULTS = "results"
PLACES = ("out", "data", "data_root", "texts", "models")
"""Options that name folders."""
Download = Callable[[], AbstractContextManager[Progress | None]]


class Nothing(AbstractContextManager["Nothing"]):
    """Shows nothing of trainings; see :class:`dllp.cli.progress.Silent`."""

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        """A training starts."""

    def step(self, state: RunState) -> None:
        """It took a step."""

    def epoch(self, record: EpochRecord) -> None:
        """It finished an epoch."""

    def __exit__(self, *exception: object) -> None:
        """Nothing to put away."""


def execute(
    given: Mapping[str, Any],
    *,
    download: Download = nullcontext,
    reporter: Callable[[], AbstractContextManager[Nothing]] = Nothing,
    program: str = "dllp bench",
) -> None:
    """One call of the command.

    Args:
        given: Its options by name, only those that the user gave.
        download, reporter: Open what shows a download, and what shows trainings.
        program: The command itself, as the user typed it.
    """
    check_launcher(given)
    share = shard(given.get("shard", "1/1"))
    if given["name"] == transformers.NAME:
        return transformers.execute(given, typed(program, given), tables.settings(given.get("set", ())), share)
    for option in ("texts", "models"):
        if option in given:
            raise ConfigError(f"{given['name']} reads no texts: leave out --{option}")
    settings, quiet = tables.settings(given.get("set", ())), given.get("quiet", False)
    table = tables.table(given["name"]).set(settings, given.get("rows", ()))
    variant = tables.Variant(given.get("epochs"), given.get("validation", 0), settings)
    if variant.validation and table.name in summary.OF_PREDICTIONS:
        raise ConfigError(f"{table.name} is about predictions on the test set: leave out --validation")
    plan = table.plan(given.get("rows", ()), given.get("seeds"), variant, share)
    command = typed(program, given)
    note = {**environment(torch.device("cpu")), **source(), "deterministic": True, "command": command}
    store = summary.open_store(Path(given.get("out", RESULTS)), table, variant, note)
    if given.get("list"):
        finished = store.digests() | store.adoptable()
        for planned in plan:
            print("done" if planned.job.digest in finished else "    ", planned.job.digest, planned.name)
        print(f"{sum(planned.job.digest in finished for planned in plan)} of {len(plan)} jobs are finished")
        return
    try:
        store.adopt({planned.job.digest: planned.row.predictions != "none" for planned in plan})
        finished = store.digests()
        if not given.get("summary_only") and ("again" in given or any(p.job.digest not in finished for p in plan)):
            work = _Work(plan, store, data_of(table, given), given, share[1], command)
            if "launcher" in given:
                work.elsewhere(download)
            else:
                work.here(download, reporter)
    finally:
        written = summary.write_summary(table, store, variant)
    if written is None and given.get("summary_only"):
        raise ConfigError(f"{store.folder} has no finished job to sum up: name the folder of all results with --out")
    if not quiet and written is not None:
        print((store.folder / summary.MARKDOWN).read_text(encoding="utf-8"))
        print(f"results: {store.folder}")
    return None


@dataclass(frozen=True)
class _Work:
    """The jobs of one call on one data set; `shards` processes share them."""

    plan: Sequence[tables.Planned]
    store: Store
    data: str
    given: Mapping[str, Any]
    shards: int
    command: str

    def here(self, download: Download, reporter: Callable[[], AbstractContextManager[Nothing]]) -> None:
        """One job after another in this process."""
        device = find_device(self.given.get("device", "auto"))
        with download() as bar:
            data = self._load(bar)
        with reporter() as shown:
            machine = {"device": str(device), "precision": self._precision(device.type), "recompute": self._recompute}
            watch = {"on_epoch": shown.epoch, "on_step": shown.step}
            runner = Runner(data, everywhere=self._everywhere, **watch, **machine)

            def begin(planned: tables.Planned) -> None:
                config = runner.config(planned.job)
                shown.begin(planned.name, config.epochs, config.budget[1])

            runner.splits.check(seen_data(self.store))
            book = self._book(1)
            finish(self.plan, book, runner.run, begin)
            book.close()

    def elsewhere(self, download: Download) -> None:
        """In processes of this machine, or on a cluster."""
        reported: list[str] = []
        if self.given["launcher"] == "local":
            with download() as bar:  # one download for all, and mistakes are errors before a process starts
                self._load(bar, reported)

        def report(text: str) -> None:
            if not self.given.get("quiet"):
                print(f"dllp: {text}", file=sys.stderr, flush=True)

        with opened_pool(self.given, lambda device: self._settings(device, reported)) as pool:
            book = self._book(pool.sharing)
            Spread(tables.units(self.plan), pool, book, report).run()
        book.close()

    def _load(self, bar: Progress | None, reported: list[str] | None = None) -> Dataset:
        """The data; images that cannot be read are reported, and added to `reported`."""

        def report(image: SkippedImage) -> None:
            if reported is not None:
                reported.append(_absolute(image.name))
            if not self.given.get("quiet"):
                say_left_out(image)

        return load_data(self.data, root=self.given.get("data_root"), progress=bar, report=report, **self._loading)

    def _settings(self, device: str, reported: Sequence[str] = ()) -> Settings:
        """Places as seen from anywhere: workers may start in another folder."""
        data, root = self.data, self.given.get("data_root")
        data = data if data in (*names(), DATA) else _absolute(data)
        return Settings(
            data, root and _absolute(root), self._precision(device), device=device, loading=self._loading,
            recompute=self._recompute, everywhere=self._everywhere, seen=seen_data(self.store), reported=reported,
            quiet=self.given.get("quiet", False),
        )  # fmt: skip

    @property
    def _loading(self) -> dict[str, Any]:
        """How images of a folder are read."""
        return {option: self.given[option] for option in ("image_size", "workers", "max_bad") if option in self.given}

    @property
    def _everywhere(self) -> bool:
        return any(planned.row.predictions != "none" for planned in self.plan)

    @property
    def _recompute(self) -> bool:
        return self.given.get("recompute", False)

    def _precision(self, device: str) -> str:
        return self.given.get("precision", "bfloat16" if device.startswith("cuda") else "float32")

    def _book(self, sharing: int) -> Book:
        """Where finished jobs go, once the data is known to be there; those to be run again are unfinished now."""
        finished = self.store.digests() if "again" in self.given else set()
        for planned in self.plan:
            if planned.job.digest in finished:
                self.store.supersede(planned.job.digest, self.given["again"])

        def done(planned: tables.Planned, line: dict[str, Any]) -> None:
            if not self.given.get("quiet"):
                print(f"{planned.name}: {in_short(line)}", flush=True)

        return Book(self.store, {"command": self.command, "processes": self.shards * sharing}, done)


def _absolute(path: str) -> str:
    return path if path.startswith("~") else str(Path(path).absolute())


def data_of(table: tables.Table, given: Mapping[str, Any]) -> str:
    """The data that a table is measured on: its own, or the folder that the user names."""
    if table.data and "data" in given:
        raise ConfigError(f"{table.name} is measured on {table.data}: leave out --data")
    if not table.data and "data" not in given:
        raise ConfigError(f"{table.name} needs --data FOLDER with train/<class>/ and val/<class>/, such as ImageNet's")
    return table.data or given["data"]


def shard(text: str) -> tuple[int, int]:
    """'2/3' -> (2, 3)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise ConfigError(f"shard = {text!r}: give I/N with I from 1 to N, for example 1/2")
    return index, count


def typed(program: str, given: Mapping[str, Any]) -> str:
    """The command as it was typed, but for the place of folders on this machine."""
    words = [word for option, value in given.items() if option != "name" for word in _words(option, value)]
    return shlex.join([*program.split(), given["name"], *words])


def _words(option: str, value: Any) -> list[str]:
    """An option as it is typed, a folder by its name where that begins at the root or at home."""
    values = [] if value is True else value if isinstance(value, list) else [value]
    if option in PLACES and _absolute(str(value)) == value:
        values = [Path(str(value)).name]
    return ["--" + option.replace("_", "-"), *map(str, values)] if value is not False else []
