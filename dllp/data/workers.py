"""The processes that decode images: signals are the training process's to answer, and they end with it.

One that dies is told where the training process waits for a batch: PyTorch would raise it wherever the main thread
stands, in the midst of writing a file as well.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from PIL import ImageFile

from dllp.errors import DataError

MOST, LIMIT = 16, 1024
"""Processes by themselves, and on demand."""
BLOCK = 2**20
"""Bytes that Pillow reads or gives at a time in a worker: by its own 2**16 a large image is put together in parts."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK = 1.0
"""Seconds between two looks at whether the parent is still there."""


def cores() -> int:
    """Cores for each process of the run on this host that this one may use, up to a limit."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(1, own // int(os.environ.get("LOCAL_WORLD_SIZE", 1))), MOST)


def check(count: int | None) -> None:
    """Raise unless so many processes can be asked for; None is as many as :func:`cores`."""
    if count is not None and not 0 <= count <= LIMIT:
        raise DataError(f"workers = {count}: a number of processes from 0 to {LIMIT} is needed")


# ---- in the worker


def begin(number: int) -> None:
    """What each worker does first.

    It ignores the signals of whoever stops the whole group: the training process still needs the batch that it waits
    for. Only that process itself may end it by SIGTERM.
    """
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # else nobody could ask who sent it
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    ImageFile.MAXBLOCK = BLOCK


def _end_with_parent(born: int) -> None:
    """A killed parent says no good-bye, and a worker that waits for a disk or a full pipe would not notice."""
    parent = multiprocessing.parent_process()
    # The pipe to a parent is open in workers that were started later, too: its number is the faster way to know.
    while parent is not None and parent.is_alive() and os.getppid() == born and not _asked(parent.pid):
        pass
    os._exit(0)


def _asked(parent: int | None) -> bool:
    """Whether the parent asks for an end within a while."""
    if not hasattr(signal, "sigtimedwait"):
        time.sleep(LOOK)
        return False
    told = signal.sigtimedwait([signal.SIGTERM], LOOK)
    return told is not None and told.si_pid == parent


# ---- in the training process


@contextmanager
def deaf() -> Iterator[None]:
    """What is started in here does not hear the signals from its first moment on; this process hears them later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Watch(AbstractContextManager["Watch"]):
    """Within the block a worker's death is raised as PyTorch does it; one that dies outside of it, with the next."""

    def __init__(self) -> None:
        self._inside = False
        self._died: RuntimeError | None = None
        self._raising: Callable[[int, FrameType | None], Any] | None = None

    def begin(self) -> None:
        """New workers are there, and with the first of them PyTorch's handler, which this takes the place of."""
        self._died = None
        if self._raising is not None or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
        if callable(handler):
            self._raising = handler
            signal.signal(signal.SIGCHLD, self._handle)

    def __enter__(self) -> Watch:
        self._inside = True
        died, self._died = self._died, None
        if died is not None:
            self._inside = False
            raise died
        return self

    def __exit__(self, *exception: object) -> None:
        self._inside = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            if self._raising is not None:
                self._raising(number, frame)
        except RuntimeError as error:
            if self._inside:
                raise
            self._died = error


watch = Watch()
"""Of this process: there is one handler of a signal for all."""
