"""The processes of a run under torchrun: rendezvous, agreement on values and errors, and the mesh they form."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dllp import __version__
from dllp.devices.mesh import Axis, Place, connected
from dllp.errors import ConfigError, DllpError, RankError, first_line

T = TypeVar("T")
Parallel = Literal["data", "particles", "both"]
PREPARING, STEPPING = timedelta(minutes=10), timedelta(seconds=45)
"""Timeouts of collectives: while processes read their data, and in a step."""
LINGER = 0.1
"""Seconds for gloo's threads to end: one that takes the interpreter lock during its shutdown aborts the process. gloo
offers nothing to wait for, so that this is a pause and no guarantee."""


class Ranks:
    """All processes of a run, seen from one of them; `local` is its rank on its host, which chooses its device."""

    def __init__(self, world: Axis | None = None, local: int = 0) -> None:
        self.world, self.local = world or Axis(), local
        self.steps = self.world  # all processes too, with the short timeout, once training starts
        self._made = [self.world]

    @property
    def rank(self) -> int:
        return self.world.index

    @property
    def alone(self) -> bool:
        return self.world.size == 1

    def together(self, work: Callable[[], T]) -> T:
        """Do work that succeeds on all or on none: an error of any rank is raised on all, and reported by rank 0."""
        if self.alone:
            return work()
        found: list[T] = []
        own = DllpError()
        try:
            found.append(work())
        except DllpError as error:
            own = error
        texts = self.world.all_gather_object(str(own))
        for rank, text in enumerate(texts):
            if text:
                error = own if rank == self.rank else RankError(f"rank {rank}: {text}")
                error.reported_elsewhere = self.rank > 0
                raise error
        return found[0]

    def same(self, what: str, text: str) -> None:
        """Raise unless `text` is the same on all ranks."""
        texts = self.world.all_gather_object(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                error = RankError(f"rank {rank} has {other}, but rank 0 has {texts[0]}: {what} must be the same")
                error.reported_elsewhere = self.rank > 0
                raise error

    def lines(self, particles: int, parallel: Parallel) -> int:
        """Size of the particles' axis: `both` spreads them as far as they divide; the other axis shares batches."""
        world = self.world.size
        if parallel == "particles" and particles > 1 and particles % world:
            raise ConfigError(
                f"{particles} particles cannot be spread evenly over {world} processes: start as many processes as "
                f"divide {particles}, or use parallel = both"
            )
        return 1 if parallel == "data" else math.gcd(particles, world)

    def place(self, particles: int, parallel: Parallel) -> Place:
        """This process's place in the mesh; a collective, called by all in the same order."""
        if self.alone:
            return Place(particles)
        world, lines = self.world.size, self.lines(particles, parallel)
        ranks = torch.arange(world).view(lines, world // lines)
        rows, shards, self.steps = map(self._axis, (ranks.T, ranks, ranks.view(1, world)))
        return Place(particles, rows, shards, self.steps)

    def close(self) -> None:
        """Close all connections; a group that a pending exception still holds would abort the process at its end."""
        for axis in self._made:
            axis.group = None
        with suppress(RuntimeError):
            dist.destroy_process_group()
        if not self.alone:
            time.sleep(LINGER)

    def _axis(self, groups: torch.Tensor) -> Axis:
        """The axis of this process among groups of ranks, one a row; every process creates all of them."""
        with connected():
            own, _ = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=STEPPING)
        self._made.append(Axis(own, dist.get_rank(own), groups.shape[1]))  # pyright: ignore[reportArgumentType]
        return self._made[-1]


def number() -> int:
    """This process's rank from the launcher's environment; 0 without a launcher."""
    return int(os.environ.get("RANK", 0)) if _size() > 1 else 0


def restarts() -> int:
    """Number of restarts by torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the process group that torchrun started; a single process without it."""
    if _size() < 2:
        yield Ranks()
        return
    ranks = Ranks()
    try:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        met, rank, size = next(rendezvous("env://", timeout=PREPARING))
        # torchrun keeps its store over restarts; a prefix hides the addresses of processes that are gone
        store = dist.PrefixStore(f"life-{restarts()}", met)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PREPARING)
    except (RuntimeError, ValueError) as error:
        reason = f"the processes of the run did not meet ({first_line(error)})"
        failure = RankError(f"{reason}: start them with torchrun, and a free --master-port")
        failure.reported_elsewhere = number() > 0
        raise failure from None
    try:
        everyone = Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        ranks = Ranks(everyone, int(os.environ.get("LOCAL_RANK", 0)))
        where = f"dllp {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        ranks.same("versions on all hosts", where)
        yield ranks
    finally:
        ranks.close()
