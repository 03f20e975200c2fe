"""`dllp report`: what run folders hold, with what the page needs beyond them, as one HTML file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dllp import files, report
from dllp.cli import export, options, progress, prune
from dllp.cli.task import DENSE_FILE, SETTINGS, Task
from dllp.data import Dataset
from dllp.deploy import speed as measuring
from dllp.devices.device import find_device
from dllp.errors import DataError, DllpError
from dllp.evaluation import evaluate, examples
from dllp.posterior import posterior_of, predict_data
from dllp.report import contents, trust
from dllp.runs import artifacts

LAYER_BATCH = 16
"""Examples with which layers are timed, where nobody measured them before."""


def write(given: dict[str, Any]) -> None:
    """The page of one run into its folder, or a comparison of several into the current one."""
    report.require_plotly()
    folders = [Path(folder) for folder in given["folders"]]
    alone = len(folders) == 1
    with progress.status(given.get("quiet", False)) as tell:
        runs = []
        for folder in folders:
            tell(f"reading {folder}")
            run = _described(contents.read(folder))
            runs.append(_completed(run, given, tell) if alone else run)
        tell("drawing")
        page = report.build(runs)
    path = Path(given.get("out") or (folders[0] / artifacts.PAGE if alone else artifacts.PAGE))
    (files.write_named if "out" in given else files.write_bytes)(path, page)
    if not given.get("quiet"):
        print(f"{path}: {len(page):,} bytes, opens in any browser")


def keep_corruptions(folder: Path, task: Task, rows: Sequence[evaluate.Row]) -> None:
    """Leave what was measured under corruption in the run's folder, beside what was measured there before."""
    new = [row for row in rows if row.data != evaluate.CLEAN]
    try:
        path = artifacts.member(folder, artifacts.CORRUPTIONS)
        versions = {row.data for row in new}
        old = [row for row in contents.rows(path) if row.data not in versions]
        prune.write_rows(path, task, [*old, *new])
    except DllpError as error:
        prune.warn(f"{error}; the report will not show these corruptions")


def command(folder: Path, settings: Mapping[str, Any]) -> str:
    """What makes the same run again, its defaults left out."""
    task = Task(**{name: settings[name] for name in options.TASK if name in settings})
    chosen = {name: settings[name] for name in ("granularity", "task") if name in settings}
    usual = asdict(Task()) | task.config(chosen).resolved().as_dict() | {"granularity": None, "task": "classification"}
    words = ["dllp", "prune"]
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    for name, value in plain.items():
        if value != usual.get(name):
            option = name.replace("_", "-")
            words += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    return shlex.join([*words, "--out", str(folder)])


def _described(run: contents.Run) -> contents.Run:
    """The run with its settings and its command; one made from Python has neither."""
    if not (run.folder / SETTINGS).exists():
        return run
    settings = options.read(artifacts.member(run.folder, SETTINGS))
    return replace(run, settings=settings, command=command(run.folder, settings))


def _completed(run: contents.Run, given: dict[str, Any], tell: Any) -> contents.Run:
    """The run with what is not in its folder: time, answers to single examples, images; or why there is none."""
    missing: dict[str, str] = {}
    if run.speed is None:
        tell("measuring latency")
        try:
            run = replace(run, speed=_measured(run.folder, given))
        except DllpError as error:
            missing["latency"] = f"Latency was not measured: {error}"
    tell("looking at the test data")
    try:
        data = _data(run, given)
        if run.examples is None and not run.regression:
            run = replace(run, examples=_examples(run, given, data))
        if run.examples is not None:
            if not torch.equal(data.test.y.cpu().int(), run.examples.labels):
                raise DataError("the test data is not what the run was evaluated on")
            run = replace(run, pictures=trust.pictures(run.examples, data.test, data.classes))
    except DllpError as error:
        missing["examples" if run.examples is None else "images"] = f"Test images are not shown: {error}"
    return replace(run, missing=missing)


def _measured(folder: Path, given: dict[str, Any]) -> contents.Speed:
    """A brief look: PyTorch, one thread; `dllp speed` looks longer and at more."""
    result, shape, _ = export.open_run(_of(folder, given))
    dense, pruned = measuring.subjects(result, shape, round_to=1)
    rows = measuring.measure_torch([dense, pruned], shape)
    layers = (
        measuring.torch_layers(dense, pruned, shape, batch=LAYER_BATCH, runs=3) if result.particles[0].recipe else []
    )
    return contents.Speed(rows, layers, "a brief look in PyTorch; dllp speed measures more")


def _data(run: contents.Run, given: dict[str, Any]) -> Dataset:
    known = run.settings | {name: given[name] for name in ("data", "data_root") if name in given}
    if "data" not in known:
        raise DataError("the run does not say what its data is: name it with --data")
    task = Task(**{name: known[name] for name in options.TASK if name in known})
    with progress.download(given.get("quiet", False)) as bar:
        return task.load(known.get("seed", 0), bar)


def _examples(run: contents.Run, given: dict[str, Any], data: Dataset) -> examples.Examples:
    """Asked now, where the folder does not hold the answers."""
    result, _, network = export.open_run(_of(run.folder, given) | {"shape": list(data.test.x.shape[1:])})
    dense, device = None, find_device("auto")
    if (run.folder / DENSE_FILE).exists():
        whole = network().eval()
        artifacts.read_network(run.folder / DENSE_FILE, whole)
        dense = predict_data(posterior_of([whole], torch.ones(1), result.config), data.test, device)
    return examples.collect(predict_data(result.posterior, data.test, device), dense)


def _of(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The options as a command for this one folder has them."""
    return {name: given[name] for name in ("model", "trust_imports") if name in given} | {"folder": folder}
