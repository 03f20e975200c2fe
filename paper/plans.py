"""What a table consists of: rows, what is quoted beside them, and the plan of jobs that make it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from dllp import zoo
from dllp.baselines import find, hyperparameters
from dllp.baselines.protocol import PRIOR_SETTINGS
from dllp.config import Config
from dllp.errors import ConfigError
from paper.jobs import MACHINE, Job

FIVE, THREE = (0, 1, 2, 3, 4), (0, 1, 2)
OF_JOB = ("network", "finetune_lr")
OF_COMMAND = {"seed": "--seeds", "epochs": "--epochs", "device": "--device", "precision": "--precision"}
OF_CONFIG = {f.name for f in fields(Config)} - {*MACHINE, *OF_COMMAND, "granularity"}
"""What may be set for the jobs of a table, besides the hyperparameters of their methods."""


@dataclass(frozen=True)
class Row:
    """One row: the same job for several seeds.

    Attributes:
        name: Unique in the table; `--rows` selects by it.
        job: What is run, its seed aside.
        seeds: The seeds of a full run.
        wanted: What the row should reach: `drop` at most, `acc` and `gain` (all particles over dense) at least.
        predictions: What becomes of its test probabilities: `none` are stored, they are `judged` and go when their
            figures are written down, or they are `kept` because more may be computed from them.
    """

    name: str
    job: Job
    seeds: tuple[int, ...] = THREE
    wanted: tuple[tuple[str, float], ...] = ()
    predictions: Literal["none", "judged", "kept"] = "none"


@dataclass(frozen=True)
class Quoted:
    """A row as the paper prints it: all in percent."""

    method: str
    network: str
    dense_acc: float
    flops_removed: float
    drop: float


@dataclass(frozen=True)
class Variant:
    """How a run departs from the table; whatever departs has a folder of its own and never enters the table.

    Attributes:
        epochs: Instead of the jobs' own, for a quick try.
        validation: Training images held out, and evaluated on instead of the test set.
        settings: Those of :meth:`Table.set`.
    """

    epochs: int | None = None
    validation: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs = {self.epochs}: at least 1 is needed")
        if self.validation < 0:
            raise ConfigError(f"validation = {self.validation}: give the number of training images to hold out")

    def of(self, job: Job, seed: int) -> Job:
        """The job as this variant runs it."""
        job = replace(job, seed=seed, validation=self.validation)
        if not self.epochs:
            return job
        finetune = min(job.finetune, -(-self.epochs // 2))  # half of the training, as in the tables
        pretrain = min(round(self.epochs * job.pretrain / job.epochs), self.epochs - 1)
        return replace(job, epochs=self.epochs, finetune=finetune, pretrain=pretrain)

    @property
    def suffix(self) -> str:
        """What tells its folder from the table's own."""
        parts = {"validation": self.validation, "epochs": self.epochs}
        departures = "".join(f"-{name}{value}" for name, value in parts.items() if value)
        return departures + "".join(f"-{name}-{_in_a_name(value)}" for name, value in sorted(self.settings.items()))

    @property
    def words(self) -> list[str]:
        """The options that ask for it."""
        found = ["--epochs", str(self.epochs)] if self.epochs else []
        found += ["--validation", str(self.validation)] if self.validation else []
        pairs = [shlex.quote(f"{name}={_as_json(value)}") for name, value in sorted(self.settings.items())]
        return found + (["--set", *pairs] if pairs else [])


