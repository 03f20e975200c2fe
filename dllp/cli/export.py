"""`dllp export` and `dllp speed`: a run folder's networks for other runtimes, and how fast they are."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dllp import files
from dllp.api import Result, load
from dllp.cli import options, progress, prune
from dllp.cli.task import SETTINGS, Task, described, outputs
from dllp.deploy import export as exporting
from dllp.deploy import speed as measuring
from dllp.devices import device as devices
from dllp.errors import ArtifactError, ConfigError
from dllp.runs import artifacts


def export(given: dict[str, Any]) -> None:
    """One particle, or the posterior, as an ONNX or pt2 file."""
    if given.get("posterior") and "particle" in given:
        raise ConfigError("--particle and --posterior exclude each other: give one of them")
    format = exporting.format_of(Path(given["out"]), given.get("format"))
    if format == "onnx":
        exporting.require_onnx()
    result, shape, _ = open_run(given)
    done = exporting.export(
        result,
        given["out"],
        shape,
        format=format,
        particle=None if given.get("posterior") else given.get("particle", 1) - 1,
        uint8=given.get("uint8", False),
        pad_to=given.get("pad_to", 1),
    )
    kind = "uint8" if given.get("uint8") else "float32"
    print(f"{done.path}: {done.bytes:,} bytes, {kind} input (batch, {', '.join(map(str, shape))})")
    print(f"outputs: {', '.join(done.outputs)}")
    print(f"largest difference from PyTorch: {done.difference:.2g} ({done.runtime}, batches of {exporting.BATCHES})")


def speed(given: dict[str, Any]) -> None:
    """Time, memory and bytes of the dense and the extracted network."""
    exporting.require_onnx()
    result, shape, _ = open_run(given)
    round_to, batches = given.get("round_to", options.ROUND_TO), given.get("batch", [1, 64])
    found = measuring.subjects(result, shape, particle=given.get("particle", 1) - 1, round_to=round_to)
    with progress.status(given.get("quiet", False)) as tell:
        rows = measuring.measure(found, shape, batches=batches, seconds=given.get("seconds", 5.0), progress=tell)
        tell("layers")
        layers = measuring.layers(found[0], found[1], shape, batch=max(batches))
    report = {
        "folder": str(given["folder"]),
        "environment": environment(),
        "rows": measuring.as_dict(rows),
        "layers": [vars(layer) | {"lost_ms": layer.lost_ms} for layer in layers],
    }
    if "json" in given:
        files.write_json(Path(given["json"]), report, named=True)
    if not given.get("quiet"):
        progress.show_speed(rows, layers, f"{given['folder']}: particle {given.get('particle', 1)} against dense")
    if given.get("particle", 1) == 1:  # the one that the report speaks of
        try:
            files.write_json(Path(given["folder"]) / artifacts.SPEED, report)
        except ArtifactError as error:
            prune.warn(f"{error}; the report will not show these times")


def environment() -> dict[str, Any]:
    """Versions and hardware of a measurement."""
    import onnxruntime

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return devices.environment(device) | {
        "onnxruntime": onnxruntime.__version__,
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def open_run(given: dict[str, Any]) -> tuple[Result, tuple[int, ...], Callable[[], nn.Module]]:
    """A finished run, the shape of one of its inputs, and what makes its network; its data is not read."""
    folder = Path(given["folder"])
    run = artifacts.read_run(folder)
    stored = options.read(artifacts.member(folder, SETTINGS)) if (folder / SETTINGS).exists() else {}
    known = described(run, folder)
    if "model" not in given and "model" not in stored:
        raise ConfigError(f"{folder} has no {SETTINGS}: name the run's network with --model")
    shape = tuple(given.get("shape") or known.get("shape") or ())
    if shape and min(shape) < 1:
        raise ConfigError(f"shape = {' '.join(map(str, shape))}: positive numbers are needed, such as --shape 3 32 32")
    if not shape:
        raise ConfigError(f"{folder} does not say what its inputs look like: give --shape, for example --shape 3 32 32")
    task = Task(**{name: (stored | given)[name] for name in options.TASK if name in stored | given})
    prune.check_import(task, given, "the run's")
    classes = outputs(run, known.get("num_classes", 0))
    if not classes and not task.is_code:
        raise ConfigError(f"{folder} does not say how many outputs its network has: give a factory with --model")
    sizes = [classes or 1, known.get("in_channels") or shape[0], known.get("image_size") or min(shape[1:], default=1)]
    task.check_network(folder, *sizes)
    result = load(folder, task.network(*sizes, seed=0))
    if known:
        result.info["data"] = known
    return result, shape, lambda: task.network(*sizes, seed=0)
