"""The paper's tables and figures: rows of jobs, the plan that runs them, and the rows that the paper prints."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from dllp import zoo
from dllp.baselines import METHODS, Method, find, hyperparameters
from dllp.baselines.protocol import PRIOR_SETTINGS
from dllp.config import Config
from dllp.errors import ConfigError
from paper.coloured_digits import DATA
from paper.jobs import MACHINE, Job, tuned

FIVE, THREE = (0, 1, 2, 3, 4), (0, 1, 2)
OF_JOB = ("network", "finetune_lr")
OF_COMMAND = {"seed": "--seeds", "epochs": "--epochs", "device": "--device", "precision": "--precision"}
OF_CONFIG = {f.name for f in fields(Config)} - {*MACHINE, *OF_COMMAND, "granularity"}
"""Settings of jobs besides the hyperparameters of their methods, and options of the command for the rest."""


@dataclass(frozen=True)
class Row:
    """One row: the same job for several seeds.

    Attributes:
        name: Unique in the table; `--rows` selects by it.
        job: What is run, its seed aside.
        seeds: The seeds of a full run.
        wanted: Targets: `drop` at most, `acc` and `gain` (of the ensemble over dense) at least.
        predictions: Of its test probabilities `none` are stored, they are `judged` and removed once their metrics are
            stored, or they are `kept` because more may be computed from them.
        note: Added to the table's text where the row has runs.
    """

    name: str
    job: Job
    seeds: tuple[int, ...] = THREE
    wanted: tuple[tuple[str, float], ...] = ()
    predictions: Literal["none", "judged", "kept"] = "none"
    note: str = ""


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
    """Departures from a table's settings; such runs have a folder of their own and never enter the table.

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
        """The end of its folder's name, after the table's."""
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
        replace(job.config, lr=value)  # raises for what is no learning rate
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
        data: The data set; empty where the user names a folder.
        note: Added to its text.
        sources: Other tables whose finished runs serve here too.
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
        variant, chosen = variant or Variant(), self.chosen(rows)
        found = units([
            Planned(row, variant.of(row.job, seed))
            for seed in sorted({seed for row in chosen for seed in (seeds or row.seeds)})
            for row in chosen
            if seed in (seeds or row.seeds)
        ])  # fmt: skip
        index, count = shard
        loads, mine = [0] * count, set()
        for k in sorted(range(len(found)), key=lambda k: _work(found[k]), reverse=True):
            least = loads.index(min(loads))
            loads[least] += _work(found[k])
            mine |= {k} if least == index - 1 else set()
        return [planned for k in sorted(mine) for planned in found[k]]

    def members(self, row: Row, lines: Sequence[dict[str, Any]], variant: Variant) -> Iterator[dict[str, Any]]:
        """The finished runs of a row, of whatever seeds there are."""
        for line in sorted(lines, key=lambda line: line["seed"]):
            if line["digest"] == variant.of(row.job, line["seed"]).digest:
                yield line


def units(plan: Sequence[Planned]) -> list[list[Planned]]:
    """The jobs for one worker each: a dense network with what starts from it behind it, any other job by itself."""
    found: dict[str, list[Planned]] = {}
    for planned in plan:
        job = planned.job
        found.setdefault(job.dense.digest if job.derived else job.digest, []).append(planned)
    return [sorted(unit, key=lambda planned: planned.job.derived) for unit in found.values()]


