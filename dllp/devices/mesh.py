"""The part of a run that one process owns, particles and a shard of every batch, and its collective operations.

A single process owns everything: nothing here then sends or copies, and functions return what they were given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dllp.errors import DataError, RankError

T = TypeVar("T")


class Axis:
    """One axis of the device mesh: a process group whose members hold parts of the same thing.

    Args:
        group: Of torch.distributed; None for a single process.
        index, size: This process's rank in the group, and the number of processes in it.

    Attributes:
        sent: Bytes sent by this process if collectives run as rings: 2 (size - 1) / size of the bytes of an
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
    """The particles and the shard of each batch that one process owns.

    Args:
        particles: Their number n.
        rows: Axis over which the particles are spread.
        shards: Axis over which each batch is spread.
        everyone: All processes of the run.

    Attributes:
        batch: Examples in a whole batch where each process reads its own shard only; None where each reads all.
    """

    def __init__(
        self, particles: int, rows: Axis | None = None, shards: Axis | None = None, everyone: Axis | None = None
    ) -> None:
        self.particles = particles
        self.rows, self.shards, self.everyone = rows or Axis(), shards or Axis(), everyone or Axis()
        self.batch: int | None = None
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

    def shard(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
        """A batch as it was read -> this process's shard, and its fraction of the whole batch."""
        if self.shards.size == 1:
            return x, y, 1.0
        if self.batch is not None:
            return x, y, len(x) / self.batch
        part = self.part(len(x))
        return x[part], y[part], len(x[part]) / len(x)


class Mirror:
    """A copy of all particles' rows and scores on each process, for the time when few coordinates still change.

    Coordinates that are fixed are sent once, when the mirror is made, and have the score 0.

    Args:
        axis: Axis over which the particles are spread.
        rows: (k, P) of this process.
        moving: (k, P), 0 where a coordinate is fixed.
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
