"""Splits too large for memory: worker processes read the images of whole batches, in an order fixed by the seed."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from dllp.data import reader, workers
from dllp.data.arrays import ArrayData, Augment, generator
from dllp.data.bad import Tally
from dllp.data.images import DRAWS, quiet
from dllp.data.reader import Answer, Reader, Request
from dllp.data.resize import resize_all
from dllp.data.sources import Sources
from dllp.errors import DataError

IN_MEMORY = 2**32
"""Bytes up to which decoded images are kept in memory."""
CHUNK = 64
CACHED = 2**18
"""Numbers normalised at once on a CPU: they stay in its cache."""


@dataclass(frozen=True)
class StreamedData:
    """One split whose images stay on disk.

    Args:
        sources: Where each image lies.
        y: (N,) int64 classes.
        image_size: Side of the squares that the images become.
        tally: What could not be read so far.
        mean, std: Normalisation of each channel, in units of 0..1.
        augment: `resized-crop` (a random part of random shape, mirrored half of the time) or `none` (the middle).
        workers: Processes that decode; 0 decodes in this one. The batches are the same for any number.
    """

    sources: Sources
    y: Tensor
    image_size: int
    tally: Tally
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.25, 0.25, 0.25)
    augment: Augment = "resized-crop"
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.augment not in ("resized-crop", "none"):
            raise DataError(f"augment = {self.augment!r} is for images in memory: use resized-crop or none")
        workers.check(self.workers)

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def is_classification(self) -> bool:
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return 3, self.image_size, self.image_size

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs before they are normalised."""
        return torch.uint8

    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """The examples at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return replace(self, sources=self.sources.subset(index.numpy()), y=self.y[index])

    def count(self, bad: Iterable[tuple[int, str]]) -> None:
        """Add images that cannot be read, by number and with the reason, to the tally."""
        self.tally.add((self.sources.name(number), reason) for number, reason in bad)

    def decoded(self, device: torch.device | str = "cpu") -> ArrayData:
        """The middle of every image, decoded once and for all; images that cannot be read are left out.

        Beyond :data:`IN_MEMORY` bytes they lie in a temporary file, which the system reads as they are needed.
        """
        requests = [Request(np.arange(i, min(i + CHUNK, len(self)))) for i in range(0, len(self), CHUNK)]
        x, read, bad = _room((len(self), *self.shape)), [], list[tuple[int, str]]()
        filled = 0
        for pixels, answer in pictures(self, requests, device):
            bad += answer.bad
            x[filled : filled + len(pixels)] = pixels.cpu().numpy()
            filled += len(pixels)
            read.append(torch.from_numpy(answer.numbers))
        self.count(bad)
        if not filled:
            raise DataError("there are no images to decode: at least one is needed")
        return ArrayData(torch.from_numpy(x[:filled]), self.y[torch.cat(read)], self.mean, self.std)


def pictures(
    data: StreamedData, requests: Iterable[Request], device: torch.device | str
) -> Iterator[tuple[Tensor, Answer]]:
    """For each request uint8 images (B, 3, S, S) on the device, and the answer that they come from."""
    device = torch.device(device)
    finish = device.type == "cpu"
    for answer in read(data, requests, finish):
        pixels = answer.pixels
        if not finish:
            extent, mirror = torch.from_numpy(answer.extent), torch.from_numpy(answer.mirror)
            pixels = resize_all(pixels.to(device, non_blocking=True), extent, mirror, data.image_size)
        yield pixels, answer


def read(data: StreamedData, requests: Iterable[Request], finish: bool) -> Iterator[Answer]:
    """The answer to each request, as :class:`Reader` gives it."""
    count = workers.cores() if data.workers is None else data.workers
    if isinstance(requests, list):
        count = min(count, len(requests))
    with quiet(), workers.deaf():  # more processes than cores are the user's choice
        loader = DataLoader(
            Reader(data.sources, data.image_size, finish), sampler=requests, batch_size=None,  # type: ignore
            collate_fn=_as_is, num_workers=count, prefetch_factor=reader.AHEAD if count else None,
            worker_init_fn=workers.begin, pin_memory=not finish,
            generator=torch.Generator(),  # else it would draw from the run's own random numbers
        )  # fmt: skip
        batches = iter(loader)
    workers.watch.begin()
    try:
        while True:
            with workers.watch:
                answer = next(batches, None)
            if answer is None:
                return
            yield answer
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

    Order and parts of the images depend only on (seed, epoch, step), so the number of a step is all that a checkpoint
    must know about the data. What is left of a permutation after the last full batch is dropped.
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
        self.share(slice(0, self.batch_size), lambda said: [said], first=True)

    def share(self, part: slice, exchange: Callable[[bytes], list[bytes]], first: bool) -> None:
        """Read only a part of every batch, where other processes read the rest.

        Which images a batch has, what is drawn for each, and what happens where one cannot be read, does not depend
        on the parts.

        Args:
            part: Which examples of a batch.
            exchange: Tells all what each has to say, in the order of their parts; called once for every batch.
            first: Whether this process speaks for all.
        """
        self.part, self._exchange, self._first = part, exchange, first
        self._live: Iterator[tuple[Tensor, Answer]] | None = None
        self._place = (-1, 0)  # epoch and step that `_live` gives next

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) of every step from `start_step` on; inputs are normalised float32.

        The workers go on into the next epoch: it begins without waiting for them.
        """
        if self._live is None or self._place != (epoch, start_step):
            self._live = pictures(self.data, Order(self, epoch, start_step), self.device)
        for step in range(start_step, self.steps):
            pixels, answer = next(self._live)
            self._hear(answer)
            self._place = (epoch, step + 1) if step + 1 < self.steps else (epoch + 1, 0)
            labels = self.data.y[torch.from_numpy(answer.numbers)]
            yield self._normalised(pixels), labels.to(self.device, non_blocking=True)

    def _hear(self, answer: Answer) -> None:
        """Count what is bad in any part of the batch: all count the same, and give up at the same step."""
        missing = self.part.stop - self.part.start - len(answer.numbers)
        said = self._exchange(json.dumps([missing, answer.bad]).encode() if answer.bad else b"")
        parts = [json.loads(text) for text in said if text]
        try:
            self.data.count(found for _, bad in parts for found in bad)
            if any(missing for missing, _ in parts):
                root = self.data.sources.root
                raise DataError(f"{reader.TRIES} images in a row cannot be read: check the folder {root}")
        except DataError as error:
            error.told = not self._first
            raise

    def _normalised(self, pixels: Tensor) -> Tensor:
        """float32 of uint8, in the layout that the network wants."""
        if self.device.type != "cpu":
            return (pixels - self._shift).mul_(self._scale).contiguous(memory_format=self.layout)
        # On one core by numpy: what PyTorch spreads over cores waits for those that decode.
        last = self.layout is torch.channels_last
        x = np.empty(pixels.permute(0, 2, 3, 1).shape if last else pixels.shape, np.float32)
        x = x.transpose(0, 3, 1, 2) if last else x
        some = max(1, CACHED // x[0].size)
        for k in range(0, len(x), some):
            new = x[k : k + some]
            new[:] = pixels[k : k + some]
            new -= self._shift.numpy()
            new *= self._scale.numpy()
        return torch.from_numpy(x)

    def first(self, count: int = 2) -> tuple[Tensor, Tensor]:
        """A small batch, decoded here and now."""
        few = StreamBatches(replace(self.data, workers=0), count, self.seed, self.device)
        return next(few.epoch(0))


class Order(Sampler[Request]):
    """The requests of all epochs from one place on, without end: this process's part of each batch."""

    def __init__(self, batches: StreamBatches, epoch: int, step: int) -> None:
        self.count, self.size, self.steps, self.seed = (
            batches.num_examples, batches.batch_size, batches.steps, batches.seed
        )  # fmt: skip
        self.crops, self.part = batches.data.augment == "resized-crop", batches.part
        self.epoch, self.step = epoch, step

    def __iter__(self) -> Iterator[Request]:
        step = self.step
        for epoch in itertools.count(self.epoch):
            order = torch.randperm(self.count, generator=generator(self.seed, 2, epoch)).numpy()
            for k in range(step, self.steps):
                numbers = order[k * self.size : (k + 1) * self.size]
                draws = torch.rand(self.size, DRAWS, generator=generator(self.seed, 5, epoch, k)).numpy()
                yield Request(numbers[self.part], draws[self.part] if self.crops else None, True)
            step = 0


def _as_is(batch: Any) -> Any:
    return batch


def _room(shape: tuple[int, ...]) -> np.ndarray:
    """An array in memory, or in a temporary file that has no name any more."""
    total = math.prod(shape)
    if total <= IN_MEMORY:
        return np.empty(shape, np.uint8)
    place = tempfile.gettempdir()
    if shutil.disk_usage(place).free < total:
        raise DataError(f"{place} has no room for {total} bytes of decoded images: set $TMPDIR to a larger disk")
    with tempfile.TemporaryFile(prefix="dllp-") as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)
