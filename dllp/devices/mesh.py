"""What one process of a run owns: rows of the particles and a shard of every batch, and what it hears from the others.

A process that is alone owns everything; then nothing here sends or copies, and functions return what they were given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dllp.errors import DataError, RankError


class Axis:
    """Processes in a line that hold parts of the same thing.

    Args:
        group: Of torch.distributed; None for a process alone.
        index, size: This process's place in the line, and its length.

    Attributes:
        sent: Bytes that this process has sent, rings assumed: 2 (size - 1) / size of what is added up, and size - 1
            times its own part of what is joined.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, index: int = 0, size: int = 1) -> None:
        self.group, self.index, self.size, self.sent = group, index, size, 0.0

    def add_(self, values: Tensor) -> Tensor:
        """Replace contiguous values by their sum over all processes."""
        if self.size > 1:
            with connected():
                dist.all_reduce(values, group=self.group)
            self.sent += 2 * (self.size - 1) / self.size * values.nbytes
        return values

    def join(self, values: Tensor) -> Tensor:
        """(k, ...) -> (size * k, ...): the parts of all processes in their order."""
        if self.size == 1:
            return values
        whole = values.new_empty((self.size * len(values), *values.shape[1:]))
        with connected():
            dist.all_gather(list(whole.chunk(self.size)), values.contiguous(), group=self.group)
        self.sent += (self.size - 1) * values.nbytes
        return whole

    def most(self, *values: int) -> list[int]:
        """The largest of each value over all processes; between hosts, never waiting for a device."""
        if self.size == 1:
            return list(values)
        found = torch.tensor(values)
        with connected():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        self.sent += 2 * (self.size - 1) / self.size * found.nbytes
        return [int(value) for value in found]

    def payloads(self, content: bytes) -> list[bytes]:
        """What every process has to say."""
        if self.size == 1:
            return [content]
        (longest,) = self.most(len(content))
        if not longest:
            return [b""] * self.size
        padded = torch.zeros(1, 8 + longest, dtype=torch.uint8)
        padded[0, : 8 + len(content)] = _as_tensor(len(content).to_bytes(8, "little") + content)
        said = [row.numpy().tobytes() for row in self.join(padded)]
        return [part[8 : 8 + int.from_bytes(part[:8], "little")] for part in said]

    def texts(self, text: str) -> list[str]:
        """What every process has to say, in words."""
        return [part.decode() for part in self.payloads(text.encode())]

    def hear(self, content: bytes) -> bytes:
        """What the first process says; the others' `content` is ignored."""
        if self.size == 1:
            return content
        (length,) = self.most(0 if self.index else len(content))
        said = torch.zeros(length, dtype=torch.uint8) if self.index else _as_tensor(content)
        with connected():
            dist.broadcast(said, group=self.group, group_src=0)
        return said.numpy().tobytes()


class Place:
    """What a process owns of n particles and their batches.

    Args:
        particles: n.
        rows: The processes over which the particles are spread.
        shards: Those over which each batch is spread.
        everyone: Both together.

    Attributes:
        batch: Examples of a whole batch, where only this process's part of it is read; None where all of it is.
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
        """Whether this process speaks for all."""
        return self.everyone.index == 0

    @property
    def sent(self) -> float:
        """Bytes that this process has sent."""
        return self.rows.sent + self.shards.sent + self.everyone.sent

    def take(self, values: Tensor, axis: int = 0) -> Tensor:
        """(n, ...) of all particles -> those that this process owns."""
        return values if self.rows.size == 1 else values.narrow(axis, self.own.start, len(self.own))

    def part(self, count: int) -> slice:
        """Which of a batch's examples are this process's."""
        index, size = self.shards.index, self.shards.size
        if count < size:
            error = DataError(f"a batch of {count} for {size} processes: use larger batches, and drop_last=True")
            error.told = not self.first
            raise error
        return slice(count * index // size, count * (index + 1) // size)

    def shard(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
        """A batch as it was read -> this process's part of it, and how much of the whole that is."""
        if self.shards.size == 1:
            return x, y, 1.0
        if self.batch is not None:
            return x, y, len(x) / self.batch
        part = self.part(len(x))
        return x[part], y[part], len(x[part]) / len(x)


class Mirror:
    """Rows and scores of all particles as one process sees them, once most coordinates stand still.

    What stands still is sent when the mirror is made and never again, and has no score.

    Args:
        axis: The processes over which the particles are spread.
        rows: (k, P) those of this process.
        moving: (k, P), 0 where a coordinate stands still.
    """

    def __init__(self, axis: Axis, rows: Tensor, moving: Tensor) -> None:
        self.axis, self.own = axis, [row.nonzero()[:, 0] for row in moving]
        self.rows, self.scores = axis.join(rows), torch.zeros_like(rows).repeat(axis.size, 1)
        self.coordinates = [row.nonzero()[:, 0] for row in axis.join(moving.to(torch.uint8))]
        self.width = max(len(index) for index in self.coordinates)

    def __call__(self, rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(k, P), (k, P) of this process -> (n, P), (n, P) of all, which are overwritten by the next call."""
        sent = rows.new_zeros(len(rows), 2, self.width)
        for part, row, score, index in zip(sent, rows, scores, self.own, strict=True):
            part[0, : len(index)], part[1, : len(index)] = row[index], score[index]
        for k, (part, index) in enumerate(zip(self.axis.join(sent), self.coordinates, strict=True)):
            self.rows[k, index], self.scores[k, index] = part[:, : len(index)]
        return self.rows, self.scores


def merged(parts: Sequence[Tensor], add: Axis) -> list[Tensor]:
    """Tensors of one dtype -> their sums over all processes, sent as one."""
    flat = add.add_(torch.cat([part.reshape(-1) for part in parts]))
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@contextmanager
def connected() -> Iterator[None]:
    """Turn what a broken connection raises into one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". ")[0].splitlines()[0]
        raise RankError(f"another process of the run was lost, or cannot be reached ({reason})") from None


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)