def _work(unit: Sequence[Planned]) -> int:
    """Networks to train, a fine-tuned one counted as half."""
    trained = sum(planned.job.config.particles for planned in unit if not planned.job.derived)
    return max(trained + sum(planned.job.finetune > 0 for planned in unit) // 2, 1)


def table(name: str) -> Table:
    """A table by name."""
    if name not in TABLES:
        raise ConfigError(f"there is no table {name!r}: choose from {', '.join(TABLES)}")
    return TABLES[name]


# ---- the paper's tables


def _rows(network: str, removed: str, dense_wanted: float, channel_wanted: tuple[tuple[str, float], ...]) -> list[Row]:
    """The rows that Tables 1 and 2 share, at `removed` percent fewer FLOPs; five seeds for the headline's two."""
    keep = kept(removed)
    dense, channel = Job(network, "dense"), Job(network, "dllp", keep=keep)
    return [
        Row("dense", dense, FIVE, (("acc", dense_wanted),), "kept"),
        Row(f"dllp-channel-{removed}", channel, FIVE, channel_wanted, "kept"),
        Row(f"dllp-weight-{removed}", Job(network, "dllp", "weight", keep)),
        Row(f"thin-{removed}", Job(network, "thin", keep=keep)),
        Row(f"magnitude-{removed}", Job(network, "magnitude", keep=keep)),
        Row(f"random-{removed}", Job(network, "random", keep=keep)),
    ]


def _baselines(network: str, removed: str) -> list[Row]:
    """Every other method at the FLOPs of its paper, or at the table's: 60 epochs and 30 of fine-tuning."""
    return [_baseline(method, network, removed) for method in METHODS.values()]


def _baseline(method: Method, network: str, removed: str, seeds: tuple[int, ...] = THREE) -> Row:
    published = next((figure for figure in method.published if figure.network == network), None)
    percent = removed if published is None else f"{published.removed:g}"
    job = Job(network, "baseline", method.granularity, kept(percent), baseline=tuned(method.name, network), finetune=30)
    wanted = () if published is None else (("published", published.drop),)
    return Row(f"tuned-{method.name}-{percent}", job, seeds, wanted)


def kept(removed: str) -> float:
    """'74.65' percent removed -> 0.2535, the largest fraction that may be kept."""
    return round(1 - float(removed) / 100, 6)


CHANGED = (
    "The recipe of DLLP's single weights was changed twice after rows of this table had test results: from drawn gates "
    "and a weight decay of 1e-4 (ResNet-56 at 90%: 90.47, one seed) to medians and 1e-3 (91.02), then to slab_bounds "
    "of 1 to 30, as above."
)


def _table1() -> Table:
    dense, channel, weight, *rest = _rows("resnet56", "55", 93.0, (("drop", 0.04), ("gain", 0.7)))
    fewer = {"keep_flops": None, "keep_params": 0.0988}
    quoted = [
        ("L1-norm", 93.42, 34, 0.5), ("AMC", 92.80, 50, 0.9), ("DCP", 93.80, 50, 0.31), ("NS", 93.80, 48, 0.53),
        ("SFP", 93.59, 51, 0.24), ("CCP", 93.50, 47, 0.04), ("FPGM", 93.59, 53, 0.1), ("DeepHoyer", 93.80, 48, 0.26),
        ("DLLP", 92.80, 55, 0.04),
    ]  # fmt: skip
    rows = [
        dense,
        channel,
        Row(
            "dllp-channel-70", Job("resnet56", "dllp", keep=kept("70")), wanted=(("drop", 0.8),),
            predictions="kept",
        ),
        replace(weight, wanted=(("drop", 0.0),), note=CHANGED),
        Row("dllp-weight-90", Job("resnet56", "dllp", "weight", kept("90")), wanted=(("drop", 0.7),), note=CHANGED),
        *rest,
        Row("resnet20-dense", Job("resnet20", "dense")),
        Row(
            "resnet20-dllp-weight", Job("resnet20", "dllp", "weight", changes=fewer), wanted=(("acc", 90.3),),
            note=CHANGED,
        ),
        *_baselines("resnet56", "55"),
        *(_baseline(METHODS[name], "resnet56", "90") for name in ("magnitude-l2", "magnitude-l1")),
    ]  # fmt: skip
    return Table(
        "table1", "Table 1: ResNet-56 on CIFAR-10", tuple(rows), tuple(Quoted(m, "resnet56", *v) for m, *v in quoted)
    )


def _table2() -> Table:
    quoted = [
        ("LIWS", 93.45, 70.6, 0.8), ("ThiNet", 93.36, 50, 0.14), ("CP", 93.18, 50, 0.32), ("RNP", 92.15, 50, 0.85),
        ("FBS", 93.03, 50, 0.47), ("DLLP", 92.80, 74.65, 1.24),
    ]  # fmt: skip
    rows = [*_rows("vgg16_bn", "74.65", 93.2, (("drop", 0.2),)), *_baselines("vgg16_bn", "74.65")]
    return Table(
        "table2", "Table 2: VGG-16 on CIFAR-10", tuple(rows), tuple(Quoted(m, "vgg16_bn", *v) for m, *v in quoted),
        sources=("reliability",),
    )  # fmt: skip


def _table3() -> Table:
    """ResNet-50 at the paper's cost, on whatever folder there is; three seeds where the dense network matters."""
    quoted = [
        ("NS", 76.15, 53, 1.27), ("SSS", 76.12, 43, 4.30), ("DCP", 76.01, 56, 1.06), ("CCP", 76.15, 54, 0.94),
        ("SFP", 76.15, 62.14, 14.01), ("DLLP", 76.15, 65.95, 6.13),
    ]  # fmt: skip
    rows = [
        Row("dense", Job("resnet50", "dense")),
        Row("dllp-channel-65.95", Job("resnet50", "dllp", keep=kept("65.95")), wanted=(("drop", 1.5), ("gain", 0.0))),
        *(_baseline(METHODS[name], "resnet50", "65.95", (0,)) for name in ("l1-filters", "slimming")),
    ]
    note = (
        "Quoted rows are the paper's, on ImageNet at 224x224. ResNet-50 has its ImageNet form (7x7 stem with stride 2, "
        "max-pool) at every image size. Training images: random parts, resized and mirrored."
    )
    return Table(
        "table3", "Table 3: ResNet-50",
        tuple(replace(row, job=replace(row.job, augment="resized-crop")) for row in rows),
        tuple(Quoted(m, "resnet50", *v) for m, *v in quoted), data="", note=note,
    )  # fmt: skip


def _pretrained() -> Table:
    """At the same number of epochs in all: one run from scratch, or a trained network and the short preset."""
    scratch = Job("resnet56", "dllp", keep=kept("55"))
    rows = (
        Row("dense", Job("resnet56", "dense")),
        Row("scratch", scratch),
        Row("short-10", replace(scratch, pretrain=50)),
        Row("short-20", replace(scratch, pretrain=40)),
    )
    title = "Trained starts: ResNet-56 on CIFAR-10 at 55% fewer FLOPs, 60 epochs in all"
    return Table("pretrained", title, rows, sources=("table1",))


# ---- reliability: Section 4.2.2, Figures 3 and 4

FRACTIONS = (20, 40, 60, 80, 100)
VEHICLES = ("airplane", "automobile", "ship", "truck")


def _judged_row(name: str, job: Job, seeds: tuple[int, ...] = THREE) -> Row:
    return Row(name, job, seeds, predictions="judged")


def _kept_row(name: str, job: Job, seeds: tuple[int, ...] = THREE) -> Row:
    """More is computed of it than is stored; dense networks, for example, are also paired to ensembles."""
    return Row(name, job, seeds, predictions="kept")


def _figure3() -> Table:
    job = Job("vgg11_bn", "dllp", keep=kept("50"))
    rows = [_judged_row(f"data-{percent}", replace(job, fraction=percent / 100)) for percent in FRACTIONS]
    return Table("figure3", "Figure 3: uncertainty of a pruned VGG-11 on CIFAR-10", tuple(rows), sources=("figure4",))


def _figure4() -> Table:
    rows = (_judged_row("data-100", Job("vgg11_bn", "dllp", keep=kept("50"))),)
    title = "Figure 4: likelihood and posterior of a pruned VGG-11 on CIFAR-10"
    return Table("figure4", title, rows, sources=("figure3",))


def _reliability() -> Table:
    """Networks of both tables, l1-norm pruning at their budgets, four particles, VGG-11 that never saw a vehicle."""
    resnet, vgg = Job("resnet56", "dllp", keep=kept("55")), Job("vgg16_bn", "dllp", keep=kept("74.65"))
    filters: dict[str, Any] = {"method": "baseline", "baseline": "l1-filters", "finetune": 30}
    animals = Job("vgg11_bn", "dense", without=VEHICLES)
    rows = (
        _kept_row("resnet56-dense", Job("resnet56", "dense"), FIVE),
        _judged_row("resnet56-l1-55", replace(resnet, **filters)),
        _judged_row("resnet56-dllp-55", resnet, FIVE),
        _judged_row("resnet56-dllp-55-n4", replace(resnet, changes={"particles": 4})),
        _kept_row("vgg16-dense", Job("vgg16_bn", "dense"), FIVE),
        _judged_row("vgg16-l1-74.65", replace(vgg, **filters)),
        _judged_row("vgg16-dllp-74.65", vgg, FIVE),
        _kept_row("animals-dense", animals),
        _judged_row("animals-dllp-50", replace(animals, method="dllp", keep=kept("50"))),
    )
    title = "Reliability: dense and pruned networks on clean, corrupted and foreign data"
    return Table("reliability", title, rows, sources=("table1", "table2"))


def _colour() -> Table:
    """Five paintings, two dense networks of each; thin ones tell what pruning does from what few channels do."""
    shared: dict[str, Any] = {"epochs": 30, "changes": {"batch_size": 64}}
    rows = [_kept_row("dense", Job("small_cnn", "dense", **shared), tuple(range(10)))]
    for method in ("dllp", "thin"):
        for percent in ("50", "80"):
            job = Job("small_cnn", method, keep=kept(percent), **shared)
            rows.append(_kept_row(f"{method}-{percent}", job, tuple(range(0, 10, 2))))
    title = "Coloured digits: a spurious feature that the test set keeps, reverses or draws at random"
    return Table("colour", title, tuple(rows), data=DATA)


# ---- distribution: Section 3.1.2, Figures 2 and 5


def _distribution_rows() -> list[Row]:
    """VGG-11 whole, and pruned to a fifth and a tenth of its weights, before any fine-tuning; one seed."""
    rows = [Row("reference", Job("vgg11_bn", "dense", "weight", changes={"weight_decay": 5e-4}), (0,))]
    for percent in ("80", "90"):
        fewer = {"keep_flops": None, "keep_params": kept(percent)}
        for name in ("l1", "l2"):
            job = Job("vgg11_bn", "baseline", "weight", baseline=f"magnitude-{name}", changes=fewer)
            rows.append(Row(f"{name}-{percent}", job, (0,)))
        rows.append(Row(f"dllp-{percent}", Job("vgg11_bn", "dllp", "weight", changes=fewer), (0,)))
    return rows


def _figure2() -> Table:
    title = "Figure 2: weights of VGG-11 on CIFAR-10, whole and kept by each method"
    return Table("figure2", title, tuple(_distribution_rows()), sources=("figure5",))


def _figure5() -> Table:
    rows = [row for row in _distribution_rows() if row.name in ("l1-90", "dllp-90")]
    title = "Figure 5: weights of VGG-11 layer by layer, sparsely trained and not yet cut"
    return Table("figure5", title, tuple(rows), sources=("figure2",))


_MADE = (_table1, _table2, _table3, _pretrained, _figure2, _figure3, _figure4, _figure5, _reliability, _colour)
TABLES: dict[str, Table] = {made.name: made for made in (make() for make in _MADE)}
