"""Splits in memory: checks, stratified hold-out, and training batches made on the device without worker processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from dllp.data import images
from dllp.errors import DataError
from dllp.method.likelihood import IGNORED

if TYPE_CHECKING:
    from dllp.data.stream import StreamedData

Augment = Literal["none", "crop-flip", "resized-crop"]
Split = TypeVar("Split", bound="ArrayData | StreamedData")
CHUNK_ELEMENTS = 2**25  # augmentation works on as many batches at once as stay below this, to save kernel launches
CHECKED_ELEMENTS = 2**22  # elements checked for NaN at once: PyTorch's own check takes as much memory again
PART = 4096  # most examples of a chunk of :meth:`ArrayData.parts`
MAX_CLASSES = 2**16  # most classes that a file may ask for: they are counted up to the largest label


@dataclass(frozen=True)
class ArrayData:
    """One split in memory.

    Args:
        x: (N, C, H, W) images or (N, F) tables; uint8 or float32.
        y: (N,) int64 classes, or (N, K) float32 targets of a regression.
        mean, std: Normalisation for each channel (or column), in units of 0..1 for uint8 and of the data for floats.
        augment: Augmentation of training images by :class:`Batches`; evaluation never augments.
        target_shape: Shape of one target of a regression as it was given; `y` holds it flattened.
    """

    x: Tensor
    y: Tensor
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augment: Augment = "none"
    target_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} inputs but {len(self.y)} labels: give one label for each input")
        if (self.mean is None) != (self.std is None):
            raise DataError("mean and std belong together: give both or neither")
        if self.augment not in get_args(Augment):
            raise DataError(f"augment = {self.augment!r} is unknown: choose {', '.join(get_args(Augment))}")
        if self.augment != "none" and (self.x.ndim != 4 or min(self.x.shape[2:]) <= images.PADDING):
            raise DataError(
                f"augment = {self.augment} needs images larger than {images.PADDING} pixels, not inputs of shape "
                f"{tuple(self.x.shape[1:])}: use augment = none"
            )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def is_classification(self) -> bool:
        return not self.y.is_floating_point()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Type of inputs before they are normalised."""
        return self.x.dtype

    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """The examples at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return replace(self, x=self.x[index.to(self.x.device)], y=self.y[index.to(self.y.device)])

    def to(self, device: torch.device | str) -> ArrayData:
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def inputs(self, index: Tensor | slice) -> Tensor:
        """float32 (x - mean) / std without augmentation, as evaluation wants them; uint8 counts as 0..1.

        Integers of an embedding stay what they are.
        """
        if is_integer(self.x):
            return self.x[index]
        shift, scale = self.affine(self.x.device)
        return (self.x[index] - shift).mul_(scale)

    def parts(self) -> Iterator[Tensor]:
        """Normalised inputs of all examples in chunks, so that a large split never lies in memory as floats."""
        size = max(1, min(PART, CHUNK_ELEMENTS // math.prod(self.shape)))
        for start in range(0, len(self), size):
            yield self.inputs(slice(start, start + size))

    def affine(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Shift and scale of :meth:`inputs`, shaped to broadcast over a batch."""
        unit = 255.0 if self.x.dtype == torch.uint8 else 1.0
        shape = (1, -1) + (1,) * (self.x.ndim - 2)
        shift = torch.tensor(self.mean or (0.0,), dtype=torch.float32) * unit
        scale = 1 / (torch.tensor(self.std or (1.0,), dtype=torch.float32) * unit)
        return shift.view(shape).to(device), scale.view(shape).to(device)


