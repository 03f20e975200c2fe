"""`dllp export`: a run folder's networks as one file for other runtimes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from dllp.cli.open_run import read_run
from dllp.deploy import export
from dllp.errors import ConfigError


def run(args: Namespace) -> None:
    """Write one particle, or the posterior, as an ONNX or pt2 file."""
    if args.posterior and args.particle is not None:
        raise ConfigError("--particle and --posterior exclude each other: give one of them")
    particle = 1 if args.particle is None else args.particle
    format = export.format_of(Path(args.out), args.format)
    if format == "onnx":
        export.require_onnx()
    opened = read_run(Path(args.folder), args).open(shape=args.shape)
    done = export.export(
        opened.result,
        args.out,
        opened.shape,
        format=format,
        particle=None if args.posterior else particle - 1,
        uint8=args.uint8,
        pad_to=args.pad_to,
    )
    kind = "uint8" if args.uint8 else "float32"
    print(f"{done.path}: {done.bytes:,} bytes, {kind} input (batch, {', '.join(map(str, opened.shape))})")
    print(f"outputs: {', '.join(done.outputs)}")
    print(f"largest difference from PyTorch: {done.difference:.2g} ({done.runtime}, batches of {export.BATCHES})")
