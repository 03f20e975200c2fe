"""Workers that run jobs, and processes of this machine that hold them: each loads the data itself."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from dllp import __version__
from dllp.errors import DllpError, Interrupted, WorkerError


@dataclass(frozen=True)
class Failed:
    """A job that raised; `trace` is the traceback of an unforeseen error."""

    error: DllpError
    trace: str = ""

    @property
    def broken(self) -> bool:
        """True where the worker should do nothing more: a device may be unusable after such an error."""
        return isinstance(self.error, WorkerError)


def attempt(run: Callable[[Any], Any], job: Any) -> Any:
    """Run a job: what it gives, or :class:`Failed`; no error is raised."""
    try:
        return run(job)
    except DllpError as error:
        return Failed(error)
    except (torch.OutOfMemoryError, MemoryError):
        return Failed(WorkerError("out of memory: give --recompute, or let fewer workers share the machine"))
    except Exception as error:
        return Failed(WorkerError(f"{type(error).__name__}: {error}"), traceback.format_exc())


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a worker, for subclasses to add to: small, and pickled with it; `version` is the launcher's."""

    device: str
    threads: int = 1
    version: str = __version__

    def prepare(self) -> Callable[[Any], Any]:
        """The function that runs one job here, after the data was loaded; called once, before the first job."""
        raise NotImplementedError


@dataclass(frozen=True)
class Unfit:
    """A worker that can do no job where it is, for example without the data."""

    error: DllpError


@dataclass(frozen=True)
class Lost:
    """A worker that died in a job."""

    reason: str


Answer = Any  # the result of a job, or one of the three above


class Worker:
    """Runs jobs where it was started."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.run: Callable[[Any], Any] | None = None

    def answer(self, job: Any) -> Answer:
        """Run one job; nothing is raised, so that every error reaches the launcher in the same way."""
        own = self.settings
        try:
            if own.version != __version__:
                raise WorkerError(f"it has dllp {__version__}, not {own.version}: install the same version everywhere")
            if self.run is None:
                torch.set_num_threads(own.threads)
                self.run = own.prepare()
        except (DllpError, OSError) as error:
            return Unfit(WorkerError(f"the worker on {platform.node()}: {error}"))
        return attempt(self.run, job)


SPAWN = multiprocessing.get_context("spawn")  # forked processes can use neither CUDA nor the threads of torch
PATIENCE = 5.0  # seconds for a process to end by itself
WITHOUT_DEVICES = 2  # workers by default where there is no CUDA


@dataclass(frozen=True, eq=False)
class Hand:
    """A worker's process, and the pipe that leads to it."""

    number: int
    process: SpawnProcess
    pipe: connection.Connection


class Processes:
    """At most `count` worker processes, by default one for each CUDA device: `cuda` without a number means all."""

    retries = 1  # how often a job is given away again after its worker was lost

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
        """True where there is room for one more worker beside `busy` others."""
        return busy < self.count

    def start_worker(self) -> Hand:
        """Start a worker."""
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

    def give(self, hand: Hand, job: Any) -> None:
        """Hand it a job; each has one at a time."""
        with suppress(OSError):  # a dead worker is reported by answers
            hand.pipe.send(job)

    def answers(self) -> Iterator[tuple[Hand, Answer]]:
        """Answers that came within a second; workers that answered :class:`Lost` are forgotten."""
        ready = connection.wait([hand.pipe for hand in self.hands], timeout=1)
        for hand in [hand for hand in self.hands if hand.pipe in ready]:
            try:
                answer = hand.pipe.recv()
            except (EOFError, OSError):
                self.dismiss(hand)
                code = hand.process.exitcode or 0
                answer = Lost(f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")
            yield hand, answer

    def dismiss(self, hand: Hand) -> None:
        self.hands.remove(hand)
        hand.pipe.close()
        hand.process.join(PATIENCE)
        if hand.process.exitcode is None:
            hand.process.kill()
            hand.process.join()

    def close(self) -> None:
        for hand in self.hands:
            hand.process.terminate()
        for hand in list(self.hands):
            self.dismiss(hand)


def serve(pipe: connection.Connection, settings: Settings) -> None:
    """The main function of a worker's process: answer until the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = Worker(settings)
    with suppress(EOFError, Interrupted):  # a run that was asked to stop has written its checkpoint
        while True:
            job: Any = pipe.recv()
            pipe.send(worker.answer(job))


def _end_with_parent() -> None:
    """Exit when the parent was killed: a job may take hours more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT while a process starts, so that it inherits the mask: Ctrl-C is for the parent to answer."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise started with the process, and it lets the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
