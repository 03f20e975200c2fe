"""Streamed splits, too large for memory: worker processes read whole batches, in an order fixed by the seed."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dllp.data import reader
from dllp.data.arrays import ArrayData, Augment, generator
from dllp.data.images import DRAWS, crop, resize_one
from dllp.data.reader import Decoded, Reader, Request
from dllp.data.sources import Sources
from dllp.data.unreadable import Unreadable, UnreadableImages
from dllp.errors import DataError

IN_MEMORY = 2**32  # bytes up to which decoded images are kept in memory
THREAD_CHUNK = 64  # images that a thread decodes before it takes the next ones


@dataclass(frozen=True)
class StreamedData:
    """One split whose images stay on disk.

    Args:
        sources: Places of the images.
        y: (N,) int64 classes.
        image_size: Side of the squares that the images become.
        unreadable: The unreadable images found so far.
        mean, std: Normalisation of each channel, in units of 0..1.
        augment: `resized-crop` (a random crop, mirrored half of the time) or `none` (the centre).
        workers: Worker processes that decode; 0 decodes in this process. Batches are the same for any number.
    """

    sources: Sources
    y: Tensor
    image_size: int
    unreadable: UnreadableImages
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.25, 0.25, 0.25)
    augment: Augment = "resized-crop"
    workers: int | None = None

    is_classification: ClassVar = True
    dtype: ClassVar = torch.uint8

    def __post_init__(self) -> None:
        if self.augment not in ("resized-crop", "none"):
            raise DataError(f"augment = {self.augment!r} is for images in memory: use resized-crop or none")

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return 3, self.image_size, self.image_size

    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """The examples at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return replace(self, sources=self.sources.subset(index.numpy()), y=self.y[index])

    def count_unreadable(self, images: Iterable[tuple[int, str]]) -> None:
        """Count unreadable images, given by index and reason."""
        self.unreadable.add((self.sources.name(number), reason) for number, reason in images)

    def decoded(self) -> ArrayData:
        """The centre of every readable image, decoded once; beyond :data:`IN_MEMORY` bytes in a temporary file."""
        size = self.image_size

        def decode(i: int) -> np.ndarray:
            return resize_one(crop(self.sources.read(i), None, size), False, size)

        x, read = decode_all(self.sources, (size, size), self.unreadable, decode)
        if not len(read):
            raise DataError("there are no images to decode: at least one is needed")
        return ArrayData(x, self.y[read], self.mean, self.std)


def decode_all(
    sources: Sources, size: tuple[int, int], unreadable: UnreadableImages, decode: Callable[[int], np.ndarray]
) -> tuple[Tensor, Tensor]:
    """Pixels (M, 3, H, W) and indices (M,) of all readable images; by threads, for Pillow releases the GIL.

    `decode` makes (3, H, W) uint8 of the image with an index, H and W the given `size`.
    """
    pixels, reasons = _allocate((len(sources), 3, *size)), dict[int, str]()

    def fill(i: int) -> None:
        try:
            pixels[i] = decode(i)
        except Unreadable as error:
            reasons[i] = str(error)

    with warnings.catch_warnings(action="ignore"), ThreadPool(reader.cores()) as pool:  # Pillow's about odd files
        list(pool.imap(fill, range(len(sources)), THREAD_CHUNK))
    unreadable.add((sources.name(i), reasons[i]) for i in sorted(reasons))
    read = [i for i in range(len(sources)) if i not in reasons]
    for place, i in enumerate(read):
        if place < i:  # in place: the array may be larger than the memory
            pixels[place] = pixels[i]
    return torch.from_numpy(pixels[: len(read)]), torch.tensor(read, dtype=torch.int64)


def _allocate(shape: tuple[int, ...]) -> np.ndarray:
    """An uint8 array in memory, or in an unnamed temporary file."""
    total = math.prod(shape)
    if total <= IN_MEMORY:
        return np.empty(shape, np.uint8)
    place = tempfile.gettempdir()
    if shutil.disk_usage(place).free < total:
        raise DataError(f"{place} has no room for {total} bytes of decoded images: set $TMPDIR to a larger disk")
    with tempfile.TemporaryFile(prefix="dllp-") as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)


def read_batches(data: StreamedData, requests: Iterator[Request], pin: bool = False) -> Iterator[Decoded]:
    """The batch of each request, as :class:`Reader` makes it, by worker processes; requests never end."""
    count = reader.cores() if data.workers is None else data.workers
    # More processes than cores are the user's choice: no warning.
    with warnings.catch_warnings(action="ignore"), reader.starting_workers():
        loader = DataLoader(
            Reader(data.sources, data.image_size), sampler=requests, batch_size=None,  # type: ignore
            num_workers=count, prefetch_factor=reader.PREFETCH if count else None,
            worker_init_fn=reader.init_worker, pin_memory=pin,
            generator=torch.Generator(),  # else it would draw from the run's own random numbers
        )  # fmt: skip
        batches = iter(loader)
    try:
        while True:
            reader.check_workers()
            yield next(batches)
    except (RuntimeError, ConnectionError, EOFError) as error:  # the latter where it dies while it hands a batch over
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        reason = (str(error).splitlines() or ["its pipe is closed"])[0].strip(" .")
        raise DataError(
            f"a process that decodes images has died ({reason}): give it more memory, shared memory too, or lower "
            "workers or batch_size"
        ) from None


