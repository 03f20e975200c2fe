"""Any PyTorch DataLoader, data set, list or stream of batches as a source of training batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from dllp.data.arrays import as_targets, check_finite, check_labels, generator, is_integer
from dllp.devices import trees
from dllp.errors import DataError


class LoaderBatches:
    """Batches of a DataLoader, moved to the device; (inputs, labels) are checked and converted, too.

    Batches of another structure, and with `as_is` all of them, are yielded as (batch, None).

    PyTorch's random numbers that the loader draws (shuffling, transforms, worker seeds) depend only on (seed, epoch)
    and leave the global generator alone; a generator that belongs to the loader or its sampler is seeded anew for
    every epoch. Transforms that draw from Python's or numpy's generators are not covered. Inputs become float32, with
    `integers` integers other than uint8 become int64; labels are converted as those of a pair. The last batch may be
    smaller unless the loader drops it.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, device: torch.device | str = "cpu", channels_last: bool = False,
        num_classes: int | None = None, integers: bool = False, as_is: bool = False,
    ) -> None:  # fmt: skip
        try:
            self.steps = len(loader)
            self.num_examples = _count_examples(loader)
        except TypeError:
            raise DataError("the DataLoader has no length: give steps=, the batches of one epoch") from None
        if self.steps == 0 or self.num_examples == 0:
            raise DataError("the DataLoader yields no batch: check its data set, batch_size and drop_last")
        self.loader, self.seed, self.device = loader, seed, torch.device(device)
        self.channels_last, self.num_classes = channels_last, num_classes
        self.integers, self.as_is = integers, as_is
        self.target_shape: tuple[int, ...] = ()  # of one target, as the last batch had it
        if loader.batch_sampler is None:  # the data set makes the batches itself, and its length counts those
            self.num_examples = self.steps * trees.count(next(self.epoch(0))[0])

    @property
    def smallest(self) -> int | None:
        """Examples of the smallest batch; None where the loader does not say."""
        size, sampler = self.loader.batch_size, self.loader.sampler
        if size is None or self.loader.drop_last:
            return size
        return (len(sampler) if isinstance(sampler, Sized) else self.num_examples) % size or size

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Any, Tensor | None]]:
        """(inputs, labels) of every step from `start_step` on; earlier batches are drawn and thrown away."""
        key = generator(self.seed, 4, epoch)
        sampler: Any = self.loader.sampler
        for own in (self.loader.generator, getattr(sampler, "generator", None)):
            if own is not None:
                own.manual_seed(key.initial_seed())
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        batches: Iterator[Any] | None = None
        for step in range(self.steps):
            with _drawing_from(key):
                batches = self._new_iterator() if batches is None else batches
                batch = next(batches, None)
            if batch is None:
                raise DataError(f"the DataLoader ended at batch {step} of {self.steps}: its length is wrong")
            if step >= start_step:
                yield self._prepare(batch, step)

    def _new_iterator(self) -> Iterator[Any]:
        """An iterator with new workers: persistent ones would not be seeded anew."""
        kept, self.loader._iterator = self.loader._iterator, None
        try:
            return iter(self.loader)
        finally:
            self.loader._iterator = kept

    def _prepare(self, batch: Any, step: int) -> tuple[Any, Tensor | None]:
        place = f"batch {step} of the DataLoader"
        pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)
        if self.as_is or not pair:
            return trees.moved(batch, self.device), None
        x, y = batch
        if not x.ndim or not y.ndim:
            raise DataError(f"{place} is a single example, not a batch: give the DataLoader a batch_size")
        if len(x) != len(y):
            raise DataError(f"{len(x)} inputs but {len(y)} labels in {place}: give one label for each input")
        if x.dtype == torch.uint8:
            x = x / 255
        x = x.long() if self.integers and is_integer(x) else x.float()
        check_finite(x, f"inputs of {place}")
        self.target_shape = tuple(y.shape[1:])
        y = as_targets(y)
        if y.is_floating_point():
            check_finite(y, f"targets of {place}")
        else:
            check_labels(y, self.num_classes, place, positions=True)
        x = x.to(self.device, non_blocking=True)
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, y.to(self.device, non_blocking=True)


class StreamedBatches:
    """Batches of any structure from a list, or from whatever yields them, `steps` of them in an epoch.

    A stream goes on where the last epoch ended, and begins anew at its end. PyTorch's random numbers that it draws
    depend on `seed` alone, and leave the global generator as it was.
    """

    smallest = None

    def __init__(self, batches: Iterable[Any], steps: int | None, seed: int, device: torch.device) -> None:
        if steps is None and not isinstance(batches, Sized):
            raise DataError(
                f"data of type {type(batches).__name__} has no length: give steps=, the batches of one epoch"
            )
        self.steps = len(batches) if steps is None else steps  # pyright: ignore[reportArgumentType]
        if not self.steps:
            raise DataError("there is no batch: give a list with at least one")
        self.batches, self.seed, self.device = batches, seed, device
        self.integers = True
        self._begin()
        self.num_examples = self.steps * trees.count(next(self.epoch(0))[0])
        if not self.num_examples:
            raise DataError("the first batch holds no tensor of examples: give (inputs, labels), or a dict of tensors")

    def _begin(self) -> None:
        self._generator = generator(self.seed, 5)
        self._iterator: Iterator[Any] | None = None
        self._taken = 0

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Any, None]]:
        """(batch, None) of every step from `start_step` on."""
        first = epoch * self.steps + start_step
        if first < self._taken:
            self._begin()
        while self._taken < first:
            self._next()
        for _ in range(start_step, self.steps):
            yield trees.moved(self._next(), self.device), None

    def _next(self) -> Any:
        with _drawing_from(self._generator):
            for fresh in (False, True):
                if self._iterator is None or fresh:
                    self._iterator = iter(self.batches)
                for batch in self._iterator:
                    self._taken += 1
                    return batch
        raise DataError("the data yields no batch: check that it can be iterated again")


class Rows(Dataset[Any]):
    """A data set in memory: a structure of tensors with one entry for each example."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = trees.plain(tensors)
        lengths = {len(tensor) for tensor in trees.tensors(self.tensors) if tensor.dim()}
        if len(lengths) != 1:
            raise DataError(f"tensors of {sorted(lengths)} examples: give one entry of each for each example")
        self.length = lengths.pop()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return trees.apply(self.tensors, lambda tensor: tensor[index])


@dataclass(frozen=True)
class LabelledBatches:
    """Batches of several inputs, or of any structure, and the labels of all of them: data to evaluate on."""

    batches: list[Any]
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def is_classification(self) -> bool:
        return not self.y.is_floating_point()

    def parts(self) -> Iterator[Any]:
        """The inputs of each batch."""
        yield from self.batches


@contextmanager
def _drawing_from(generator: torch.Generator) -> Iterator[None]:
    """PyTorch's CPU random numbers come from `generator` inside; the global generator is left as it was."""
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())


def _count_examples(loader: DataLoader[Any]) -> int:
    """Number of examples that the loader yields: of its data set, or of the subset that its sampler draws from."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, SubsetRandomSampler):
        return len({int(i) for i in sampler.indices})
    return len(loader.dataset)  # pyright: ignore[reportArgumentType]
