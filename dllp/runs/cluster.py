"""Workers as actors of a Ray cluster: each has its own processors, and a GPU where jobs use CUDA.

Ray itself never runs a job again: a worker may have finished some of its jobs, and those are not run twice.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from dllp.errors import ConfigError, Interrupted, WorkerError
from dllp.runs.workers import Answer, Failed, Lost, Settings, Unfit, Worker

LOCAL, AUTO = "local", "auto"
REACHING, WAITING = 10.0, 60.0  # seconds until an address, and a cluster without nodes, are given up


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Join a cluster: at HOST:PORT, `auto` for the one that runs here, `local` (or nothing) for one of our own."""
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address not in (LOCAL, AUTO):
        _reach(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray is imported
    import ray

    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except SystemExit:  # Ray's answer to SIGTERM
        raise Interrupted(signal.SIGTERM) from None
    except Exception as error:  # whatever Ray, its libraries and the other side think of
        raise ConfigError(f"cannot join the Ray cluster at {address}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()
        with suppress(ValueError):  # outside of the main thread Ray set no handler either
            signal.signal(signal.SIGTERM, before)


def device(name: str) -> str:
    """`auto` is CUDA where the cluster has a GPU, whatever this machine has."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: on a cluster Ray chooses the device, use auto, cpu or cuda")
    found = any(resources.get("GPU", 0) >= 1 for resources in _nodes())
    return name if name != "auto" else "cuda" if found else "cpu"


class Cluster:
    """As many workers as the cluster holds, at most `limit`, each with `cpus` processors."""

    retries = 3

    def __init__(self, settings: Settings, cpus: int = 1, limit: int | None = None) -> None:
        import ray

        self.wanted = {"CPU": cpus} | ({"GPU": 1} if settings.device == "cuda" else {})
        self.limit = limit
        self.settings = replace(settings, threads=cpus)
        gpus = self.wanted.get("GPU", 0)
        self.actor = ray.remote(Worker).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)
        self.asked: dict[Any, Any] = {}  # answer to come -> who gives it
        self.deadline = time.monotonic()

    @property
    def sharing(self) -> int:
        """How many workers share a device: none a GPU, but the processors of a node."""
        return 1 if "GPU" in self.wanted else max(map(self._fit, _nodes()), default=1)

    def room(self, busy: int) -> bool:
        """As :class:`dllp.runs.workers.Processes`, here and below; raises where no node will ever have room."""
        slots = sum(map(self._fit, _nodes()))
        if slots:
            self.deadline = time.monotonic() + WAITING
        elif not busy and time.monotonic() > self.deadline:
            parts = " and ".join(f"{count} {kind}" for kind, count in self.wanted.items())
            raise WorkerError(f"no node of the Ray cluster has {parts} for a job: add one, or lower --cpus")
        return busy < min(slots, self.limit or slots)

    def start_worker(self) -> Any:
        return self.actor.remote(self.settings)

    def give(self, hand: Any, job: Any) -> None:
        self.asked[hand.answer.remote(job)] = hand

    def answers(self) -> Iterator[tuple[Any, Answer]]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        if not self.asked:
            time.sleep(1)
            return
        ready, _ = ray.wait(list(self.asked), num_returns=1, timeout=1)
        for reference in ready:
            hand = self.asked.pop(reference)
            try:
                answer = ray.get(reference)
            except RayTaskError as error:  # an error in the code, no lost worker
                answer = Failed(WorkerError(str(error.cause)), str(error))
            except RayError as error:
                reason = str(error).strip().splitlines()[-1].strip(" \t.")
                unfit = getattr(error, "actor_init_failed", False)  # such as a node without dllp
                answer = Unfit(WorkerError(f"a worker of the cluster: {reason}")) if unfit else Lost(reason)
                self.dismiss(hand)  # it may live on, out of reach
            yield hand, answer

    def dismiss(self, hand: Any) -> None:
        import ray

        ray.kill(hand)

    def close(self) -> None:
        for hand in self.asked.values():
            self.dismiss(hand)
        self.asked = {}

    def _fit(self, resources: dict[str, float]) -> int:
        return min(int(resources.get(kind, 0) // count) for kind, count in self.wanted.items())


def _nodes() -> list[dict[str, float]]:
    """Resources of each node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _reach(address: str) -> None:
    """Raise where nothing answers at HOST:PORT: Ray itself would try for minutes, and say so in many lines."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"address = {address!r}: give HOST:PORT of the cluster's head, `auto` or `local`")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHING).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster can be reached at {address} ({error}): is its head running?") from None
