"""Everything that the report shows of one run, read from its folder and checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dllp import files
from dllp.deploy.speed import LayerTime
from dllp.deploy.speed import Row as SpeedRow
from dllp.errors import ArtifactError
from dllp.evaluation import examples
from dllp.evaluation.evaluate import CLEAN, DENSE, TOGETHER, Row
from dllp.evaluation.examples import Examples
from dllp.records import EpochRecord, Size
from dllp.report.gallery import Picture
from dllp.report.names import plain
from dllp.runs import artifacts


@dataclass(frozen=True)
class Speed:
    """Measured times; `source` says how they were measured."""

    rows: list[SpeedRow]
    layers: list[LayerTime]
    source: str


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name, folder: How it is called, and where it lies.
        config, info: Out of run.json.
        dense, sizes: Costs of the original network and of each particle.
        recipes, gated, widths, whole: What was kept.
        history, dense_history: A record for each epoch.
        rows: Evaluated networks, clean data first.
        examples: Answers to single test examples.
        settings, command: What makes the same run again.
        speed, pictures: What the command adds that is not in the folder.
        missing: Section -> why something is not shown, and how to get it.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    info: dict[str, Any]
    dense: Size
    sizes: list[Size]
    recipes: list[dict[str, Any]]
    gated: list[str]
    widths: dict[str, list[int]]
    whole: dict[str, str]
    history: list[EpochRecord]
    dense_history: list[EpochRecord]
    rows: list[Row]
    examples: Examples | None
    settings: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    speed: Speed | None = None
    pictures: list[Picture] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def clean(self) -> dict[str, Row]:
        """Rows on clean data by name."""
        return {row.name: row for row in self.rows if row.data == CLEAN}

    @property
    def regression(self) -> bool:
        return self.config.get("task") == "regression"

    @property
    def budget(self) -> tuple[str, float] | None:
        """What the run was asked to keep: `macs` or `params`, and which fraction."""
        if self.config.get("keep_params") is not None:
            return "params", float(self.config["keep_params"])
        if self.config.get("keep_flops") is not None:
            return "macs", float(self.config["keep_flops"])
        return None


def read(folder: Path) -> Run:
    """A finished run's folder; files that a run made from Python lacks are left out."""
    run = artifacts.read_run(folder)
    place = folder / artifacts.RUN
    stored = speed(folder)
    return Run(
        name=plain(folder.resolve().name),
        folder=folder,
        config=run["config"],
        info=run["info"],
        dense=Size(**run["dense"]),
        sizes=[Size(**size) for size in run["sizes"]],
        recipes=run["recipes"],
        gated=run["gated"],
        widths=run["widths"],
        whole=run["whole"],
        history=files.records(EpochRecord, run["history"], place),
        dense_history=_log(folder),
        rows=_rows(folder),
        examples=examples.read(folder),
        speed=stored,
    )


def rows(path: Path) -> list[Row]:
    """The evaluated networks in a file of `dllp evaluate --json`; none where it is missing."""
    if not path.exists():
        return []
    found = artifacts.read_json(artifacts.member(path.parent, path.name))
    return files.records(Row, found.get("rows") if isinstance(found, dict) else None, path)


def _rows(folder: Path) -> list[Row]:
    found = rows(folder / artifacts.EVALUATION)
    order = (DENSE, "particle 1", TOGETHER)
    found.sort(key=lambda row: (row.data != CLEAN, order.index(row.name) if row.name in order else 1))
    return [*found, *(row for row in rows(folder / artifacts.CORRUPTIONS) if row.data != CLEAN)]


def speed(folder: Path) -> Speed | None:
    """What `dllp speed` kept in the folder."""
    path = folder / artifacts.SPEED
    if not path.exists():
        return None
    found = artifacts.read_json(artifacts.member(folder, artifacts.SPEED))
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} holds no measurement: make it again with dllp speed")
    measured = files.records(SpeedRow, found.get("rows"), path, drop=("throughput",))
    if any(row.median <= 0 or row.macs < 0 for row in measured):
        raise ArtifactError(f"{path}: a time is not positive: make it again with dllp speed")
    return Speed(
        measured, files.records(LayerTime, found.get("layers"), path, drop=("lost_ms",)), "measured by dllp speed"
    )


def _log(folder: Path) -> list[EpochRecord]:
    """The dense network's training, which only the log has."""
    path = folder / artifacts.LOG
    if not path.exists():
        return []
    lines = files.read_bytes(artifacts.member(folder, artifacts.LOG), files.JSON_BYTES).splitlines()
    values = [files.parse_json(line, path) for line in lines]
    chosen = [value for value in values if isinstance(value, dict) and value.get("training") == "dense"]
    return files.records(EpochRecord, chosen, path, drop=("training",))
