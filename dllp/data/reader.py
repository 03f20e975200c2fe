"""Worker processes that read, decode and crop the images of whole batches.

A worker does each of these to several images before it goes on to the next: a core that changes its work for every
small image takes a quarter more time. Where a GPU waits for the images it also resizes them, faster than a core could;
otherwise the workers do, for the training process would need the cores that they use.

Signals are the training process's to answer, and workers end with it. The death of a worker is raised where the
training process asks for the next batch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import ImageFile
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from dllp.data.images import Crop, crop_boxes, resize_one
from dllp.data.sources import Sources
from dllp.data.unreadable import Unreadable

MAX_WORKERS = 16
"""Worker processes by default."""
PREFETCH = 2
"""Batches that each worker prepares in advance."""
TRIES = 100
"""Unreadable images in a row before training gives up."""
GROUP, GROUP_BYTES, GROUP_PIXELS = 32, 2**22, 2**24
"""Images that go from one stage to the next together, and most bytes and pixels that they take meanwhile."""
PILLOW_BLOCK = 2**20
"""Bytes that Pillow reads or returns at a time in a worker: by its own 2**16 a large image is put together in parts."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PARENT_CHECK = 1.0
"""Seconds between two checks that the parent is alive."""
T = TypeVar("T")
Wanted = tuple[int, list[float] | None]
"""Index of an image, and its row of :func:`crop_boxes`; None for the centre."""


