"""Any PyTorch DataLoader as a source of training batches."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SubsetRandomSampler

from dllp.data.arrays import as_targets, check_finite, check_labels, generator, is_integer
from dllp.errors import DataError


class LoaderBatches:
    """Batches of a DataLoader that yields (inputs, labels), moved to the device and checked.

    PyTorch's random numbers that the loader draws (shuffling, transforms, worker seeds) depend only on (seed, epoch)
    and leave the global generator alone; a generator that belongs to the loader or its sampler is seeded anew for
    every epoch. Transforms that draw from Python's or numpy's generators are not covered. Inputs become float32, with
    `integers` integers other than uint8 become int64; labels are converted as those of a pair. The last batch may be
    smaller unless the loader drops it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
        num_classes: int | None = None,
        integers: bool = False,
    ) -> None:
        try:
            self.steps = len(loader)
            self.num_examples = _count_examples(loader)
        except TypeError:
            raise DataError("the DataLoader has no length: use a map-style data set, or a pair of tensors") from None
        if self.steps == 0 or self.num_examples == 0:
            raise DataError("the DataLoader yields no batch: check its data set, batch_size and drop_last")
        self.loader, self.seed = loader, seed
        self.device = torch.device(device)
        self.channels_last = channels_last
        self.num_classes = num_classes
        self.integers = integers
        self.target_shape: tuple[int, ...] = ()  # of one target, as the last batch had it
        if loader.batch_sampler is None:  # the data set makes the batches itself, and its length counts those
            self.num_examples = self.steps * len(next(self.epoch(0))[0])

    @property
    def smallest(self) -> int | None:
        """Examples of the smallest batch; None where the loader does not say."""
        size, sampler = self.loader.batch_size, self.loader.sampler
        if size is None or self.loader.drop_last:
            return size
        return (len(sampler) if isinstance(sampler, Sized) else self.num_examples) % size or size

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) of every step from `start_step` on; earlier batches are drawn and thrown away."""
        key = generator(self.seed, 4, epoch)
        sampler: Any = self.loader.sampler
        for own in (self.loader.generator, getattr(sampler, "generator", None)):
            if own is not None:
                own.manual_seed(key.initial_seed())
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        state = key.get_state()
        batches: Iterator[Any] | None = None
        for step in range(self.steps):
            outside = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                batches = self._new_iterator() if batches is None else batches
                batch = next(batches, None)
            finally:
                state = torch.get_rng_state()
                torch.set_rng_state(outside)
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

    def _prepare(self, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        place = f"batch {step} of the DataLoader"
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(b, Tensor) for b in batch)):
            raise DataError(f"{place} is a {type(batch).__name__}, not a pair of tensors: yield (inputs, labels)")
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
            check_labels(y, self.num_classes, place)
        x = x.to(self.device, non_blocking=True)
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, y.to(self.device, non_blocking=True)


def _count_examples(loader: DataLoader[Any]) -> int:
    """Number of examples that the loader yields: of its data set, or of the subset that its sampler draws from."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, SubsetRandomSampler):
        return len({int(i) for i in sampler.indices})
    return len(loader.dataset)  # pyright: ignore[reportArgumentType]
