"""SIGTERM and SIGINT as a wish that is asked for at a good moment, instead of an exception at any.

Imported before all else: nothing here may take long to load.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Self

from dllp.errors import Interrupted


def while_loading() -> None:
    """Let Ctrl-C end the command `dllp` at once and silently while it loads; other programs are left as they are.

    Nothing has begun, and as an exception it would be a traceback out of whatever is being imported.
    """
    program = next(iter(sys.argv), "")
    if program == "-m":  # as it is until the module is found
        program = next((word for before, word in pairwise(sys.orig_argv) if before == "-m"), "")
    started = program in sys.orig_argv  # worker processes are only told the name
    if started and Path(program).stem == "dllp" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def loaded() -> None:
    """Ctrl-C is an exception again, for whoever started what must be ended well."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


class Stop(AbstractContextManager["Stop"]):
    """Within the block the first signal is remembered; a second one kills."""

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and shells ask for
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self, number: int) -> None:
        """What the first signal does."""
        self._number = number

    def check(self, note: str) -> None:
        """Raise what a signal asked for, with a note of how to go on."""
        if self._number:
            error = Interrupted(self._number)
            error.add_note(note)
            raise error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self.asked(number)
