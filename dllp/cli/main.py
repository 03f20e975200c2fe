"""The command line: `dllp prune` makes a run folder, `dllp evaluate` reads one, `dllp bench` fills a table."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dllp.api import load
from dllp.cli import analyze, export, options, progress, prune, report
from dllp.cli.task import DENSE_FILE, SETTINGS, Task, as_trained, described, disk, outputs, subset
from dllp.data import ArrayData
from dllp.data.corruptions import parse as parse_corruption
from dllp.data.ood import find as find_outside
from dllp.data.ood import same as same_data
from dllp.devices.device import find_device
from dllp.devices.ranks import number
from dllp.errors import ConfigError, DllpError, Interrupted, check_count
from dllp.evaluation import evaluate
from dllp.evaluation.sampling import sample_gates
from dllp.posterior import posterior_of
from dllp.runs import artifacts
from dllp.runs.signals import loaded
from paper import command as bench
from paper.launch import KEPT

STUDYING = {"analyze": analyze.analyze, "methods": analyze.methods}
SHIPPING = {"export": export.export, "speed": export.speed, "report": report.write}
UNHEARD = 141
"""Exit code, as shells give it, of a command whose reader left before it had said all, such as `| head`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 2 for bad input (one line on standard error), or 130 and 143 after a signal.

    141 means that nobody read its output any more.

    Of several processes under torchrun the first speaks for all.
    """
    command = ""
    loaded()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a table must not fail for a sign that the terminal lacks
            stream.reconfigure(errors="replace")
    try:
        command, given = options.parse(sys.argv[1:] if argv is None else argv)
        {"prune": prune.prune, "evaluate": _evaluate, "bench": _bench, **STUDYING, **SHIPPING}[command](given)
        if sys.stdout is not None:  # as it is where a shell has closed it
            sys.stdout.flush()
        return 0
    except KeyboardInterrupt as error:
        kept = KEPT if command == "bench" else "nothing was written"
        return _complain(f"interrupted, {_notes(error) or kept}", 130)
    except Interrupted as error:
        code = 128 + error.signal
        return code if number() else _complain(f"interrupted, {_notes(error) or 'nothing was written'}", code)
    except DllpError as error:
        told = error.told or (not command and number() > 0)  # all read the same command line
        return 2 if told else _complain(_with_notes(str(error), error))
    except torch.OutOfMemoryError as error:
        way = "give --recompute or --accumulate 4, or lower --batch-size or --particles"
        return _complain(_with_notes(f"out of memory: {way}", error))
    except MemoryError as error:
        return _complain(_with_notes("out of memory", error))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename is None and not _notes(error):
            return _unheard()
        return _complain(_with_notes(f"{error.filename or 'output'}: {error.strerror or error}", error))


# ---- commands


def _evaluate(given: dict[str, Any]) -> None:
    folder = Path(given["folder"])
    if "gate_draws" in given:
        check_count(gate_draws=given["gate_draws"])
    run = artifacts.read_run(folder)
    stored = options.read(artifacts.member(folder, SETTINGS)) if (folder / SETTINGS).exists() else {}
    for name in ("data", "model"):
        if name not in given and name not in stored:
            raise ConfigError(f"{folder} has no {SETTINGS}: name the run's {name} with --{name}")
    task = Task(**{name: (stored | given)[name] for name in options.TASK if name in stored | given})
    prune.check_import(task, given, "the run's")
    known = described(run, folder)
    other = "data" not in stored or not same_data(task.data, stored["data"])
    if other:
        task = replace(task, validation=0, leave_out="")
    with progress.download(quiet=False) as bar:
        data = task.load(stored.get("seed", 0), bar, lambda image: prune.warn(str(image)))
    test = as_trained(data, known)
    sizes = [known.get(name, getattr(data, name)) for name in ("num_classes", "in_channels", "image_size")]
    sizes[0] = outputs(run, sizes[0])
    task.check_network(folder, *sizes)
    result = load(folder, task.network(*sizes, seed=0))
    dense = None
    if (folder / DENSE_FILE).exists():
        network = task.network(*sizes, seed=0).eval()
        artifacts.read_network(folder / DENSE_FILE, network)
        dense = posterior_of([network], torch.tensor([known.get("dense_noise", torch.nan)]), result.config)
    if "subset" in given:
        test = subset(test, given["subset"], result.config.seed)
    corruptions = [c for text in given.get("corrupt", ()) for c in parse_corruption(text, result.config.seed)]
    outside = {name: _outside(name, task, test, data.left_out) for name in given.get("ood", ())}
    draws = given.get("gate_draws")
    drawn = None if draws is None else sample_gates(result, test.inputs(slice(0, 2)), draws, seed=result.config.seed)
    device = find_device(given.get("device", "auto"))
    found = evaluate.measure(
        result, test, dense, disk=disk(folder, result), corruptions=corruptions, ood=outside,
        references=given.get("references", False), drawn=drawn, device=device,
    )  # fmt: skip
    rows = [row for row in found.rows if not row.data.startswith(evaluate.OOD)]
    if "json" in given:
        prune.write_rows(Path(given["json"]), task, found.rows, named=True, **found.besides())
    if corruptions and not other and "subset" not in given:
        report.keep_corruptions(folder, task, rows)
    progress.show_evaluation(found, f"{folder} on {len(test)} {task.split} examples of {task.data}")


def _outside(name: str, task: Task, test: ArrayData, left_out: ArrayData | None) -> ArrayData:
    if same_data(name, task.data):
        raise ConfigError(f"--ood {name}: that is the data of the evaluation itself, choose another")
    return find_outside(name, test, left_out=left_out, root=task.data_root)


def _bench(given: dict[str, Any]) -> None:
    quiet = given.get("quiet", False)
    bench.execute(
        given,
        download=lambda: progress.download(quiet),
        reporter=lambda: progress.reporter(quiet, pause=60.0),
    )


def _notes(error: BaseException) -> str:
    """What was noted on the way up: how to go on."""
    return "; ".join(getattr(error, "__notes__", ()))


def _with_notes(text: str, error: BaseException) -> str:
    return "; ".join(filter(None, (f"error: {text}", _notes(error))))


def _unheard() -> int:
    """Nobody is left to be told anything; what is still held back goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNHEARD


def _complain(text: str, code: int = 2) -> int:
    print("dllp:", " ".join(text.split()), file=sys.stderr)
    return code
