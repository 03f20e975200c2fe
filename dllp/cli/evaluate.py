"""`dllp evaluate`: the networks of a run folder on its test data, on corrupted and on out-of-distribution inputs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dllp import files
from dllp.cli import progress
from dllp.cli.open_run import as_trained, disk, read_run
from dllp.data import ArrayData, stratified
from dllp.data.corruptions import parse as parse_corruption
from dllp.data.ood import find as find_outside
from dllp.data.ood import same as same_data
from dllp.devices.device import find_device
from dllp.errors import ConfigError, DataError, DllpError, check_count
from dllp.evaluation import evaluate
from dllp.evaluation.sampling import sample_gates
from dllp.report import contents
from dllp.runs.folder import CORRUPTIONS, member
from dllp.runs.settings import Task


def run(args: Namespace) -> None:
    """Measure, print the tables, and leave what was asked for in files."""
    folder = Path(args.folder)
    if args.gate_draws is not None:
        check_count(gate_draws=args.gate_draws)
    stored = read_run(folder, args, needed=("data", "model"))
    task = stored.task
    data = stored.read_data(quiet=False, report=lambda image: progress.warn(str(image)))
    test = as_trained(data, stored.info.data)
    result = stored.open(data=data)
    seed = result.config.seed
    if args.subset is not None:
        test = subset(test, args.subset, seed)
    named = [corruption for text in args.corrupt or () for corruption in parse_corruption(text, seed)]
    corruptions = list(dict.fromkeys(named))  # each once, as --ood
    same = [name for name in args.ood or () if same_data(name, task.data)]
    if same:
        raise ConfigError(f"--ood {same[0]}: that is the data of the evaluation itself, choose another")
    outside = {name: find_outside(name, test, left_out=data.left_out, root=task.data_root) for name in args.ood or ()}
    drawn = None
    if args.gate_draws is not None:
        drawn = sample_gates(result, test.inputs(slice(0, 2)), args.gate_draws, seed=seed)
    found = evaluate.measure(
        result, test, evaluate.dense_posterior(result), disk=disk(folder, result), corruptions=corruptions, ood=outside,
        references=args.references, drawn=drawn, device=find_device(args.device),
    )  # fmt: skip
    if args.json is not None:
        write_rows(Path(args.json), task, found.rows, named=True, **found.besides())
    if corruptions and not stored.other_data and args.subset is None:
        _keep_corruptions(folder, task, found.rows)
    progress.show_evaluation(found, f"{folder} on {len(test)} {task.split} examples of {task.data}")
    print(progress.next_step("speed", args.folder, args))


def subset(data: ArrayData, fraction: float, seed: int) -> ArrayData:
    """A random fraction of the examples, each class in proportion."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"subset = {fraction:g}: a share of the examples in (0, 1] is needed, such as 0.2")
    count = round(fraction * len(data))
    if not count:
        raise DataError(f"a subset of {fraction} of {len(data)} examples is empty: give a larger fraction, up to 1")
    return data.subset(stratified(data.y.cpu(), count, seed))


def write_rows(path: Path, task: Task, rows: Sequence[evaluate.Row], *, named: bool = False, **besides: Any) -> None:
    """Write the table of an evaluation and whatever belongs to it as JSON; `named` as in `files.write_json`."""
    report = {"data": task.data, "split": task.split, "model": task.model, "rows": [asdict(row) for row in rows]}
    files.write_json(path, report | besides, named=named)


def _keep_corruptions(folder: Path, task: Task, rows: Sequence[evaluate.Row]) -> None:
    """Add rows about corrupted data to those in the run's folder, for its report."""
    new = [row for row in rows if row.data != evaluate.CLEAN and not row.data.startswith(evaluate.OOD)]
    try:
        path = member(folder, CORRUPTIONS)
        versions = {row.data for row in new}
        old = [row for row in contents.rows(path) if row.data not in versions]
        write_rows(path, task, [*old, *new])
    except DllpError as error:
        progress.warn(f"{error}; the report will not show these corruptions")
