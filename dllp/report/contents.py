"""The contents of a run folder, read and checked, as the report shows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dllp import files
from dllp.api import Result
from dllp.config import Config
from dllp.deploy import speed
from dllp.deploy.export import Shape, input_shape
from dllp.deploy.speed import LayerTime
from dllp.deploy.speed import Row as SpeedRow
from dllp.errors import ArtifactError
from dllp.evaluation import examples
from dllp.evaluation.evaluate import CLEAN, DENSE, TOGETHER, Row
from dllp.evaluation.examples import Examples
from dllp.records import EpochRecord
from dllp.report.figures import plain
from dllp.runs import result
from dllp.runs.folder import CORRUPTIONS, EVALUATION, LOG, SPEED, member

LAYER_BATCH = 16  # examples with which layers are timed in a brief look
Uncertainty = Literal["aleatoric", "epistemic"]


@dataclass(frozen=True)
class Speed:
    """Measured times, as speed.json holds them; `source` says how they were measured, `int8` how it was calibrated."""

    rows: list[SpeedRow]
    layers: list[LayerTime]
    source: str = "measured by dllp speed"
    int8: str = ""


@dataclass(frozen=True)
class Picture:
    """One test image as PNG, the kind of uncertainty that it is shown for, its class and the ensemble's answer."""

    kind: Uncertainty
    png: bytes
    index: int
    truth: str
    answer: str
    confidence: float


@dataclass(frozen=True)
class Run(result.Run):
    """One run: its run.json, and what lies beside it; speed and pictures are added where the folder lacks them."""

    name: str  # on the page
    folder: Path
    dense_history: list[EpochRecord]  # of the dense network's training
    rows: list[Row]  # evaluated networks, clean data first
    examples: Examples | None
    speed: Speed | None
    settings: dict[str, Any] = field(default_factory=dict)
    command: str = ""  # that repeats the run
    pictures: list[Picture] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # section -> why something is not shown, and how to get it
    series: str = ""  # runs of one series have one colour on a page of several; by default each its own

    @property
    def clean(self) -> dict[str, Row]:
        """Rows on clean data by name."""
        return {row.name: row for row in self.rows if row.data == CLEAN}

    @property
    def regression(self) -> bool:
        return self.config["task"] == "regression"

    @property
    def budget(self) -> tuple[str, float] | None:
        """`macs`, `params` or `latency`, and the fraction of it to keep."""
        for name, option in (("params", "keep_params"), ("macs", "keep_flops"), ("latency", "keep_latency")):
            if self.config[option] is not None:
                return name, self.config[option]
        return None


def brief(result: Result, shape: Shape | None = None) -> Speed:
    """A brief look at times: PyTorch, one thread; `dllp speed` looks longer and at more."""
    shape = shape or input_shape(result.model, result.shape)
    dense, pruned = speed.subjects(result, shape, round_to=1)
    cut = result.particles[0].recipe
    layers = speed.torch_layers(dense, pruned, shape, batch=LAYER_BATCH, runs=3) if cut else []
    rows = speed.measure_torch([dense, pruned], shape)
    return Speed(rows, layers, "a brief look in PyTorch; dllp speed measures more")


def read(folder: Path) -> Run:
    """A finished run's folder; files that a run made from Python lacks are left out."""
    run = result.read_run(folder)
    evaluated, order = rows(folder / EVALUATION), (DENSE, "particle 1", TOGETHER)
    evaluated.sort(key=lambda row: (row.data != CLEAN, order.index(row.name) if row.name in order else 1))
    stored: dict[str, Any] = vars(run) | {"config": Config.from_dict(run.config).as_dict()}
    return Run(
        **stored,
        name=plain(folder.resolve().name),
        folder=folder,
        dense_history=_dense_history(folder),
        rows=[*evaluated, *(row for row in rows(folder / CORRUPTIONS) if row.data != CLEAN)],
        examples=examples.read(folder),
        speed=_speed(folder),
    )


def rows(path: Path) -> list[Row]:
    """The evaluated networks in a file of `dllp evaluate --json`; none where it is missing."""
    if not path.exists():
        return []
    found = files.typed(dict[str, Any], files.read_json(member(path.parent, path.name)), path)
    return files.typed(list[Row], found.get("rows"), path)


def _speed(folder: Path) -> Speed | None:
    """The measurements of `dllp speed`."""
    path = folder / SPEED
    if not path.exists():
        return None
    found = files.typed(Speed, files.read_json(member(folder, SPEED)), path)
    if any(row.median <= 0 or row.batch <= 0 for row in found.rows):
        raise ArtifactError(f"{path}: a time is not positive: make it again with dllp speed")
    return found


def _dense_history(folder: Path) -> list[EpochRecord]:
    """The dense network's training, which only the log has."""
    path = folder / LOG
    if not path.exists():
        return []
    lines = files.read_bytes(member(folder, LOG), files.JSON_BYTES).splitlines()
    values = [files.parse_json(line, path) for line in lines]
    chosen = [value for value in values if isinstance(value, dict) and value.get("training") == "dense"]
    return files.typed(list[EpochRecord], chosen, path)
