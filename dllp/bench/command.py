"""`dllp bench`: run what a table or figure lacks, and write it from everything that is finished.

Knows nothing of the terminal: whoever calls it hands over what shows progress.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from dllp.bench import run, tables
from dllp.bench.jobs import Runner
from dllp.bench.store import Store
from dllp.data import load
from dllp.data.download import Progress
from dllp.devices import find_device
from dllp.errors import ConfigError
from dllp.train import EpochRecord, Trainer

RESULTS = "results"


class Shown(Protocol):
    """What shows a training: see :class:`dllp.progress.Silent`."""

    def begin(self, title: str, epochs: int, target: float | None) -> None: ...

    def step(self, trainer: Trainer) -> None: ...

    def epoch(self, record: EpochRecord) -> None: ...


class Nothing(AbstractContextManager["Nothing"]):
    """Shows nothing."""

    def begin(self, title: str, epochs: int, target: float | None) -> None:
        """A training starts."""

    def step(self, trainer: Trainer) -> None:
        """It took a step."""

    def epoch(self, record: EpochRecord) -> None:
        """It finished an epoch."""

    def __exit__(self, *exception: object) -> None:
        """Nothing to put away."""


def execute(
    given: Mapping[str, Any],
    *,
    download: Callable[[], AbstractContextManager[Progress | None]] = nullcontext,
    reporter: Callable[[], AbstractContextManager[Shown]] = Nothing,
) -> None:
    """One call of the command.

    Args:
        given: Its options by name, only those that the user gave.
        download, reporter: Open what shows a download, and what shows trainings.
    """
    table, quiet = tables.table(given["name"]), given.get("quiet", False)
    variant = tables.Variant(given.get("epochs"), given.get("validation", 0))
    share = shard(given.get("shard", "1/1"))
    plan = table.plan(given.get("rows", ()), given.get("seeds"), variant, share)
    store = run.open_store(Path(given.get("out", RESULTS)), table, variant)
    if given.get("list"):
        finished = store.digests() | {digest for source in store.sources for digest in source.digests()}
        for planned in plan:
            print("done" if planned.job.digest in finished else "    ", planned.job.digest, run.describe(planned))
        print(f"{sum(planned.job.digest in finished for planned in plan)} of {len(plan)} jobs are finished")
        return
    try:
        store.adopt([planned.job.digest for planned in plan])
        finished = store.digests()
        if not given.get("summary_only") and any(planned.job.digest not in finished for planned in plan):
            _run(plan, store, data_of(table, given), given, share[1], download, reporter)
    finally:
        summary = run.write_summary(table, store, variant)
    if not quiet and summary is not None:
        print((store.folder / run.MARKDOWN).read_text(encoding="utf-8"))
        print(f"results: {store.folder}")


def _run(
    plan: Sequence[tables.Planned],
    store: Store,
    name: str,
    given: Mapping[str, Any],
    processes: int,
    download: Callable[[], AbstractContextManager[Progress | None]],
    reporter: Callable[[], AbstractContextManager[Shown]],
) -> None:
    device = find_device(given.get("device", "auto"))
    precision = given.get("precision", "bfloat16" if device.type == "cuda" else "float32")
    with download() as bar:
        options = {option: given[option] for option in ("image_size", "workers") if option in given}
        data = load(name, root=given.get("data_root"), progress=bar, **options)
    words = [word for option, value in given.items() if option != "name" for word in _words(option, value)]
    note = {"command": shlex.join(["dllp", "bench", given["name"], *words]), "processes": processes}
    with reporter() as shown:
        machine = {"device": str(device), "precision": precision, "recompute": given.get("recompute", False)}
        runner = Runner(data, on_epoch=shown.epoch, on_step=shown.step, **machine)

        def begin(planned: tables.Planned) -> None:
            config = runner.config(planned.job)
            shown.begin(run.describe(planned), config.epochs, config.keep_params or config.keep_flops)

        def done(planned: tables.Planned, line: dict[str, Any]) -> None:
            if not given.get("quiet"):
                print(f"{run.describe(planned)}: {run.figures(line)}", flush=True)

        run.finish(plan, store, runner, note=note, begin=begin, done=done)


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


def _words(option: str, value: Any) -> list[str]:
    """An option as it is typed."""
    values = [] if value is True else value if isinstance(value, list) else [value]
    return ["--" + option.replace("_", "-"), *map(str, values)] if value is not False else []
