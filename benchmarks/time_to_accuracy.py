"""Seconds until a network is within the budget and reaches an accuracy: from nothing, each row alone on the device.

    python benchmarks/time_to_accuracy.py --data-root DIR --out FILE --row given-channel-55 particles=1 \\
        --row dllp-channel-55 particles=1 --row taught-l1-filters-55 --row dense

Each `--row` is a row of a table and what differs from it. The clock starts with the call and runs through everything
but these measurements: structure, captures, the choice of what is cut, and the training of the dense network where a
row starts from one (once a seed; the rows that share it count its seconds). After each epoch accuracy is measured, on
training images held out (10,000; on the test set with `--validation 0`). Only networks that are cut count; `dense` is
the whole network itself. One line of JSON for each run is appended to --out; a run whose line is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from torch import Tensor

from dllp.data import load
from dllp.devices.device import find_device
from dllp.training.moments import scored
from dllp.training.state import RunState
from paper import tables
from paper.jobs import Job, Runner
from paper.provenance import command, now

BEHIND = (2.0, 1.0, 0.5, 0.3, 0.0)
"""Points below the dense network's last epoch that are waited for."""


class Clock:
    """Accuracy after every epoch of the trainings of a job, with the seconds since its start."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], start: float, behind_dense: bool) -> None:
        self.pairs, self.behind_dense = pairs, behind_dense
        self.began = time.perf_counter() - start
        self.points: list[dict[str, Any]] = []

    def __call__(self, state: RunState) -> None:
        if state.step_index % state.steps_per_epoch:
            return
        paused = time.perf_counter()
        state.validation = lambda: iter(self.pairs)
        cut = self.behind_dense if state.gating is None else state.latents.keep is not None
        (accuracy,) = scored(state)["accuracy"]
        self.points.append({"seconds": paused - self.began, "cut": cut, "accuracy": accuracy})
        self.began += time.perf_counter() - paused


def run(runner: Runner, job: Job, spent: dict[str, float]) -> dict[str, Any]:
    """A job's curve; `spent` has the seconds of the dense networks that were trained before."""
    from_dense = job.derived
    if from_dense and job.dense.digest not in spent:
        run(runner, job.dense, spent)
    device = find_device(runner.machine["device"])
    _, versions = runner.splits.of(job)
    (held,) = versions.values()
    labels = held.y.split([len(x) for x in held.parts()])
    pairs = [(x.to(device), y.to(device)) for x, y in zip(held.parts(), labels, strict=True)]
    clock = Clock(pairs, spent[job.dense.digest] if from_dense else 0.0, from_dense)
    runner.watch["on_step"] = clock
    line = runner.run(job).line
    if job.method == "dense":
        spent[job.digest] = clock.points[-1]["seconds"]
    return {**line, "curve": clock.points}


def reached(line: Mapping[str, Any], wanted: float) -> float | None:
    """Seconds after which a network counts that has the accuracy; None where none has."""
    dense = line["method"] == "dense"
    return next((p["seconds"] for p in line["curve"] if (p["cut"] or dense) and p["accuracy"] >= wanted), None)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds; a dash where a seed does not get there."""
    whole = {line["seed"]: line["curve"][-1]["accuracy"] for line in lines if line["method"] == "dense"}
    heads = [f"dense - {points:g}" if points else "dense" for points in BEHIND]
    rows = [["row", "seeds", "last epoch", "all epochs (s)", *(f"{head} (s)" for head in heads)]]
    for name in dict.fromkeys(line["row"] for line in lines):
        own = [line for line in lines if line["row"] == name]
        times = [[reached(line, whole[line["seed"]] - points / 100) for line in own] for points in BEHIND]
        last = [100 * line["curve"][-1]["accuracy"] for line in own]
        spread = f" ± {stdev(last):.2f}" if len(own) > 1 else ""
        total = fmean(line["curve"][-1]["seconds"] for line in own)
        cells = ["–" if None in each else f"{fmean(filter(None, each)):.0f}" for each in times]
        rows.append([name, str(len(own)), f"{fmean(last):.2f}{spread}", f"{total:.0f}", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="table1")
    parser.add_argument("--row", nargs="+", action="append", required=True, metavar="WORD",
                        help="the name of a row, then settings NAME=VALUE")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--validation", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, help="of a quick try")
    parser.add_argument("--data-root")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    of, out = tables.table(given.table), given.out
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    device = find_device(given.device)
    machine: dict[str, Any] = {"device": str(device), "precision": "bfloat16" if device.type == "cuda" else "float32"}
    variant = tables.Variant(given.epochs, given.validation)
    for seed in given.seeds:
        runner, spent = Runner(load(of.data, root=given.data_root), everywhere=False, **machine), dict[str, float]()
        for row, *words in given.row:
            (planned,) = of.set(tables.settings(words), [row]).plan([row], [seed], variant)
            if planned.job.digest in {line["digest"] for line in lines}:
                continue
            named = " ".join([row, *words])
            line = {"row": named, **run(runner, planned.job, spent), "date": now(), "command": command()}
            lines.append(line)
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            last = line["curve"][-1]
            print(f"{named} seed {seed}: {100 * last['accuracy']:.2f} after {last['seconds']:.1f} s", flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
