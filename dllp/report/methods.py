"""Methods beside each other: means and standard deviations over the seeds of a comparison, as values and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from dllp.deploy.speed import DENSE as DENSE_SUBJECT
from dllp.deploy.speed import ONNX, PRUNED
from dllp.deploy.speed import Row as SpeedRow
from dllp.errors import ArtifactError
from dllp.report.contents import Run
from dllp.report.figures import Section
from dllp.report.page import table

NETWORK = "particle 1"  # the network of a run that the table is about: the one that `dllp export` writes
HEADS = {
    "flops_removed": "FLOPs removed", "params_removed": "parameters removed", "accuracy": "accuracy", "rmse": "RMSE",
    "drop": "drop", "nll": "NLL", "ece": "ECE", "ms": "ms", "speedup": "speed-up", "seconds": "seconds",
}  # fmt: skip
PERCENT, DIGITS = ("flops_removed", "params_removed", "accuracy", "drop", "ece"), {"nll": 4, "rmse": 4, "ms": 3}
NOTE = (
    "Mean ± standard deviation over seeds. Drop: against the dense network of the same seed, which every method starts "
    "from; ms: processor time of one example in onnxruntime, on one thread its latency; seconds: of training, a pruned "
    "network's without the dense network's."
)


def figures(run: Run, dense: Run | None = None) -> dict[str, float]:
    """Figures of a run, with its drop against the run of the dense network where that is given."""
    for each in (run, dense):
        if each is not None and NETWORK not in each.clean:
            raise ArtifactError(f"{each.folder} holds no evaluation: remove the folder, and the same command runs it")
    found, quality = run.clean[NETWORK].metrics, "rmse" if run.regression else "accuracy"
    values = {name: found[name] for name in (quality, "nll", "ece") if name in found}
    values["flops_removed"] = 1 - run.sizes[0].macs / run.dense.macs
    values["params_removed"] = 1 - run.sizes[0].params / run.dense.params
    if dense is not None:
        values["drop"] = (dense.clean[NETWORK].metrics[quality] - found[quality]) * (-1 if run.regression else 1)
    times = timed(run)
    if times:
        ms, dense_ms = (1e3 * times[name].undisturbed for name in (PRUNED, DENSE_SUBJECT))
        values |= {"ms": ms, "dense_ms": dense_ms, "speedup": dense_ms / ms}
    return values | {"seconds": sum(record.seconds for record in run.history)}


def timed(run: Run) -> dict[str, SpeedRow]:
    """Dense and pruned network of a run in onnxruntime, one example on one thread; empty where that is not measured."""
    rows = run.speed.rows if run.speed else []
    found = {r.network: r for r in rows if (r.runtime, r.device, r.threads, r.batch) == (ONNX, "cpu", 1, 1)}
    return found if {DENSE_SUBJECT, PRUNED} <= found.keys() else {}


def summary(runs: Sequence[dict[str, Any]], dense: str) -> list[dict[str, Any]]:
    """Runs with `row`, `seed` and figures or an `error` -> a row for each method and budget: means and deviations."""
    found = []
    for row in dict.fromkeys(run["row"] for run in runs):
        own = [run for run in runs if run["row"] == row]
        samples = {name: [run[name] for run in own if name in run] for name in HEADS}
        if row == dense:
            samples["ms"] = [run["dense_ms"] for run in runs if "dense_ms" in run]
        values = {
            name: {"mean": fmean(parts), "std": stdev(parts) if len(parts) > 1 else None}
            for name, parts in samples.items()
            if parts
        }
        failed = {str(run["seed"]): run["error"] for run in own if "error" in run}
        found.append({"row": row, "seeds": len(own) - len(failed), **values, "failed": failed})
    return found


def cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table; reasons of failed runs stand in place of seeds."""
    names = [name for name in HEADS if any(name in row for row in rows)]

    def cell(name: str, value: dict[str, Any] | None) -> str:
        if value is None:
            return "–"
        scale, digits = (100, 2) if name in PERCENT else (1, DIGITS.get(name, 2 if name == "speedup" else 1))
        spread = "" if value["std"] is None else f" ± {scale * value['std']:.{digits}f}"
        return f"{scale * value['mean']:.{digits}f}{spread}"

    body = []
    for row in rows:
        failed = "; ".join(f"seed {seed} failed: {why}" for seed, why in row["failed"].items()).replace("|", "/")
        body.append([row["row"], *(cell(n, row.get(n)) for n in names), f"{row['seeds']}{failed and f' ({failed})'}"])
    return ["method", *(HEADS[name] + " %" * (name in PERCENT) for name in names), "seeds"], body


def section(rows: Sequence[dict[str, Any]]) -> Section:
    """The table on the page of all runs."""
    return Section("methods", "Methods", lead=NOTE, markup=table(*cells(rows)))
