"""The processes of one run under torchrun: how they find each other, what all must know, and how they fail together."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from dllp import __version__
from dllp.devices.mesh import Axis, Place, connected
from dllp.errors import ConfigError, DllpError, RankError

T = TypeVar("T")
Parallel = Literal["data", "particles", "both"]
PREPARING, STEPPING = timedelta(minutes=10), timedelta(seconds=45)
"""How long a process waits for the others: while they read their data, and in a step."""
LINGER = 0.1
"""Seconds for gloo's threads: one that asks for the interpreter while that ends aborts the process. What they still
need it for is not known, and nothing tells when they are done, so that this is a pause and no proof."""


class Ranks:
    """All processes of a run as one of them sees them.

    Args:
        world: The line of all.
        local: Number of this process on its host, which chooses its device.
    """

    def __init__(self, world: Axis | None = None, local: int = 0) -> None:
        self.world, self.local = world or Axis(), local
        self.steps = self.world  # the same, with little patience, once training starts
        self._made = [self.world]

    @property
    def rank(self) -> int:
        return self.world.index

    @property
    def alone(self) -> bool:
        return self.world.size == 1

    def together(self, work: Callable[[], T]) -> T:
        """Work that succeeds on all or on none: an error anywhere is raised everywhere, and told by the first."""
        if self.alone:
            return work()
        found: list[T] = []
        own = DllpError()
        try:
            found.append(work())
        except DllpError as error:
            own = error
        texts = self.world.texts(str(own))
        for rank, text in enumerate(texts):
            if text:
                error = own if rank == self.rank else RankError(f"rank {rank}: {text}")
                error.told = self.rank > 0
                raise error
        return found[0]

    def same(self, what: str, text: str) -> None:
        """Raise unless all say the same."""
        texts = self.world.texts(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                error = RankError(f"rank {rank} has {other}, but rank 0 has {texts[0]}: {what} must be the same")
                error.told = self.rank > 0
                raise error

    def hear(self, value: Any) -> Any:
        """A JSON value of the first process."""
        return value if self.alone else json.loads(self.world.hear(json.dumps(value).encode()))

    def lines(self, particles: int, parallel: Parallel) -> int:
        """Over how many processes n particles are spread; each batch is spread over what remains of them.

        `both` spreads the particles as far as they divide. A single network has nothing to spread but its batches.
        """
        world = self.world.size
        if parallel == "particles" and particles > 1 and particles % world:
            raise ConfigError(
                f"{particles} particles cannot be spread evenly over {world} processes: start as many processes as "
                f"divide {particles}, or use parallel = both"
            )
        return 1 if parallel == "data" else math.gcd(particles, world)

    def place(self, particles: int, parallel: Parallel) -> Place:
        """What this process owns of n particles; called by all, in the same order."""
        if self.alone:
            return Place(particles)
        world, lines = self.world.size, self.lines(particles, parallel)
        ranks = torch.arange(world).view(lines, world // lines)
        groups = [self._line(ranks.T.tolist()), self._line(ranks.tolist())]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("particles", "data"))
        rows, shards = (
            Axis(mesh.get_group(name), mesh.get_local_rank(name), ranks.shape[k])
            for k, name in enumerate(("particles", "data"))
        )
        self.steps = Axis(self._line([list(range(world))]), self.rank, world)
        self._made += [rows, shards, self.steps]
        return Place(particles, rows, shards, self.steps)

    def part(self) -> None:
        """Let go of every connection: what an error on its way still holds would end the process when it ends."""
        for axis in self._made:
            axis.group = None
        with suppress(RuntimeError):
            dist.destroy_process_group()
        if not self.alone:
            time.sleep(LINGER)

    def _line(self, lines: list[list[int]]) -> dist.ProcessGroup:
        """The group of those lines that this process stands in; every process makes all of them."""
        with connected():
            groups = [dist.new_group(line, timeout=STEPPING) for line in lines]
        return next(group for group in groups if isinstance(group, dist.ProcessGroup))


def number() -> int:
    """This process's rank as its launcher says; 0 without one."""
    return int(os.environ.get("RANK", 0)) if _size() > 1 else 0


def restarts() -> int:
    """How often torchrun has started this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def joined() -> Iterator[Ranks]:
    """Meet the other processes that torchrun has started; alone where there are none."""
    if _size() < 2:
        yield Ranks()
        return
    ranks = Ranks()
    try:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, **_meeting(), timeout=PREPARING)
    except (RuntimeError, ValueError) as error:
        failure = RankError(_unmet(str(error)))
        failure.told = number() > 0
        raise failure from None
    try:
        everyone = Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        ranks = Ranks(everyone, int(os.environ.get("LOCAL_RANK", 0)))
        where = f"dllp {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        ranks.same("versions on all hosts", where)
        yield ranks
    finally:
        ranks.part()


def _meeting() -> dict[str, Any]:
    """Where the processes meet, for torch.distributed.

    torchrun keeps its store when it starts a run again: addresses of the dead must not be found in it.
    """
    met, rank, size = next(rendezvous("env://", timeout=PREPARING))
    store = dist.PrefixStore(f"life-{restarts()}", met)  # pyright: ignore[reportPrivateImportUsage]
    return {"store": store, "rank": rank, "world_size": size}


def _unmet(reason: str) -> str:
    port = os.environ.get("MASTER_PORT", "?")
    if "EADDRINUSE" in reason or "in use" in reason:
        return f"port {port} on {socket.gethostname()} is in use: choose another with torchrun --master-port"
    return f"the processes of the run did not meet ({reason.splitlines()[0]}): start them with torchrun"
