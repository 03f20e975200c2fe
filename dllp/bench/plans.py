"""What a table consists of: rows, what is quoted beside them, and the plan of jobs that make it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from dllp.bench.jobs import Job
from dllp.errors import ConfigError

FIVE, THREE = (0, 1, 2, 3, 4), (0, 1, 2)


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
    """

    epochs: int | None = None
    validation: int = 0

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
        return "".join(f"-{name}{value}" for name, value in parts.items() if value)


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