def settings(words: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE words -> values by name; a value is JSON where it can be, and text otherwise."""
    found = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} sets nothing: give NAME=VALUE, for example weight_decay=5e-4")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _in_a_name(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", str(value)).strip("_")


def _with(job: Job, name: str, value: Any) -> Job | None:
    """The job with one setting; None where it has no such."""
    if name == "network":
        zoo.check_name(value)
    if name == "finetune_lr":
        replace(job.config, lr=value)  # what is no learning rate is told now
    if name in OF_JOB:
        return replace(job, **{name: value})
    if name in OF_CONFIG:
        if job.baseline and name in ("particles", *PRIOR_SETTINGS):  # of dllp alone
            return None
        return replace(job, changes={**job.changes, name: value})
    if job.baseline and name in hyperparameters(find(job.baseline)):
        method, _, text = job.baseline.partition(":")
        values = dict(pair.split("=") for pair in text.split(",") if pair) | {name: value}
        return replace(job, baseline=f"{method}:{','.join(f'{name}={value}' for name, value in values.items())}")
    return None


@dataclass(frozen=True)
class Planned:
    """A job and the row it belongs to."""

    row: Row
    job: Job


@dataclass(frozen=True)
class Table:
    """Rows that are compared with the dense row of their network, and rows that are quoted beside them.

    Attributes:
        data: What they are trained on; empty where whoever runs it names a folder.
        note: What its text says besides.
        sources: Other tables, whose finished runs with kept probabilities serve here too.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    quoted: tuple[Quoted, ...] = ()
    data: str = "cifar10"
    note: str = ""
    sources: tuple[str, ...] = ()

    def chosen(self, patterns: Sequence[str]) -> list[Row]:
        """The rows whose names match, all without patterns."""
        for pattern in patterns:
            if not any(fnmatchcase(row.name, pattern) for row in self.rows):
                names = ", ".join(row.name for row in self.rows)
                raise ConfigError(f"{self.name} has no row {pattern!r}: choose from {names}")
        return [row for row in self.rows if not patterns or any(fnmatchcase(row.name, p) for p in patterns)]

    def set(self, settings: Mapping[str, Any], patterns: Sequence[str] = ()) -> Table:
        """The table with other settings than the recipe's: fields of Config, hyperparameters of the rows' methods where
        they have such, `network` and `finetune_lr`; some row of those that `patterns` choose must have each of them.
        """
        rows, wanted = self.rows, {row.name for row in self.chosen(patterns)}
        for name, value in settings.items():
            if name in OF_COMMAND:
                raise ConfigError(f"{name} is no setting of rows: give {OF_COMMAND[name]}")
            found = [_with(row.job, name, value) for row in rows]
            if not any(job for row, job in zip(rows, found, strict=True) if row.name in wanted):
                raise ConfigError(
                    f"these rows of {self.name} have no setting {name!r}: give a field of dllp.Config, "
                    f"{', '.join(OF_JOB)}, or a hyperparameter of their methods (dllp methods)"
                )
            rows = tuple(replace(row, job=job or row.job) for row, job in zip(rows, found, strict=True))
        return replace(self, rows=rows)

    def plan(
        self, rows: Sequence[str] = (), seeds: Sequence[int] | None = None, variant: Variant | None = None,
        shard: tuple[int, int] = (1, 1),
    ) -> list[Planned]:  # fmt: skip
        """The jobs in the order in which they are run: seed by seed, so that an interrupted table has all rows.

        Args:
            rows: Names or patterns such as `dllp-*`; all by default.
            seeds: Instead of each row's own.
            variant: See :class:`Variant`.
            shard: (I, N): the I-th of N shares, each of about the same work. Jobs that start from the same dense
                network stay together, behind it.
        """
        variant = variant or Variant()
        units: dict[Any, list[Planned]] = {}
        chosen = self.chosen(rows)
        for seed in sorted({seed for row in chosen for seed in (seeds or row.seeds)}):
            for row in chosen:
                if seed in (seeds or row.seeds):
                    shared = row.job.method == "dense" or row.job.derived
                    key = (seed, row.job.network if shared else row.name)
                    units.setdefault(key, []).append(Planned(row, variant.of(row.job, seed)))
        for unit in units.values():
            unit.sort(key=lambda planned: planned.job.derived)
        index, count = shard
        loads = [0] * count
        mine: list[Planned] = []
        for unit in sorted(units.values(), key=_work, reverse=True):
            least = loads.index(min(loads))
            loads[least] += _work(unit)
            mine += unit if least == index - 1 else []
        order = {id(planned): i for i, planned in enumerate(planned for unit in units.values() for planned in unit)}
        return sorted(mine, key=lambda planned: order[id(planned)])

    def members(self, row: Row, lines: Sequence[dict[str, Any]], variant: Variant) -> Iterator[dict[str, Any]]:
        """The finished runs of a row, of whatever seeds there are."""
        for line in sorted(lines, key=lambda line: line["seed"]):
            if line["digest"] == variant.of(row.job, line["seed"]).digest:
                yield line


def _work(unit: Sequence[Planned]) -> int:
    """Networks to train, a fine-tuned one counted as half."""
    trained = sum(planned.job.config.particles for planned in unit if not planned.job.derived)
    return max(trained + sum(planned.job.finetune > 0 for planned in unit) // 2, 1)