class Batches:
    """Training batches of one :class:`ArrayData`, all of one shape, on one device.

    Order and augmentation depend only on (seed, epoch), so a run can resume at any step of any epoch. An incomplete
    last batch is dropped; `batch_size` is capped at the number of examples. With `integers` int64 inputs stay what
    they are, for networks with embeddings.
    """

    def __init__(
        self, data: ArrayData, batch_size: int, seed: int, device: torch.device | str = "cpu",
        channels_last: bool = False, integers: bool = False,
    ) -> None:  # fmt: skip
        self.data, self.seed, self.device = data.to(device), seed, torch.device(device)
        self.num_examples = len(data)
        self.batch_size = min(batch_size, len(data))
        self.steps = len(data) // self.batch_size
        self.channels_last = channels_last and data.x.ndim == 4
        self.integers = integers and is_integer(data.x)
        # Kept on the device: making them anew for every batch would copy from the host each time.
        self._shift, self._scale = self.data.affine(self.device)
        self._phase = torch.randint(2, (len(data),), generator=generator(seed, 1))

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) of every step from `start_step` on; inputs are normalised float32, or the integers."""
        rng = generator(self.seed, 2, epoch)
        order = torch.randperm(self.num_examples, generator=rng)
        if self.data.augment == "resized-crop":
            place = images.random_boxes(self.num_examples, rng, *self.data.shape[1:]).to(self.device)
        else:
            place = torch.randint(-images.PADDING, images.PADDING + 1, (self.num_examples, 2), generator=rng)
            place = place.to(self.device)
        flip = ((self._phase + epoch) % 2 == 1)[order].to(self.device)  # every image in every other epoch
        order = order.to(self.device)
        size = self.batch_size
        stride = max(1, CHUNK_ELEMENTS // (size * self.data.x[0].numel())) * size
        for start in range(start_step * size, self.steps * size, stride):
            part = slice(start, min(start + stride, self.steps * size))
            x = self._gather(order[part], place[part], flip[part])
            y = self.data.y[order[part]]
            for a, b in zip(x.split(size), y.split(size), strict=True):
                yield a if self.integers else (a - self._shift).mul_(self._scale), b

    def _gather(self, index: Tensor, place: Tensor, flip: Tensor) -> Tensor:
        x, augment = self.data.x, self.data.augment
        if augment == "none":
            x = x[index]
        else:
            x = (images.crop_flip if augment == "crop-flip" else images.resized_crop)(x, index, place, flip)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x


def is_integer(x: Tensor) -> bool:
    """True for inputs that may be indices of an embedding; uint8 is an image."""
    return x.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def generator(*key: int) -> torch.Generator:
    """A CPU generator seeded by a tuple of integers: the same numbers whatever device uses them."""
    state = np.random.SeedSequence([k % 2**64 for k in key]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state))


def channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images (N, C, H, W), in units of 0..1."""
    counts = torch.stack([torch.bincount(x[:, c].flatten(), minlength=256) for c in range(x.shape[1])]).double()
    frequency = counts / counts.sum(1, keepdim=True)
    value = torch.arange(256, dtype=torch.float64) / 255
    mean = frequency @ value
    std = (frequency @ value**2 - mean**2).clamp_min(0).sqrt()
    return tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist())


def default_augment(x: Tensor) -> Augment:
    """Crop and flip colour images; grey ones may be writing, which a mirror makes wrong."""
    return "crop-flip" if x.shape[1] == 3 and min(x.shape[2:]) > images.PADDING else "none"


def holdout(data: Split, size: float | int, seed: int = 0) -> tuple[Split, Split]:
    """(training, validation without augmentation): `size` examples or that fraction, each class in proportion."""
    held = torch.zeros(len(data), dtype=torch.bool)
    held[stratified(data.y.cpu(), held_count(len(data), size), seed)] = True
    everything = torch.arange(len(data))
    return data.subset(everything[~held]), replace(data.subset(everything[held]), augment="none")


def held_count(examples: int, size: float | int) -> int:
    """Examples to hold out: `size` of them or that fraction, and at least one on either side."""
    count = (round(size * examples) if 0 < size < 1 else 0) if isinstance(size, float) else size
    if not 0 < count < examples:
        raise DataError(
            f"a validation split of {size} leaves nothing on one side of {examples} examples: "
            "give a fraction in (0, 1) or a smaller number"
        )
    return count


def stratified(y: Tensor, count: int, seed: int) -> Tensor:
    """Indices of `count` random examples, each class in proportion (largest remainders).

    Examples of float targets, or of many labels, are of no one class: any of them.
    """
    order = torch.randperm(len(y), generator=generator(seed, 3))
    if y.is_floating_point() or y.ndim > 1:
        return order[:count]
    quota = torch.bincount(y) * (count / len(y))
    take = quota.floor().long()
    largest = torch.argsort(quota - take, descending=True, stable=True)
    take[largest[: count - int(take.sum())]] += 1
    labels = y[order]
    return torch.cat([order[labels == c][: int(n)] for c, n in enumerate(take)])


