"""The command line `dllp`: parse, load the one command that is asked for, and end every failure with one line."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from dllp.errors import DllpError, Interrupted

UNHEARD = 141  # exit code, as shells give it, of a command whose reader left before it had said all, such as `| head`


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, 2 for bad input (one line on standard error), 130 or 143 after a signal, or 141."""
    command = ""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a table must not fail for a sign that the terminal lacks
            stream.reconfigure(errors="replace")
    own_process = argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if own_process:  # while modules load, Ctrl-C ends it without a traceback out of whatever is being imported
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from dllp.cli.parser import parse

        args = parse(sys.argv[1:] if argv is None else argv)
        command = args.command
        long = command in ("prune", "compare", "evaluate", "report", "structure")
        run = getattr(import_module(f"dllp.cli.{command if long else 'commands'}"), "run" if long else command)
        if own_process:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run(args)
        if sys.stdout is not None:  # as it is where a shell has closed it
            sys.stdout.flush()
        return 0
    except (KeyboardInterrupt, Interrupted) as error:
        code = 128 + getattr(error, "signal", signal.SIGINT)
        return code if _follows() else _complain(f"interrupted, {_notes(error) or 'nothing was written'}", code)
    except DllpError as error:
        reported = error.reported_elsewhere or (not command and _follows())  # all read the same command line
        return 2 if reported else _fail(str(error), error)
    except MemoryError as error:
        return _fail("out of memory", error)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename is None and not _notes(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what standard output still has buffered
            return UNHEARD
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", error)
    except RuntimeError as error:
        # By name, as a mistake in the options must not wait for PyTorch; its CPU allocator raises a plain RuntimeError.
        if type(error).__name__ != "OutOfMemoryError" and "DefaultCPUAllocator" not in str(error):
            raise
        return _fail("out of memory: give --recompute or --accumulate 4, or lower --batch-size or --particles", error)


def _follows() -> bool:
    """True in every process but the first under torchrun."""
    return os.environ.get("RANK", "0") != "0"


def _notes(error: BaseException) -> str:
    """Notes that were added on the way up: how to go on."""
    return "; ".join(getattr(error, "__notes__", ()))


def _fail(text: str, error: BaseException) -> int:
    return _complain("; ".join(filter(None, (f"error: {text}", _notes(error)))), 2)


def _complain(text: str, code: int) -> int:
    print("dllp:", " ".join(text.split()), file=sys.stderr)
    return code
