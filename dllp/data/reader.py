"""Worker processes that read, decode, crop and resize the images of whole batches.

Signals are the training process's to answer, and workers end with it. The death of a worker is raised where the
training process asks for the next batch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils import signal_handling

from dllp.data.images import crop, crop_boxes, resize_one
from dllp.data.sources import Sources
from dllp.data.unreadable import Unreadable

MAX_WORKERS = 16  # worker processes by default
PREFETCH = 2  # batches that each worker prepares in advance
TRIES = 100  # unreadable images in a row before training gives up
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PARENT_CHECK = 1.0  # seconds between two checks that the parent is alive


def cores() -> int:
    """Cores for each process of the run on this host, up to MAX_WORKERS."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(1, own // int(os.environ.get("LOCAL_WORLD_SIZE", 1))), MAX_WORKERS)


class Request(NamedTuple):
    """Images of one batch by index (B,), and random numbers (B, DRAWS) for crops; None takes the centre of each."""

    numbers: np.ndarray
    draws: np.ndarray | None = None


class Decoded(NamedTuple):
    """The images of a request: (B, 3, S, S) uint8, the index (B,) of each, and unreadable ones with the reason."""

    pixels: Tensor
    numbers: Tensor
    unreadable: list[tuple[int, str]]


class Reader(Dataset[Decoded]):
    """Decodes the images of requests, as squares of `image_size` pixels."""

    def __init__(self, sources: Sources, image_size: int) -> None:
        self.sources, self.image_size = sources, image_size

    def __getitem__(self, request: Request) -> Decoded:
        count, draws, size = len(request.numbers), request.draws, self.image_size
        boxes: list[list[float] | None] = [None] * count if draws is None else crop_boxes(draws).tolist()
        mirrors = [False] * count if draws is None else (draws[:, -1] < 0.5).tolist()
        crops, numbers, unreadable = list[tuple[np.ndarray, bool]](), list[int](), list[tuple[int, str]]()
        with warnings.catch_warnings(action="ignore"):  # Pillow's about odd files
            for first, box, mirror in zip(request.numbers.tolist(), boxes, mirrors, strict=True):
                for number in range(first, first + TRIES):
                    number %= len(self.sources)
                    try:
                        crops.append((crop(self.sources.read(number), box, size), mirror))
                    except Unreadable as error:
                        unreadable.append((number, str(error)))
                        continue
                    numbers.append(number)
                    break
            # after all are decoded: a core that changes its work for every image takes longer
            squares = [resize_one(image, mirror, size) for image, mirror in crops]
        pixels = np.stack(squares) if squares else np.empty((0, 3, size, size), np.uint8)
        return Decoded(torch.from_numpy(pixels), torch.tensor(numbers).long(), unreadable)


def check_workers() -> None:
    """Raise a RuntimeError for a worker that has died since it was asked before."""
    signal_handling._error_if_any_worker_fails()  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def starting_workers() -> Iterator[None]:
    """Block SIGINT and SIGTERM while workers start, so that they inherit the mask; keep PyTorch's SIGCHLD handler out.

    That handler raises the death of a worker wherever the main thread stands, in the midst of writing a file as well.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    with suppress(RuntimeError):  # of a loader that is no longer used
        check_workers()
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == signal_handling.__name__:  # a loader of the user's has installed it
        handler = signal.SIG_DFL
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)


def init_worker(number: int) -> None:
    """Ignore signals to the process group, and end with the parent.

    Whoever stops the whole group must not end a worker: the training process still needs the batch that it waits for.
    Only that process itself may end it by SIGTERM.
    """
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # elsewhere PyTorch's own check between two batches must do
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # else the sender of a signal would be unknown
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent_id: int) -> None:
    """End this process once its parent is gone or sends SIGTERM, even while it waits for a disk or a full pipe."""
    parent = multiprocessing.parent_process()
    # The pipe to a parent is open in workers that were started later, too: its number is the faster way to know.
    while parent is not None and parent.is_alive() and os.getppid() == parent_id:
        received = signal.sigtimedwait([signal.SIGTERM], PARENT_CHECK)
        if received is not None and received.si_pid == parent.pid:
            break
    os._exit(0)
