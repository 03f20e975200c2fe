"""`python -m paper NAME`: the command `dllp bench` where jsonargparse and rich are not installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dllp.errors import DllpError, Interrupted
from paper.command import LAUNCHERS, execute
from paper.launch import KEPT
from paper.tables import TABLES


def options() -> argparse.ArgumentParser:
    """The options of `dllp bench`, in plain Python."""
    parser = argparse.ArgumentParser(prog="python -m paper", argument_default=argparse.SUPPRESS)
    parser.add_argument("name", help=", ".join(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+")
    for name in ("--rows", "--set"):
        parser.add_argument(name, nargs="+")
    for name in ("--out", "--data", "--data-root", "--device", "--precision", "--shard", "--address", "--max-bad"):
        parser.add_argument(name)
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS))
    for name in ("--epochs", "--validation", "--image-size", "--workers", "--jobs", "--cpus"):
        parser.add_argument(name, type=int)
    for name in ("--list", "--summary-only", "--recompute", "--quiet"):
        parser.add_argument(name, action="store_true")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one bench; returns 0, or with one line on standard error 2, or 130 and 143 after a signal to a launcher."""
    try:
        execute(vars(options().parse_args(words)))
    except DllpError as error:
        print("dllp:", " ".join(f"error: {error}".split()), file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"dllp: interrupted, {KEPT}", file=sys.stderr)
        return 128 + error.signal
    return 0


if __name__ == "__main__":
    sys.exit(main())
