"""SIGTERM and SIGINT as a wish that is asked for at a good moment, instead of an exception at any."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Self

from dllp.errors import Interrupted


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
        """Act on the first signal."""
        self._number = number

    def check(self, note: str) -> None:
        """Raise Interrupted where a signal has come, with a note of how to go on."""
        if self._number:
            error = Interrupted(self._number)
            error.add_note(note)
            raise error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self.asked(number)


class Signals(Stop):
    """SIGTERM and SIGINT end a run: at once outside of training, after the present step in it; a second one kills.

    Attributes:
        stop: Ends the training that is going on after its present step; None where there is none.
    """

    stop: Callable[[int], None] | None = None

    def ignore(self) -> None:
        """Ignore further signals: the run ends by itself, and its launcher must not cut its error message short."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before = {}

    def asked(self, number: int) -> None:
        if self.stop is None:
            raise Interrupted(number)
        self.stop(number)
