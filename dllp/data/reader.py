"""What a worker process does: read, decode and cut the images of one batch, and hand them over in one piece.

It does each of these to several images before it goes on to the next: a core that changes its work for every small
image takes a quarter more time for the same work.

Where a GPU waits for the images it also resizes them, better than a core could. Otherwise that is done here as well:
the training process would need the cores that its workers use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from dllp.data.bad import Unreadable
from dllp.data.images import Part, boxes, quiet
from dllp.data.resize import resize_one
from dllp.data.sources import Sources

TRIES = 100
"""Images in a row that may be bad before training gives up."""
AHEAD = 2
"""Batches that each worker prepares in advance."""
TOGETHER, TOGETHER_BYTES, TOGETHER_PIXELS = 32, 2**22, 2**24
"""Images that go from one kind of work to the next together, and most bytes and pixels that they take meanwhile."""
T = TypeVar("T")
Wanted = tuple[int, list[float] | None]
"""An image by number, and one of :func:`boxes`."""


class Request(NamedTuple):
    """The images of one batch by number (B,), and random numbers (B, DRAWS) for parts of them in place of the middle.

    An image that cannot be read leaves its place empty, or with `fill` to the next one that can.
    """

    numbers: np.ndarray
    draws: np.ndarray | None = None
    fill: bool = False


class Answer(NamedTuple):
    """The images that a request asks for.

    Attributes:
        pixels: (B, 3, S, S) uint8; or, still to be resized and mirrored, all bytes of the first image, (h, w, 3),
            then those of the second, and so on. Overwritten once the next answer was taken.
        extent: (B, 2) h and w of each.
        mirror: (B,) whether each is to be mirrored.
        numbers: (B,) which images they are.
        bad: Numbers of images that cannot be read, and why.
    """

    pixels: Tensor
    extent: np.ndarray
    mirror: np.ndarray
    numbers: np.ndarray
    bad: list[tuple[int, str]]


class Reader(Dataset[Answer]):
    """Answers requests for images of `sources`, which are to become `image_size` pixels a side: here, if `finish`."""

    def __init__(self, sources: Sources, image_size: int, finish: bool) -> None:
        self.sources, self.image_size, self.finish = sources, image_size, finish
        # A request arrives when the first of the last AHEAD answers is taken: of the one before, no one needs anything.
        self.rooms, self.answers = [Room() for _ in range(AHEAD + 1)], 0

    def __getitem__(self, request: Request) -> Answer:
        room, bad = self.rooms[self.answers % len(self.rooms)], list[tuple[int, str]]()
        room.used, self.answers = 0, self.answers + 1
        count, draws = len(request.numbers), request.draws
        taken: list[list[float] | None] = [None] * count if draws is None else boxes(draws).tolist()
        wanted = list(zip(request.numbers.tolist(), taken, strict=True))
        turned = [False] * count if draws is None else (draws[:, -1] < 0.5).tolist()
        numbers, extent, mirror = list[int](), list[tuple[int, ...]](), list[bool]()
        with quiet():
            for (number, box), turn, image in zip(wanted, turned, self._images(wanted), strict=True):
                if isinstance(image, Unreadable):
                    bad.append((number, str(image)))
                    number, image = self._next(number, box, bad) if request.fill else (number, None)
                    if image is None:
                        continue
                numbers.append(number)
                extent.append(image.shape[:2])
                mirror.append(turn)
                self._place(image, turn, room)
        pixels = room.filled.view(-1, 3, self.image_size, self.image_size) if self.finish else room.filled
        arrays = np.array(extent, np.int64).reshape(-1, 2), np.array(mirror, bool), np.array(numbers, np.int64)
        return Answer(pixels, *arrays, bad)

    def _images(self, wanted: list[Wanted]) -> Iterator[np.ndarray | Unreadable]:
        """Each part, or why there is none, in their order; several at a time."""
        contents = (_tried(self.sources.read, number) for number, _ in wanted)
        places = iter(wanted)
        for some in _together(contents, len, TOGETHER_BYTES):
            opened = [_tried(Part, content, next(places)[1], self.image_size) for content in some]
            for few in _together(opened, attrgetter("area"), TOGETHER_PIXELS):
                decoded = [_tried(Part.decode, part) for part in few]
                yield from [_tried(Part.cut, part) for part in decoded]

    def _next(self, number: int, box: list[float] | None, bad: list[tuple[int, str]]) -> tuple[int, np.ndarray | None]:
        """The first image after a bad one that is not; None after too many."""
        for i in range(number + 1, number + TRIES):
            (image,) = self._images([(i % len(self.sources), box)])
            if not isinstance(image, Unreadable):
                return i % len(self.sources), image
            bad.append((i % len(self.sources), str(image)))
        return number, None

    def _place(self, image: np.ndarray, mirror: bool, room: Room) -> None:
        if self.finish:
            image = resize_one(image, mirror, self.image_size)
        room.take(image.size).reshape(image.shape)[:] = image


def _tried(work: Callable[..., T], subject: Any, *rest: Any) -> T | Unreadable:
    """work(subject, ...), or why that, or what came before it, is not possible."""
    if isinstance(subject, Unreadable):
        return subject
    try:
        return work(subject, *rest)
    except Unreadable as error:
        return error


def _together(items: Iterable[T], weight: Callable[[Any], int], most: int) -> Iterator[list[T]]:
    """Runs of items: TOGETHER of them, or as many as weigh `most`."""
    run, total = list[T](), 0
    for item in items:
        run.append(item)
        total += 0 if isinstance(item, Unreadable) else weight(item)
        if len(run) == TOGETHER or total >= most:
            yield run
            run, total = [], 0
    if run:
        yield run


class Room:
    """Memory for the pixels of one answer, used again and again: fresh memory costs more time than filling it.

    In a worker the training process sees it too, so that nothing is copied on the way.
    """

    def __init__(self) -> None:
        self.used = 0
        self._make(0)

    @property
    def filled(self) -> Tensor:
        return self.memory[: self.used]

    def take(self, size: int) -> np.ndarray:
        """(size,) uint8 after what was taken before; earlier parts may have moved."""
        start, self.used = self.used, self.used + size
        if self.used > len(self.view):
            old = self.view[:start]
            self._make(self.used * 3 // 2)
            self.view[:start] = old
        return self.view[start : self.used]

    def _make(self, size: int) -> None:
        if get_worker_info() is None:
            self.memory = torch.empty(size, dtype=torch.uint8)
        else:
            self.memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size, device="cpu"))
        self.view = self.memory.numpy()
