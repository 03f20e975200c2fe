"""The paper's tables and figures: rows of jobs, the plan that runs them, and the rows that the paper prints."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from dllp import zoo
from dllp.baselines import METHODS, Method, find_any, hyperparameters
from dllp.baselines.protocol import PRIOR_SETTINGS, Published
from dllp.config import Config
from dllp.errors import ConfigError
from paper.coloured_digits import DATA
from paper.jobs import MACHINE, Job, recipe, tuned
from paper.masks import RANDOM, Mask
from paper.peers import PEERS

FIVE, THREE, TWO = (0, 1, 2, 3, 4), (0, 1, 2), (0, 1)
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
        predictions: Of its test probabilities `none` are stored, they are `measured` and removed once their metrics are
            stored, or they are `kept` because more may be computed from them.
        note: Added to the table's text where the row has runs.
        title: The method's name in the table, instead of the job's.
    """

    name: str
    job: Job
    seeds: tuple[int, ...] = THREE
    wanted: tuple[tuple[str, float], ...] = ()
    predictions: Literal["none", "measured", "kept"] = "none"
    note: str = ""
    title: str = ""


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
        early = job.baseline and getattr(find_any(job.baseline), "before_cut", 0)
        least = 2 if early else 1  # one of them before the cut
        finetune = min(job.finetune, max(least, -(-self.epochs // 2)))  # half of the training, as in the tables
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
    if job.baseline and name in hyperparameters(find_any(job.baseline)):
        method, _, text = job.baseline.partition(":")
        values = dict(pair.split("=") for pair in text.split(",") if pair) | {name: value}
        return replace(job, baseline=f"{method}:{','.join(f'{name}={value}' for name, value in values.items())}")
    return None


@dataclass(frozen=True)
class Planned:
    """A job and the row it belongs to."""

    row: Row
    job: Job

    @property
    def name(self) -> str:
        """The job in words."""
        return f"{self.row.name} seed {self.job.seed}"


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
    """Networks to train, in halves: a fine-tuned one counts one."""
    own = (planned.job for planned in unit if planned.job.pretrain or not planned.job.derived)
    trained = sum(job.config.particles for job in own)
    return max(2 * trained + sum(planned.job.finetune > 0 for planned in unit), 1)


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


def _alike(network: str, removed: str) -> list[Row]:
    """Methods with a published budget of their own, at the table's."""
    return [
        _baseline(METHODS[name], network, removed, own=False) for name in SEARCHED if _figure(METHODS[name], network)
    ]


def _figure(method: Method, network: str) -> Published | None:
    return next((figure for figure in method.published if figure.network == network), None)


def _baseline(method: Method, network: str, removed: str, seeds: tuple[int, ...] = THREE, own: bool = True) -> Row:
    published = _figure(method, network) if own else None
    percent = removed if published is None else f"{published.removed:g}"
    job = Job(network, "baseline", method.granularity, kept(percent), baseline=tuned(method.name, network), finetune=30)
    wanted = () if published is None else (("published", published.drop),)
    note = ""
    if published is not None and method.name in SEARCHED:
        drop = f"{published.drop:g} at {published.removed:g}%"
        note = f"The published drop of {method.title}, {drop}, is its authors' own."
    return Row(f"tuned-{method.name}-{percent}", job, seeds, wanted, note=note)


BY_IMAGE = {"fbs": "", "liws": "", "liws:after=5": ", the last 5 epochs with its thresholds", "rnp": "",
            "rnp:fixed=2": ", control: always 2 of 4 groups"}  # fmt: skip
"""Methods that choose channels by image, with settings; and what their rows say of these."""
READ_ONLY = (
    "LIWS knows the norm of a channel once it is computed, so that only the layers that read it are saved: of "
    "ResNet-56, whose residual stream stays whole, at most 48.7% of the FLOPs."
)


def _by_image(network: str, removed: str, *texts: str, note: str = "") -> list[Row]:
    """60 epochs whole and 30 with gates."""
    rows = []
    for text in texts:
        method, name = find_any(text), text.translate({ord(":"): "-", ord("="): None})
        job = Job(network, "baseline", keep=kept(removed), baseline=text, finetune=30)
        figures = [f for f in method.published if (f.network, f"{f.removed:g}") == (network, removed)]
        wanted = tuple(("re-run" if figure.rerun else "published", figure.drop) for figure in figures)
        rows.append(
            Row(f"dynamic-{name}-{removed}", job, THREE, wanted, note=note, title=method.title + BY_IMAGE[text])
        )
    return rows


def _peers(network: str, removed: str) -> list[Row]:
    """Pruners of other packages, from the dense network on."""
    return [
        Row(
            f"peer-{name}-{removed}",
            Job(network, "peer", keep=kept(removed), peer=name, finetune=30),
            title=f"{peer.title}, {peer.recipe}" if peer.recipe else peer.title,
        )
        for name, peer in PEERS.items()
    ]


def kept(removed: str) -> float:
    """'74.65' percent removed -> 0.2535, the largest fraction that may be kept."""
    return round(1 - float(removed) / 100, 6)


WHOLE = 60
"""Epochs of the networks that rows start from."""
TAUGHT = {"teacher": "given"}
BEST, REWOUND = ("l1-filters", "slimming", "sfp", "fpgm", "deephoyer"), ("l1-filters", "slimming")
"""Other methods whose fine-tuning is taught, and whose learning rate is rewound."""
SEARCHED = ("ccp", "dcp", "amc")
"""Methods that choose with labels: they have rows at the FLOPs of their papers and at the table's."""


def _given(name: str, job: Job, seeds: tuple[int, ...] = THREE, epochs: int = 30, **wanted: float) -> Row:
    """A trained network, then so many epochs by the short preset; its drop is against that network."""
    job = replace(job, method="dllp", epochs=WHOLE + epochs, pretrain=WHOLE)
    return Row(name, job, seeds, tuple(wanted.items()))


def _with_branches(row: Row) -> Row:
    """The same, but that whole residual branches may go, too."""
    job = _changed(row.job, units="both")
    return replace(
        row, name=row.name.replace("channel", "both"), job=job, seeds=THREE, title="DLLP channels and branches"
    )


def _taught(name: str, network: str, removed: str, row: str, finetune: int = 30, **settings: Any) -> Row:
    """Another method whose whole network teaches its fine-tuning."""
    job = Job(network, "baseline", keep=kept(removed), baseline=tuned(name, network), finetune=finetune, **settings)
    return Row(row, replace(job, changes=TAUGHT), title=f"{METHODS[name].title}, taught by its whole network")


def _fairer(network: str, removed: str) -> list[Row]:
    """The best other methods with DLLP's teacher, and two without it that start from the peak learning rate again."""
    rows = [_taught(name, network, removed, f"taught-{name}-{removed}") for name in BEST]
    for name in REWOUND:
        job = Job(network, "baseline", keep=kept(removed), baseline=tuned(name, network), finetune=30, finetune_lr=1.0)
        rows.append(Row(f"rewound-{name}-{removed}", job, title=f"{METHODS[name].title}, learning rate rewound"))
    return rows


MASKS: dict[Mask, str] = {
    "uniform": "random mask, equal densities",
    "erk": "random mask, Erdős–Rényi-kernel densities",
    "own": "the mask of a DLLP run, fresh weights",
    "shuffled": "the mask of a DLLP run shuffled within layers, fresh weights",
}


def _controls(network: str, removed: str, masked: Mapping[str, Sequence[Mask]]) -> list[Row]:
    """As many independent networks as there are particles, and masks by percent that no training, or another, chose."""
    thin, rows = Job(network, "thin", keep=kept(removed)), []
    for n in (2, 4):
        job = replace(thin, changes={"particles": n})
        rows.append(Row(f"thin-{removed}-n{n}", job, title=f"{n} thin networks from scratch"))
    rows.append(Row("dense-n2", Job(network, "dense", changes={"particles": 2}), title="2 dense networks"))
    for percent, chosen in masked.items():
        for mask in chosen:
            job = Job(network, "masked", "weight", kept(percent), mask=mask)
            rows.append(Row(f"mask-{mask}-{percent}", job, title=MASKS[mask]))
    return rows


def letter(network: str, **budget: float | None) -> dict[str, Any]:
    """Changes of a recipe for single weights to the paper's letter: one kernel, decided after the last step."""
    ours, theirs = recipe(network, "weight"), Config.paper()
    names = [f.name for f in fields(Config) if getattr(ours, f.name) != getattr(theirs, f.name)]
    return {name: getattr(theirs, name) for name in names} | budget


def _letter_row(network: str, removed: str) -> Row:
    job = Job(network, "dllp", "weight", kept(removed), changes=letter(network))
    return Row(f"paper-weight-{removed}", job, title=LETTER)


LETTER = "DLLP weight, the paper's letter"
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
    given = [
        _given("given-channel-55", channel.job, FIVE, drop=0.0, gain=0.6),
        _given("given-channel-70", replace(channel.job, keep=kept("70")), drop=0.5),
    ]
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
        Row("dense-90", Job("resnet56", "dense", epochs=90), title="dense, 90 epochs"),
        *given,
        *map(_with_branches, given),
        _given("given-channel-60-long", replace(channel.job, keep=kept("60")), epochs=120, acc=94.0),
        _given("given-weight-55", weight.job, drop=0.0),
        _given("given-weight-90", replace(weight.job, keep=kept("90")), drop=0.5),
        _given("resnet20-given-weight", Job("resnet20", "dllp", "weight", changes=fewer), acc=91.3),
        *_fairer("resnet56", "55"),
        *_controls("resnet56", "55", {percent: tuple(MASKS) for percent in ("55", "90")}),
        _letter_row("resnet56", "55"),
        *_by_image("resnet56", "55", "fbs", "rnp"),
        *_by_image("resnet56", "50", "rnp:fixed=2"),
        *_by_image("resnet56", "40", "liws", "liws:after=5", note=READ_ONLY),
        *_alike("resnet56", "55"),
        *_peers("resnet56", "55"),
    ]  # fmt: skip
    return Table(
        "table1", "Table 1: ResNet-56 on CIFAR-10", tuple(rows), tuple(Quoted(m, "resnet56", *v) for m, *v in quoted)
    )


def _table2() -> Table:
    quoted = [
        ("LIWS", 93.45, 70.6, 0.8), ("ThiNet", 93.36, 50, 0.14), ("CP", 93.18, 50, 0.32), ("RNP", 92.15, 50, 0.85),
        ("FBS", 93.03, 50, 0.47), ("DLLP", 92.80, 74.65, 1.24),
    ]  # fmt: skip
    shared = _rows("vgg16_bn", "74.65", 93.2, (("drop", 0.2),))
    rows = [
        *shared,
        *_baselines("vgg16_bn", "74.65"),
        Row("dense-90", Job("vgg16_bn", "dense", epochs=90), title="dense, 90 epochs"),
        _given("given-channel-74.65", shared[1].job, drop=0.2),
        _given("given-weight-74.65", shared[2].job, drop=0.0),
        *_fairer("vgg16_bn", "74.65"),
        *_controls("vgg16_bn", "74.65", {"74.65": tuple(MASKS), "90": RANDOM}),
        _letter_row("vgg16_bn", "74.65"),
        *_by_image("vgg16_bn", "50", "fbs", "rnp"),
        *_by_image("vgg16_bn", "70.6", "liws", "liws:after=5"),
        *_by_image("vgg16_bn", "74.65", *BY_IMAGE),
        *_alike("vgg16_bn", "74.65"),
        *_peers("vgg16_bn", "74.65"),
    ]
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
    given = _given("given-channel-65.95", Job("resnet50", "dllp", keep=kept("65.95")), drop=0.0, gain=1.5)
    rows = [
        Row("dense", Job("resnet50", "dense")),
        Row("dllp-channel-65.95", Job("resnet50", "dllp", keep=kept("65.95")), wanted=(("drop", 1.5), ("gain", 0.0))),
        given,
        _with_branches(given),
        *(_baseline(METHODS[name], "resnet50", "65.95", (0,)) for name in ("l1-filters", "slimming", "dcp", "ccp")),
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


SPENT = (5, 10, 30, 60)
"""Epochs that are spent on a trained network."""
STARTS = ("l1-filters", "thinet", "cp")
"""Other methods that start from any trained network; the rest trains one as it prescribes, which takes epochs too."""
PERCENTS = {"resnet56": ("55", "70", "80"), "vgg16_bn": ("75", "85")}
OLD_SHORT = dict(
    lr=0.02, lr_end=0.0002, warmup=0.5, lr_gates=0.05, open_until=0.02, ramp_until=0.3, discrete_at=0.45, teacher="off"
)
"""The short preset of version 0.1.0, for 5 to 20 epochs and without a teacher."""


def _pretrained() -> Table:
    """The drop over the epochs that are spent on a trained network; then the short preset as it was before."""
    scratch = Job("resnet56", "dllp", keep=kept("55"))
    rows = [Row("dense", Job("resnet56", "dense")), Row("vgg16-dense", Job("vgg16_bn", "dense"))]
    for network, percents in PERCENTS.items():
        for percent in percents:
            for epochs in SPENT:
                job = Job(network, "dllp", keep=kept(percent))
                rows.append(_given(f"dllp-{percent}-{epochs}", job, epochs=epochs))
                rows += [_taught(name, network, percent, f"{name}-{percent}-{epochs}", epochs) for name in STARTS]
    rows.append(Row("scratch", scratch))
    for last in (10, 20):
        job = replace(scratch, pretrain=60 - last, changes=OLD_SHORT)
        rows.append(Row(f"short-{last}", job, title="DLLP channel, short preset of 0.1.0"))
    title = "Trained starts: ResNet-56 and VGG-16 on CIFAR-10"
    return Table("pretrained", title, tuple(rows), sources=("table1", "table2"))


# ---- ablation: one setting at a time

FACTORS: dict[str, tuple[Any, ...]] = {
    "particles": (1, 2, 4),
    "beta": (0.0, 0.01, 0.1, 1.0),
    "bandwidth": ("median", "paper"),
    "blocks": ("module", "all"),
    "likelihood": ("categorical", "gaussian"),
    "prior": ("spike_and_slab", "laplace", "gaussian", "polarization", "hoyer"),
    "draw_gates": (True, False),
}
FEWER = ("particles", "beta", "blocks")
"""Settings that are varied on the larger network too."""
RECIPE = "recipe"
"""End of the name of the row that rows with the same beginning are compared with."""
TEN = tuple(range(10))


def _ablation() -> Table:
    """The recipe, and every setting at each of its other values, for two seeds."""
    channel, weight = Job("resnet20", "dllp", keep=kept("55")), Job("resnet20", "dllp", "weight", kept("90"))
    large = replace(channel, network="resnet56")
    rows = [Row("dense", Job("resnet20", "dense"), TWO)]
    rows += _one_by_one("channel", channel, FACTORS, TWO) + _one_by_one("weight", weight, FACTORS, TWO)
    rows += [Row("resnet56-dense", Job("resnet56", "dense"), TWO), *_one_by_one("resnet56", large, FEWER, TWO)]
    title = "Ablation: one setting at a time, ResNet-20 and ResNet-56 on CIFAR-10"
    return Table("ablation", title, tuple(rows), sources=("table1",))


def _ablation_digits() -> Table:
    """The same on digits, and controls of the same cost: minutes on a CPU, so that there can be many seeds."""
    shared: dict[str, Any] = {"epochs": 30, "changes": {"batch_size": 64}}
    dense = Job("small_cnn", "dense", **shared)
    channel, weight = (
        Job("small_cnn", "dllp", granularity, kept("90"), **shared) for granularity in ("channel", "weight")
    )
    thin = replace(channel, method="thin")
    rows = [Row("dense", dense, TEN), Row("dense-n2", _changed(dense, particles=2), TEN, title="2 dense networks")]
    rows += _one_by_one("channel", channel, FACTORS, TEN)
    rows += [
        Row("channel-thin", thin, TEN, title="thin network from scratch"),
        Row("channel-thin-n2", _changed(thin, particles=2), TEN, title="2 thin networks from scratch"),
    ]
    rows += _one_by_one("weight", weight, FACTORS, TEN)
    for mask, title in MASKS.items():
        rows.append(Row(f"weight-mask-{mask}", replace(weight, method="masked", mask=mask), TEN, title=title))
    title = "Ablation: one setting at a time, a small network on digits, 90% of the FLOPs removed"
    return Table("ablation-digits", title, tuple(rows), data="digits")


def _one_by_one(name: str, job: Job, factors: Iterable[str], seeds: tuple[int, ...]) -> list[Row]:
    """The recipe, then a row for each other value of each factor; all of them are named `name`-something."""
    kind, own = f"DLLP {job.granularity}", job.config.resolved()
    rows = [Row(f"{name}-{RECIPE}", job, seeds, title=f"{kind}, recipe")]
    for factor in factors:
        for value in FACTORS[factor]:
            if value != getattr(own, factor):
                text = _as_json(value).removesuffix(".0")
                changed = _changed(job, **{factor: value})
                rows.append(Row(f"{name}-{factor}-{text}", changed, seeds, title=f"{kind}, {factor} = {text}"))
    return rows


def _changed(job: Job, **changes: Any) -> Job:
    return replace(job, changes={**job.changes, **changes})


# ---- reliability: Section 4.2.2, Figures 3 and 4

FRACTIONS = (20, 40, 60, 80, 100)
VEHICLES = ("airplane", "automobile", "ship", "truck")


def _measured_row(name: str, job: Job, seeds: tuple[int, ...] = THREE) -> Row:
    return Row(name, job, seeds, predictions="measured")


def _kept_row(name: str, job: Job, seeds: tuple[int, ...] = THREE) -> Row:
    """More is computed of it than is stored; dense networks, for example, are also paired to ensembles."""
    return Row(name, job, seeds, predictions="kept")


def _figure3() -> Table:
    job = Job("vgg11_bn", "dllp", keep=kept("50"))
    rows = [_measured_row(f"data-{percent}", replace(job, fraction=percent / 100)) for percent in FRACTIONS]
    return Table("figure3", "Figure 3: uncertainty of a pruned VGG-11 on CIFAR-10", tuple(rows), sources=("figure4",))


def _figure4() -> Table:
    rows = (_measured_row("data-100", Job("vgg11_bn", "dllp", keep=kept("50"))),)
    title = "Figure 4: likelihood and posterior of a pruned VGG-11 on CIFAR-10"
    return Table("figure4", title, rows, sources=("figure3",))


def _reliability() -> Table:
    """Networks of both tables, l1-norm pruning at their budgets, four particles, VGG-11 that never saw a vehicle."""
    resnet, vgg = Job("resnet56", "dllp", keep=kept("55")), Job("vgg16_bn", "dllp", keep=kept("74.65"))
    filters: dict[str, Any] = {"method": "baseline", "baseline": "l1-filters", "finetune": 30}
    animals = Job("vgg11_bn", "dense", without=VEHICLES)
    rows = (
        _kept_row("resnet56-dense", Job("resnet56", "dense"), FIVE),
        _measured_row("resnet56-l1-55", replace(resnet, **filters)),
        _measured_row("resnet56-dllp-55", resnet, FIVE),
        _measured_row("resnet56-dllp-55-n4", replace(resnet, changes={"particles": 4})),
        _kept_row("vgg16-dense", Job("vgg16_bn", "dense"), FIVE),
        _measured_row("vgg16-l1-74.65", replace(vgg, **filters)),
        _measured_row("vgg16-dllp-74.65", vgg, FIVE),
        _kept_row("animals-dense", animals),
        _measured_row("animals-dllp-50", replace(animals, method="dllp", keep=kept("50"))),
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
    fewer = letter("vgg11_bn", keep_flops=None, keep_params=kept("80"))
    rows.append(Row("paper-weight-80", Job("vgg11_bn", "dllp", "weight", changes=fewer), (0,), title=LETTER))
    return rows


def _figure2() -> Table:
    title = "Figure 2: weights of VGG-11 on CIFAR-10, whole and kept by each method"
    return Table("figure2", title, tuple(_distribution_rows()), sources=("figure5",))


def _figure5() -> Table:
    rows = [row for row in _distribution_rows() if row.name in ("l1-90", "dllp-90")]
    title = "Figure 5: weights of VGG-11 layer by layer, sparsely trained and not yet cut"
    return Table("figure5", title, tuple(rows), sources=("figure2",))


_MADE = (
    _table1, _table2, _table3, _pretrained, _ablation, _ablation_digits, _figure2, _figure3, _figure4, _figure5,
    _reliability, _colour,
)  # fmt: skip
TABLES: dict[str, Table] = {made.name: made for made in (make() for make in _MADE)}
