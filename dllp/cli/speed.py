"""`dllp speed`: time, memory and bytes of the dense and the extracted network."""

from __future__ import annotations

import platform
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from dllp import files
from dllp.cli import progress
from dllp.cli.open_run import read_run
from dllp.deploy import speed
from dllp.deploy.export import require_onnx
from dllp.devices import device as devices
from dllp.errors import ArtifactError
from dllp.runs.folder import SPEED


def run(args: Namespace) -> None:
    """Measure, print the tables, and leave the figures of the first particle in the run folder for its report."""
    require_onnx()
    folder = Path(args.folder)
    opened = read_run(folder, args).open(shape=args.shape)
    shape = opened.shape
    subjects = speed.subjects(opened.result, shape, particle=args.particle - 1, round_to=args.round_to)
    with progress.status(args.quiet) as show:
        rows = speed.measure(subjects, shape, batches=args.batch, seconds=args.seconds, progress=show)
        show("layers")
        layers = speed.layers(subjects[0], subjects[1], shape, batch=max(args.batch))
    report = {
        "folder": str(folder),
        "environment": environment(),
        "rows": speed.as_dict(rows),
        "layers": [vars(layer) | {"lost_ms": layer.lost_ms} for layer in layers],
    }
    if args.json is not None:
        files.write_json(Path(args.json), report, named=True)
    if not args.quiet:
        progress.show_speed(rows, layers, f"{folder}: particle {args.particle} against dense")
    if args.particle == 1:  # the one that the report speaks of
        try:
            files.write_json(folder / SPEED, report)
        except ArtifactError as error:
            progress.warn(f"{error}; the report will not show these times")


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
