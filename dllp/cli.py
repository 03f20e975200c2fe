"""The command line: `dllp prune` makes a run folder, `dllp evaluate` reads one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dllp import api, artifacts, evaluate, options, progress
from dllp.data.corruptions import parse as parse_corruption
from dllp.errors import ConfigError, DllpError
from dllp.posterior import Posterior
from dllp.task import DENSE_FILE, EVALUATION, LOG, SETTINGS, Task, as_trained, describe, disk, subset
from dllp.train import EpochRecord


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 2 for bad input (one line on standard error), or 130 after Ctrl-C."""
    try:
        command, given = options.parse(sys.argv[1:] if argv is None else argv)
        {"prune": _prune, "evaluate": _evaluate}[command](given)
        return 0
    except KeyboardInterrupt:
        return _complain("interrupted, nothing was written", 130)
    except DllpError as error:
        return _complain(f"error: {error}")
    except torch.OutOfMemoryError:
        return _complain("error: out of memory: lower --batch-size or --particles")
    except OSError as error:
        return _complain(f"error: {error.filename or 'output'}: {error.strerror or error}")


# ---- commands


def _prune(given: dict[str, Any]) -> None:
    quiet, overwrite, out = (
        given.get("quiet", False),
        given.get("overwrite", False),
        Path(given.get("out", options.OUT)),
    )
    values = options.read(Path(given["config"])) if "config" in given else {}
    values |= {name: value for name, value in given.items() if name not in ("quiet", "overwrite", "out", "config")}
    task = Task(**{name: values.pop(name) for name in options.TASK if name in values})
    early = task.config(values)  # bad values are told before any data is read
    device = api.find_device(early.device)
    artifacts.check_free(out, overwrite)
    with progress.download(quiet) as bar:
        data = task.load(early.seed, bar)
    config = task.config(values, data)
    model = task.network(data.num_classes, data.in_channels, data.image_size, config.seed)
    with artifacts.new_folder(out, overwrite) as folder:
        with progress.reporter(quiet) as shown, open(folder / LOG, "w", encoding="utf-8") as log:
            training = ""

            def on_epoch(record: EpochRecord) -> None:
                log.write(json.dumps({"training": training, **record.as_dict()}) + "\n")
                log.flush()
                shown.epoch(record)

            training = "pruned"
            shown.begin(training, config.epochs, config.keep_params or config.keep_flops)
            result = api.prune(model, data, config, on_epoch=on_epoch, on_step=shown.step)
            dense = None
            if task.dense and config.init == "given":
                dense = Posterior([model.cpu().eval()], torch.tensor([torch.nan]), config.task)
            elif task.dense:
                training = "dense"
                shown.begin(training, config.epochs, None)
                alone = replace(config, particles=1, keep_flops=None, keep_params=None)
                dense = api.train_dense(model, data, alone, on_epoch=on_epoch, on_step=shown.step).posterior
                result.info["dense_noise"] = float(dense.noise[0])
        result.info["data"] = describe(data)
        result.write(folder)
        if dense is not None:
            artifacts.write_network(folder / DENSE_FILE, dense.networks[0])
        if Path(task.data).is_dir():
            task = replace(task, data=str(Path(task.data).resolve()))
        artifacts.write_bytes(folder / SETTINGS, options.write(asdict(task), result.config))
        rows = evaluate.table(result, data.test, dense, disk=disk(folder, result), device=device)
        _write_rows(folder / EVALUATION, task, rows)
    if not quiet:
        progress.show(rows, f"{task.model} on {len(data.test)} {task.split} examples of {task.data}")
        print(f"run folder: {out}")


def _evaluate(given: dict[str, Any]) -> None:
    folder = Path(given["folder"])
    run = artifacts.read_run(folder)
    stored = options.read(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    for name in ("data", "model"):
        if name not in given and name not in stored:
            raise ConfigError(f"{folder} has no {SETTINGS}: name the run's {name} with --{name}")
    task = Task(**{name: (stored | given)[name] for name in options.TASK if name in stored | given})
    if task.is_code and "model" not in given and not given.get("trust_imports"):
        raise ConfigError(f"the run's network is code, {task.model}: name it with --model, or add --trust-imports")
    other = task.data != stored.get("data")
    if other:
        task = replace(task, validation=0)
    with progress.download(quiet=False) as bar:
        data = task.load(stored.get("seed", 0), bar)
    known = run.get("info", {}).get("data", {})
    test = as_trained(data, known) if other else data.test
    sizes = [known.get(name, getattr(data, name)) for name in ("num_classes", "in_channels", "image_size")]
    result = api.load(folder, task.network(*sizes, seed=0))
    dense = None
    if (folder / DENSE_FILE).exists():
        network = task.network(*sizes, seed=0).eval()
        artifacts.read_network(folder / DENSE_FILE, network)
        dense = Posterior([network], torch.tensor([result.info.get("dense_noise", torch.nan)]), result.config.task)
    if "subset" in given:
        test = subset(test, given["subset"], result.config.seed)
    corruptions = [c for text in given.get("corrupt", ()) for c in parse_corruption(text, result.config.seed)]
    device = api.find_device(given.get("device", "auto"))
    rows = evaluate.table(result, test, dense, disk=disk(folder, result), corruptions=corruptions, device=device)
    if "json" in given:
        _write_rows(Path(given["json"]), task, rows)
    progress.show(rows, f"{folder} on {len(test)} {task.split} examples of {task.data}")


def _write_rows(path: Path, task: Task, rows: Sequence[evaluate.Row]) -> None:
    report = {"data": task.data, "split": task.split, "model": task.model, "rows": evaluate.as_dict(rows)}
    artifacts.write_json(path, report)


def _complain(text: str, code: int = 2) -> int:
    print("dllp:", " ".join(text.split()), file=sys.stderr)
    return code
