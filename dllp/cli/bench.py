"""`dllp bench`: a table or figure of the paper, by the package `paper` of a source checkout."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

from dllp.cli import progress


def run(args: Namespace) -> None:
    """Run what a table lacks, and show its trainings; the parser has found the package already."""
    command, launch = import_module("paper.command"), import_module("paper.launch")
    given = {name: value for name, value in vars(args).items() if name not in ("command", "chosen")}
    quiet = given.get("quiet", False)
    try:
        command.execute(
            given,
            download=lambda: progress.download(quiet),
            reporter=lambda: progress.reporter(quiet, pause=60.0),
        )
    except KeyboardInterrupt as error:
        error.add_note(launch.KEPT)
        raise
