"""Workers as processes of this machine, which share its processor and take turns in its devices."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from paper.jobs import Job
from paper.worker import Answer, Lost, Settings, Worker

SPAWN = multiprocessing.get_context("spawn")
"""Forked processes could use neither CUDA nor the threads of torch."""
PATIENCE = 5.0
"""Seconds for a process to end by itself."""
WITHOUT_DEVICES = 2
"""Workers where there is no CUDA and nobody says how many."""


@dataclass(frozen=True, eq=False)
class Hand:
    """A worker's process, and the pipe that leads to it."""

    number: int
    process: SpawnProcess
    pipe: connection.Connection


class Processes:
    """At most `count` worker processes.

    Args:
        settings: For all of them; `cuda` without a number is spread over all devices.
        count: By default one for each CUDA device that is used.
    """

    retries = 1

    def __init__(self, settings: Settings, count: int | None = None) -> None:
        name = settings.device
        self.devices = [f"cuda:{k}" for k in range(torch.cuda.device_count())] if name == "cuda" else [name]
        self.count = count or (WITHOUT_DEVICES if name == "cpu" else len(self.devices))
        self.settings = replace(settings, threads=max(1, torch.get_num_threads() // self.count))
        self.hands: list[Hand] = []

    @property
    def sharing(self) -> int:
        """How many workers share a device."""
        return -(-self.count // len(self.devices))

    def room(self, busy: int) -> bool:
        """See :class:`paper.launch.Pool`, here and below."""
        return busy < self.count

    def hire(self) -> Hand:
        number = min(set(range(self.count)) - {hand.number for hand in self.hands})
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=serve, args=(there, self.place(number)), name=f"dllp-worker-{number}")
        with _without_interrupts():
            process.start()
        there.close()
        self.hands.append(Hand(number, process, here))
        return self.hands[-1]

    def place(self, number: int) -> Settings:
        """The settings of a worker: devices go round."""
        return replace(self.settings, device=self.devices[number % len(self.devices)])

    def give(self, hand: Hand, job: Job) -> None:
        with suppress(OSError):  # whoever is no more is heard of in answers
            hand.pipe.send(job)

    def answers(self) -> Iterator[tuple[Hand, Answer]]:
        ready = connection.wait([hand.pipe for hand in self.hands], timeout=1)
        for hand in [hand for hand in self.hands if hand.pipe in ready]:
            try:
                answer = hand.pipe.recv()
            except (EOFError, OSError):
                self.dismiss(hand)
                answer = Lost(_ending(hand.process.exitcode))
            yield hand, answer

    def dismiss(self, hand: Hand) -> None:
        self.hands.remove(hand)
        hand.pipe.close()
        _end(hand.process)

    def close(self) -> None:
        for hand in self.hands:
            hand.process.terminate()
        for hand in list(self.hands):
            self.dismiss(hand)


def serve(pipe: connection.Connection, settings: Settings) -> None:
    """What a worker's process does: it answers until nobody asks any more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = Worker(settings)
    with suppress(EOFError):
        while True:
            job: Any = pipe.recv()
            pipe.send(worker.answer(job))


def _end_with_parent() -> None:
    """A killed parent says no good-bye, and a job may take hours more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _end(process: SpawnProcess) -> None:
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal: what is started in here leaves the answer to its parent."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise started with the process, and it lets the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
