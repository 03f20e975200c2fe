"""The command line `dllp`: parse, load the one command that is asked for, and end every failure with one line."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from dllp.errors import DllpError, Interrupted

UNHEARD = 141
"""Exit code, as shells give it, of a command whose reader left before it had said all, such as `| head`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 2 for bad input (one line on standard error), or 130 and 143 after a signal.

    141 means that nobody read its output any more.

    Of several processes under torchrun the first speaks for all.
    """
    command = ""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a table must not fail for a sign that the terminal lacks
            stream.reconfigure(errors="replace")
    try:
        with _silent_interrupt(own_process=argv is None):
            from dllp.cli.parser import parse

            args = parse(sys.argv[1:] if argv is None else argv)
            command = args.command
            run = import_module(f"dllp.cli.{command}").run
        run(args)
        if sys.stdout is not None:  # as it is where a shell has closed it
            sys.stdout.flush()
        return 0
    except KeyboardInterrupt as error:
        return _complain(f"interrupted, {_notes(error) or 'nothing was written'}", 130)
    except Interrupted as error:
        code = 128 + error.signal
        return code if _rank() else _complain(f"interrupted, {_notes(error) or 'nothing was written'}", code)
    except DllpError as error:
        reported = error.reported_elsewhere or (not command and _rank() > 0)  # all read the same command line
        return 2 if reported else _complain(_with_notes(str(error), error))
    except MemoryError as error:
        return _complain(_with_notes("out of memory", error))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename is None and not _notes(error):
            return _unheard()
        return _complain(_with_notes(f"{error.filename or 'output'}: {error.strerror or error}", error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's: a mistake in the options must not wait for PyTorch
            raise
        way = "give --recompute or --accumulate 4, or lower --batch-size or --particles"
        return _complain(_with_notes(f"out of memory: {way}", error))


@contextmanager
def _silent_interrupt(own_process: bool) -> Iterator[None]:
    """Let Ctrl-C end the process at once and silently while modules load: nothing has begun.

    As an exception it would be a traceback out of whatever is being imported. A program that calls :func:`main` with
    words of its own gets the exception.
    """
    before = signal.getsignal(signal.SIGINT)
    if not own_process or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _rank() -> int:
    """This process's number under torchrun."""
    if "RANK" not in os.environ:
        return 0
    from dllp.devices.ranks import number

    return number()


def _notes(error: BaseException) -> str:
    """Notes that were added on the way up: how to go on."""
    return "; ".join(getattr(error, "__notes__", ()))


def _with_notes(text: str, error: BaseException) -> str:
    return "; ".join(filter(None, (f"error: {text}", _notes(error))))


def _unheard() -> int:
    """Send what is still buffered nowhere: nobody reads it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNHEARD


def _complain(text: str, code: int = 2) -> int:
    print("dllp:", " ".join(text.split()), file=sys.stderr)
    return code