def cores() -> int:
    """Cores for each process of the run on this host, up to MAX_WORKERS."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(1, own // int(os.environ.get("LOCAL_WORLD_SIZE", 1))), MAX_WORKERS)


# ---- batches


class Request(NamedTuple):
    """Images of one batch by index (B,), and random numbers (B, DRAWS) for crops; None takes the centre of each.

    An unreadable image is omitted, or with `fill` replaced by the next readable one.
    """

    numbers: np.ndarray
    draws: np.ndarray | None = None
    fill: bool = False


class Decoded(NamedTuple):
    """The decoded images of a request.

    Attributes:
        pixels: (B, 3, S, S) uint8; or, still to be resized and mirrored, all bytes of the first image, (h, w, 3),
            then those of the second, and so on. Overwritten once the next batch was taken.
        extent: (B, 2) h and w of each.
        mirror: (B,) bool.
        numbers: (B,) index of each.
        unreadable: Indices of unreadable images, and the reasons.
    """

    pixels: Tensor
    extent: np.ndarray
    mirror: np.ndarray
    numbers: np.ndarray
    unreadable: list[tuple[int, str]]


class Reader(Dataset[Decoded]):
    """Decodes the images of requests, to become `image_size` pixels a side; with `finish` it resizes them too."""

    def __init__(self, sources: Sources, image_size: int, finish: bool) -> None:
        self.sources, self.image_size, self.finish = sources, image_size, finish
        # A request arrives when the first of the last PREFETCH batches is taken: the one before is no longer used.
        self.buffers, self.served = [PixelBuffer() for _ in range(PREFETCH + 1)], 0

    def __getitem__(self, request: Request) -> Decoded:
        buffer, unreadable = self.buffers[self.served % len(self.buffers)], list[tuple[int, str]]()
        buffer.used, self.served = 0, self.served + 1
        count, draws = len(request.numbers), request.draws
        boxes: list[list[float] | None] = [None] * count if draws is None else crop_boxes(draws).tolist()
        wanted = list(zip(request.numbers.tolist(), boxes, strict=True))
        mirrors = [False] * count if draws is None else (draws[:, -1] < 0.5).tolist()
        numbers, extent, mirror = list[int](), list[tuple[int, ...]](), list[bool]()
        with warnings.catch_warnings(action="ignore"):  # Pillow's about odd files
            for (number, box), flip, image in zip(wanted, mirrors, self._images(wanted), strict=True):
                if isinstance(image, Unreadable):
                    unreadable.append((number, str(image)))
                    number, image = self._next(number, box, unreadable) if request.fill else (number, None)
                    if image is None:
                        continue
                numbers.append(number)
                extent.append(image.shape[:2])
                mirror.append(flip)
                if self.finish:
                    image = resize_one(image, flip, self.image_size)
                buffer.take(image.size).reshape(image.shape)[:] = image
        pixels = buffer.filled.view(-1, 3, self.image_size, self.image_size) if self.finish else buffer.filled
        arrays = np.array(extent, np.int64).reshape(-1, 2), np.array(mirror, bool), np.array(numbers, np.int64)
        return Decoded(pixels, *arrays, unreadable)

    def _images(self, wanted: list[Wanted]) -> Iterator[np.ndarray | Unreadable]:
        """Each crop, or the reason why there is none, in their order; group by group through the stages."""
        contents = (_tried(self.sources.read, number) for number, _ in wanted)
        boxes = iter(wanted)
        for some in _grouped(contents, len, GROUP_BYTES):
            opened = [_tried(Crop, content, next(boxes)[1], self.image_size) for content in some]
            for few in _grouped(opened, attrgetter("area"), GROUP_PIXELS):
                decoded = [_tried(Crop.decode, crop) for crop in few]
                yield from [_tried(Crop.cut, crop) for crop in decoded]

    def _next(
        self, number: int, box: list[float] | None, unreadable: list[tuple[int, str]]
    ) -> tuple[int, np.ndarray | None]:
        """The first readable image after an unreadable one; None after TRIES."""
        for i in range(number + 1, number + TRIES):
            (image,) = self._images([(i % len(self.sources), box)])
            if not isinstance(image, Unreadable):
                return i % len(self.sources), image
            unreadable.append((i % len(self.sources), str(image)))
        return number, None


def _tried(work: Callable[..., T], subject: Any, *rest: Any) -> T | Unreadable:
    """work(subject, ...), or the error of this or of an earlier stage."""
    if isinstance(subject, Unreadable):
        return subject
    try:
        return work(subject, *rest)
    except Unreadable as error:
        return error


def _grouped(items: Iterable[T], weight: Callable[[Any], int], most: int) -> Iterator[list[T]]:
    """Groups of GROUP items, or of fewer that weigh `most` together."""
    group, total = list[T](), 0
    for item in items:
        group.append(item)
        total += 0 if isinstance(item, Unreadable) else weight(item)
        if len(group) == GROUP or total >= most:
            yield group
            group, total = [], 0
    if group:
        yield group


class PixelBuffer:
    """Memory for the pixels of one batch, used again and again: fresh memory costs more time than filling it.

    A worker's buffer is shared with the training process, so that nothing is copied on the way.
    """

    def __init__(self) -> None:
        self.used = 0
        self._allocate(0)

    @property
    def filled(self) -> Tensor:
        return self.memory[: self.used]

    def take(self, size: int) -> np.ndarray:
        """(size,) uint8 after what was taken before; earlier parts may have moved."""
        start, self.used = self.used, self.used + size
        if self.used > len(self.view):
            old = self.view[:start]
            self._allocate(self.used * 3 // 2)
            self.view[:start] = old
        return self.view[start : self.used]

    def _allocate(self, size: int) -> None:
        if get_worker_info() is None:
            self.memory = torch.empty(size, dtype=torch.uint8)
        else:
            self.memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size, device="cpu"))
        self.view = self.memory.numpy()


# ---- processes and signals


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
    ImageFile.MAXBLOCK = PILLOW_BLOCK


def _end_with_parent(parent_id: int) -> None:
    """End this process once its parent is gone or sends SIGTERM, even while it waits for a disk or a full pipe."""
    parent = multiprocessing.parent_process()
    # The pipe to a parent is open in workers that were started later, too: its number is the faster way to know.
    while parent is not None and parent.is_alive() and os.getppid() == parent_id:
        received = signal.sigtimedwait([signal.SIGTERM], PARENT_CHECK)
        if received is not None and received.si_pid == parent.pid:
            break
    os._exit(0)
