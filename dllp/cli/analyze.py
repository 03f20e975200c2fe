"""`dllp analyze`: the distribution of a run's weights before pruning, of the kept part and of the removed part."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from dllp import files
from dllp.cli.open_run import read_run
from dllp.evaluation import weight_analysis


def run(args: Namespace) -> None:
    """Analyze the weights of one particle."""
    opened = read_run(Path(args.folder), args).open(shape=args.shape)
    report = weight_analysis.analyze(opened.result, args.particle - 1, opened.dense_network())
    if args.json is not None:
        files.write_json(Path(args.json), {"folder": str(opened.folder), **report}, named=True)
    if not args.quiet:
        print(weight_analysis.text(report))
