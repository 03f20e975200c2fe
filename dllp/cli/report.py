"""`dllp report`: what run folders hold, with what the page needs beyond them, as one HTML file."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dllp import files, report
from dllp.cli import progress
from dllp.cli.open_run import configure, read_run, read_settings
from dllp.data import Dataset
from dllp.devices.device import find_device
from dllp.errors import DataError, DllpError
from dllp.evaluation import examples
from dllp.evaluation.evaluate import dense_posterior
from dllp.posterior import predict_data
from dllp.report import contents, trust
from dllp.runs import settings
from dllp.runs.folder import PAGE
from dllp.runs.settings import Task


def run(args: Namespace) -> None:
    """Write the page of one run into its folder, or a comparison of several into the current one."""
    report.require_plotly()
    folders = [Path(folder) for folder in args.folders]
    alone = len(folders) == 1
    with progress.status(args.quiet) as show:
        runs = []
        for folder in folders:
            show(f"reading {folder}")
            found = contents.read(folder)
            stored = read_settings(folder)
            if stored:
                found = replace(found, settings=stored, command=command(folder, stored))
            runs.append(_completed(found, args, show) if alone else found)
        show("drawing")
        page = report.build(runs)
    if args.out:
        path = Path(args.out)
        files.write_named(path, page)
    else:
        path = folders[0] / PAGE if alone else Path(PAGE)
        files.write_bytes(path, page)
    if not args.quiet:
        print(f"{path}: {len(page):,} bytes, opens in any browser")
        if alone:
            print(progress.next_step("evaluate", args.folders[0], args, "--ood noise"))


def command(folder: Path, stored: Mapping[str, Any]) -> str:
    """The command that makes the same run again, its defaults left out."""
    task, _ = settings.split(stored)
    chosen = {name: stored[name] for name in ("granularity", "task") if name in stored}
    usual = asdict(Task()) | configure(task, chosen).resolved().as_dict()
    usual |= {"granularity": None, "task": "classification"}
    words = ["dllp", "prune"]
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in stored.items()}
    for name, value in plain.items():
        if value != usual.get(name):
            option = name.replace("_", "-")
            words += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    return shlex.join([*words, "--out", str(folder)])


def _completed(found: contents.Run, args: Namespace, show: Callable[[str], None]) -> contents.Run:
    """The run with what is not in its folder: time, answers to single examples, images; or why there is none."""
    missing: dict[str, str] = {}
    if found.speed is None:
        show("measuring latency")
        try:
            found = replace(found, speed=contents.brief(read_run(found.folder, args).open()))
        except DllpError as error:
            missing["latency"] = f"Latency was not measured: {error}"
    show("looking at the test data")
    try:
        data = read_run(found.folder, args, needed=("data",)).read_data(quiet=args.quiet)
        if found.examples is None and not found.regression:
            found = replace(found, examples=_examples(found.folder, args, data))
        if found.examples is not None:
            if not torch.equal(data.test.y.cpu().int(), found.examples.labels):
                raise DataError("the test data is not what the run was evaluated on")
            found = replace(found, pictures=trust.pictures(found.examples, data.test, data.classes))
    except DllpError as error:
        missing["examples" if found.examples is None else "images"] = f"Test images are not shown: {error}"
    return replace(found, missing=missing)


def _examples(folder: Path, args: Namespace, data: Dataset) -> examples.Examples:
    """Answers to the test data, where the folder does not hold them."""
    result = read_run(folder, args).open(data=data)
    device, dense = find_device("auto"), dense_posterior(result)
    found = None if dense is None else predict_data(dense, data.test, device)
    return examples.collect(predict_data(result.posterior, data.test, device), found)
