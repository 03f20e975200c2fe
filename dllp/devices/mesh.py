"""The part of a run that one process owns, particles and a shard of every batch, and its collective operations.

A single process owns everything: nothing here then sends or copies, and functions return what they were given.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dllp.devices import trees
from dllp.errors import DataError, RankError

T = TypeVar("T")


class Axis:
    """One axis of the device mesh: a process group whose `size` members hold parts of the same thing.

    `sent` counts bytes sent by this process if collectives run as rings: 2 (size - 1) / size of the bytes of an
    all-reduce, size - 1 times the own part of an all-gather. Objects and `nn.SyncBatchNorm` are not counted.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, index: int = 0, size: int = 1) -> None:
        self.group, self.index, self.size, self.sent = group, index, size, 0.0

    def all_reduce_(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Replace contiguous values by their sum over all processes, or what `op` makes of them."""
        if self.size > 1:
            with connected():
                dist.all_reduce(values, op, group=self.group)
            self.sent += 2 * (self.size - 1) / self.size * values.nbytes
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """(k, ...) -> (size * k, ...), the parts of all processes in their order."""
        if self.size == 1:
            return values
        whole = values.new_empty((self.size * len(values), *values.shape[1:]))
        with connected():
            dist.all_gather(list(whole.chunk(self.size)), values.contiguous(), group=self.group)
        self.sent += (self.size - 1) * values.nbytes
        return whole

    def maximum(self, *values: int) -> list[int]:
        """The largest of each value over all processes."""
        return list(values) if self.size == 1 else self.all_reduce_(torch.tensor(values), dist.ReduceOp.MAX).tolist()

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all processes in their order."""
        found = [value] * self.size
        if self.size > 1:
            with connected():
                dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast_object(self, value: T) -> T:
        """The value of the first process; those of the others are ignored."""
        found = [value]
        if self.size > 1:
            with connected():
                dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]


class Place:
    """The particles (of n) and the shard of each batch that one process owns.

    `rows` is the axis over which the particles are spread, `shards` the one of each batch, `everyone` all processes.
    """

    def __init__(
        self, particles: int, rows: Axis | None = None, shards: Axis | None = None, everyone: Axis | None = None
    ) -> None:
        self.particles = particles
        self.rows, self.shards, self.everyone = rows or Axis(), shards or Axis(), everyone or Axis()
        self.batch: int | None = None  # examples in a whole batch where each process reads its own shard only
        each = particles // self.rows.size
        self.own = range(self.rows.index * each, (self.rows.index + 1) * each)

    @property
    def alone(self) -> bool:
        return self.everyone.size == 1

    @property
    def first(self) -> bool:
        """True if this is rank 0, which reports for all."""
        return self.everyone.index == 0

    @property
    def sent(self) -> float:
        """Bytes sent by this process on all axes."""
        return self.rows.sent + self.shards.sent + self.everyone.sent

    def take(self, values: Tensor, axis: int = 0) -> Tensor:
        """(n, ...) of all particles -> those that this process owns."""
        return values if self.rows.size == 1 else values.narrow(axis, self.own.start, len(self.own))

    def part(self, count: int) -> slice:
        """This process's shard of a batch of `count` examples."""
        index, size = self.shards.index, self.shards.size
        if count < size:
            error = DataError(f"a batch of {count} for {size} processes: use larger batches, and drop_last=True")
            error.reported_elsewhere = not self.first
            raise error
        return slice(count * index // size, count * (index + 1) // size)

    def shard(self, x: Any, y: Any) -> tuple[Any, Any, float]:
        """A batch as it was read -> this process's shard, and its fraction of the whole batch."""
        if self.shards.size == 1:
            return x, y, 1.0
        if self.batch is not None:
            return x, y, len(x) / self.batch
        size = trees.count(x)
        part = self.part(size)
        return trees.part(x, part), trees.part(y, part), (part.stop - part.start) / size


class Mirror:
    """A copy of all particles' rows and scores on each process, for the time when few coordinates still change.

    Given are rows (k, P) of this process, and where they move (k, P). Coordinates that are fixed, where that is 0, are
    sent once, when the mirror is made, and have the score 0.
    """

    def __init__(self, axis: Axis, rows: Tensor, moving: Tensor) -> None:
        self.axis, self.own = axis, [row.nonzero()[:, 0] for row in moving]
        self.rows, self.scores = axis.all_gather(rows), torch.zeros_like(rows).repeat(axis.size, 1)
        self.coordinates = [row.nonzero()[:, 0] for row in axis.all_gather(moving.to(torch.uint8))]
        self.width = max(len(index) for index in self.coordinates)

    def __call__(self, rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(k, P), (k, P) of this process -> (n, P), (n, P) of all; the next call overwrites them."""
        sent = rows.new_zeros(len(rows), 2, self.width)
        for part, row, score, index in zip(sent, rows, scores, self.own, strict=True):
            part[0, : len(index)], part[1, : len(index)] = row[index], score[index]
        for k, (part, index) in enumerate(zip(self.axis.all_gather(sent), self.coordinates, strict=True)):
            self.rows[k, index], self.scores[k, index] = part[:, : len(index)]
        return self.rows, self.scores


def merged(parts: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Tensors of one dtype -> their sums over all processes, by one all-reduce."""
    flat = axis.all_reduce_(torch.cat([part.reshape(-1) for part in parts]))
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@contextmanager
def connected() -> Iterator[None]:
    """Turn the error of a broken connection into a RankError of one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". ")[0].splitlines()[0]
        raise RankError(f"another process of the run was lost, or cannot be reached ({reason})") from None


class _Sum(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce_(values.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.axis.all_reduce_(gradient.contiguous().clone()), None


class CudaSyncBatchNorm(nn.SyncBatchNorm):
    """PyTorch's own, which asks the axis for its group: the axis drops it when the run ends."""

    axis: Axis

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.axis.group


class CpuSyncBatchNorm(_BatchNorm):
    """The same sums over gloo for the CPU, where `nn.SyncBatchNorm` refuses to work."""

    axis: Axis

    def _check_input_dim(self, input: Tensor) -> None: ...

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))  # sums of bfloat16 lose too much
        dims, shape = [d for d in range(input.dim()) if d != 1], (1, -1) + (1,) * (input.dim() - 2)
        count = wide.new_full((1,), input.numel() / input.shape[1])
        total, count = _Sum.apply(torch.cat([wide.sum(dims), count]), self.axis).split([input.shape[1], 1])
        mean = total / count
        centred = wide - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(dims), self.axis) / count
        self._track(mean.detach(), (variance * count / (count - 1)).detach())
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        normed = centred * scale.view(shape)
        return (normed if self.bias is None else normed + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.add_(rate * (mean - self.running_mean))
        self.running_var.add_(rate * (variance - self.running_var))


def synchronise(network: nn.Module, axis: Axis) -> nn.Module:
    """The network with batch norms over all shards of a batch: same names, parameters and buffers (not copies)."""
    held = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, held)
    kind = CudaSyncBatchNorm if next(network.parameters()).is_cuda else CpuSyncBatchNorm
    for module in twin.modules():
        if isinstance(module, _BatchNorm):  # whose attributes are all that both classes need besides the axis
            module.__class__, module.axis = kind, axis  # pyright: ignore[reportArgumentType]
    return twin