class StreamBatches:
    """Training batches of one :class:`StreamedData`, all of one shape, on one device.

    Order and crops depend only on (seed, epoch, step), so the number of a step is all that a checkpoint must know about
    the data. An incomplete last batch is dropped.
    """

    def __init__(
        self, data: StreamedData, batch_size: int, seed: int, device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:  # fmt: skip
        if len(data) == 0:
            raise DataError("the training data is empty: at least one example is needed")
        self.data, self.seed, self.device = data, seed, torch.device(device)
        self.num_examples, self.batch_size = len(data), min(batch_size, len(data))
        self.steps = len(data) // self.batch_size
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self._shift, self._scale = (
            torch.tensor(values, device=self.device).view(1, 3, 1, 1)
            for values in ([255 * m for m in data.mean], [1 / (255 * s) for s in data.std])
        )
        self.share(slice(0, self.batch_size), lambda message: [message], first=True)

    def share(self, part: slice, exchange: Callable[[bytes], list[bytes]], first: bool) -> None:
        """Read only a part of every batch, where other processes read the others.

        The images of a batch, their random crops, and the handling of unreadable images do not depend on the parts.
        `exchange` gathers one message of each process, in the order of their parts, once a batch; the `first` process
        reports errors, the others raise them silently.
        """
        self.part, self._exchange, self._first = part, exchange, first
        self._live: Iterator[Decoded] | None = None
        self._place = (-1, 0)  # epoch and step of the next batch of `_live`

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) of every step from `start_step` on; inputs are normalised float32.

        The workers continue into the next epoch, which begins without waiting for them.
        """
        if self._live is None or self._place != (epoch, start_step):
            requests = batch_order(self.data, self.batch_size, self.seed, self.part, epoch, start_step)
            self._live = read_batches(self.data, requests, pin=self.device.type != "cpu")
        for step in range(start_step, self.steps):
            batch = next(self._live)
            self._count_unreadable(batch)
            self._place = (epoch, step + 1) if step + 1 < self.steps else (epoch + 1, 0)
            yield self._inputs(batch.pixels), self.data.y[batch.numbers].to(self.device, non_blocking=True)

    def _count_unreadable(self, batch: Decoded) -> None:
        """Count the unreadable images of all parts of the batch: every process gives up at the same step."""
        missing = self.part.stop - self.part.start - len(batch.numbers)
        message = json.dumps([missing, batch.unreadable]).encode() if batch.unreadable else b""
        parts = [json.loads(text) for text in self._exchange(message) if text]
        try:
            self.data.count_unreadable(image for _, images in parts for image in images)
            if any(missing for missing, _ in parts):
                root = self.data.sources.root
                raise DataError(f"{reader.TRIES} images in a row cannot be read: check the folder {root}")
        except DataError as error:
            error.reported_elsewhere = not self._first
            raise

    def _inputs(self, pixels: Tensor) -> Tensor:
        """Normalised float32 (B, 3, S, S) on the device, in the memory layout of the network."""
        if self.device.type != "cpu":
            x = pixels.to(self.device, non_blocking=True) - self._shift
            return x.mul_(self._scale).contiguous(memory_format=self.layout)
        # By numpy, image by image, in half of the time: its memory comes in huge pages, and PyTorch's threads would
        # wait for decoding cores.
        x = np.empty(pixels.shape, np.float32)
        for new, old in zip(x, pixels.numpy(), strict=True):
            new[:] = old
            new -= self._shift[0].numpy()
            new *= self._scale[0].numpy()
        return torch.from_numpy(x).contiguous(memory_format=self.layout)

    def first(self, count: int = 2) -> tuple[Tensor, Tensor]:
        """A small batch, decoded by this process."""
        few = StreamBatches(replace(self.data, workers=0), count, self.seed, self.device)
        return next(few.epoch(0))


def batch_order(
    data: StreamedData, size: int, seed: int, part: slice, epoch: int = 0, step: int = 0
) -> Iterator[Request]:
    """Requests for `part` of each batch of `size` images, from one step on, without end."""
    for number in itertools.count(epoch):
        order = torch.randperm(len(data), generator=generator(seed, 2, number)).numpy()
        for k in range(step, len(data) // size):
            draws = torch.rand(size, DRAWS, generator=generator(seed, 5, number, k)).numpy()
            crops = draws[part] if data.augment == "resized-crop" else None
            yield Request(order[k * size : (k + 1) * size][part], crops)
        step = 0