def from_pair(
    x: Any, y: Any, *, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None,
    augment: Augment = "none", integers: bool = False,
) -> ArrayData:  # fmt: skip
    """Data from two tensors or arrays.

    Inputs are (N, C, H, W) or (N, F) and stay uint8 or become float32; with `integers` other integers become int64.
    Labels are converted by :func:`as_targets`. Nothing is validated: a test set may have one class.
    """
    x, given = _tensor(x, "inputs"), _tensor(y, "labels")
    y = as_targets(given)
    if x.ndim < 2:
        raise DataError(f"inputs of shape {tuple(x.shape)}: give (examples, features) or (examples, channels, ...)")
    if x.dtype != torch.uint8:
        x = x.long() if integers and is_integer(x) else x.float()
    return ArrayData(x, y, mean, std, augment, tuple(given.shape[1:]) if given.is_floating_point() else ())


def as_targets(y: Tensor) -> Tensor:
    """Integers or booleans (N,) or (N, 1) -> int64 classes (N,); real numbers (N, ...) -> float32 targets (N, K)."""
    if y.is_floating_point():
        return y.float().reshape(len(y), -1) if len(y) else y.float()
    return y.squeeze(1).long() if y.ndim == 2 else y.long()


def validate(data: ArrayData, num_classes: int | None = None, place: str = "the data") -> None:
    """Raise a DataError for data that cannot be trained on; `num_classes` is the width of the network's output."""
    if len(data) == 0:
        raise DataError(f"{place} is empty: at least one example is needed")
    check_finite(data.x, f"inputs of {place}")
    if not data.is_classification:
        check_finite(data.y, f"targets of {place}")
        return
    if data.y.ndim == 1 and bool((data.y == data.y[0]).all()):
        raise DataError(f"{place} holds one class only ({int(data.y[0])}): at least two are needed")
    check_labels(data.y, num_classes, place, positions=True)


def check_labels(
    y: Tensor, num_classes: int | None = None, place: str = "the data", *, positions: bool = False
) -> None:
    """Raise unless `y` (N,) holds int64 in [0, num_classes); with `positions` also (N, ...), where -100 is no label."""
    if y.dtype != torch.int64:
        raise DataError(f"labels of {place} are {y.dtype}: int64 classes are needed (labels.long())")
    several = positions and y.ndim > 1
    if several:
        y = y[y != IGNORED]
        if not len(y):
            return
    if y.ndim != 1:
        raise DataError(f"labels of {place} have shape {tuple(y.shape)}: give one integer class for each example")
    low, high = (int(v) for v in y.aminmax())
    if low < 0:
        raise DataError(f"label {low} in {place} is negative: classes count from 0")
    if num_classes == 1:
        raise DataError(f"the network has one output for the classes of {place}: it needs one for each, two at least")
    if num_classes is not None and high >= num_classes:
        other = f", and {IGNORED} where none counts" if several else ""
        given = f"label {high} in {place} is out of range for {num_classes} classes"
        raise DataError(f"{given}: use 0..{num_classes - 1}{other}")


def check_finite(x: Tensor, place: str) -> None:
    """Raise where a floating-point tensor holds NaN or infinity, naming the first such example."""
    if not x.is_floating_point() or not x.numel():
        return
    rows = max(1, CHECKED_ELEMENTS // x[0].numel())
    if not all(bool(torch.isfinite(part).all()) for part in x.split(rows)):
        bad = int((~torch.isfinite(x.reshape(len(x), -1))).any(1).nonzero()[0])
        raise DataError(f"NaN or infinity in the {place}, first in example {bad}: clean the data before training")


def _tensor(value: Any, what: str) -> Tensor:
    try:
        if not isinstance(value, Tensor):
            array = np.ascontiguousarray(value)
            value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))  # PyTorch knows no other
    except (TypeError, ValueError):
        raise DataError(f"{what} of type {type(value).__name__} are no numbers: give a tensor or an array") from None
    return value.detach()
