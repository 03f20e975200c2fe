"""Workers of a bench and processes of this machine that hold them: each loads the data itself and answers jobs."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from dllp import __version__
from dllp.data.unreadable import SkippedImage
from dllp.devices.device import find_device
from dllp.errors import DllpError, WorkerError
from paper.coloured_digits import load_data
from paper.jobs import Job, Outcome, Runner


@dataclass(frozen=True)
class Failed:
    """A job that raised; `trace` is the traceback of an unforeseen error."""

    error: DllpError
    trace: str = ""

    @property
    def broken(self) -> bool:
        """True where the worker should do nothing more: a device may be unusable after such an error."""
        return isinstance(self.error, WorkerError)


def attempt(runner: Runner, job: Job) -> Outcome | Failed:
    """Run a job; no error is raised."""
    try:
        return runner.run(job)
    except DllpError as error:
        return Failed(error)
    except (torch.OutOfMemoryError, MemoryError):
        return Failed(WorkerError("out of memory: give --recompute, or let fewer workers share the machine"))
    except Exception as error:
        return Failed(WorkerError(f"{type(error).__name__}: {error}"), traceback.format_exc())


@dataclass(frozen=True)
class Settings:
    """Settings of a worker: small, and pickled with it.

    Args:
        data, root: As for :func:`paper.coloured_digits.load_data`.
        device, precision, recompute: As in :class:`dllp.Config`.
        threads: Of the processor, for this worker.
        loading: Further arguments for it.
        everywhere: As for :class:`paper.jobs.Splits`.
        seen: Data of finished runs.
        reported: Images that are left out, as the launcher has reported.
        quiet: Report no others.
        version: Of the launcher's dllp.
    """

    data: str
    root: str | None
    device: str
    precision: str
    threads: int
    loading: Mapping[str, Any] = field(default_factory=dict)
    recompute: bool = False
    everywhere: bool = True
    seen: Sequence[dict[str, Any]] = ()
    reported: Sequence[str] = ()
    quiet: bool = False
    version: str = __version__


@dataclass(frozen=True)
class Unfit:
    """A worker that can do no job where it is, for example without the data."""

    error: DllpError


@dataclass(frozen=True)
class Lost:
    """A worker that died in a job."""

    reason: str


Answer = Outcome | Failed | Unfit | Lost


class Worker:
    """Runs jobs where it was started; dense networks stay at hand for the jobs that start from them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runner: Runner | None = None

    def answer(self, job: Job) -> Answer:
        """Run one job; nothing is raised, so that every error reaches the launcher in the same way."""
        try:
            if self.runner is None:
                self.runner = self._prepare()
        except (DllpError, OSError) as error:
            return Unfit(WorkerError(f"the worker on {platform.node()}: {error}"))
        return attempt(self.runner, job)

    def _prepare(self) -> Runner:
        own = self.settings
        if own.version != __version__:
            raise WorkerError(f"it has dllp {__version__}, not {own.version}: install the same version everywhere")
        torch.set_num_threads(own.threads)
        machine: dict[str, Any] = {"device": str(find_device(own.device)), "precision": own.precision}
        data = load_data(own.data, root=own.root, report=None if own.quiet else self._report, **own.loading)
        runner = Runner(data, everywhere=own.everywhere, **machine, recompute=own.recompute)
        runner.splits.check(own.seen)
        return runner

    def _report(self, image: SkippedImage) -> None:
        if image.name not in self.settings.reported:
            say_left_out(image)


def say_left_out(image: SkippedImage) -> None:
    """One line on standard error."""
    print("dllp: warning:", " ".join(str(image).split()), file=sys.stderr, flush=True)


# ---- processes of this machine

SPAWN = multiprocessing.get_context("spawn")
"""Forked processes can use neither CUDA nor the threads of torch."""
PATIENCE = 5.0
"""Seconds for a process to end by itself."""
WITHOUT_DEVICES = 2
"""Workers by default where there is no CUDA."""


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
        with suppress(OSError):  # a dead worker is reported by answers
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
    """The main function of a worker's process: answer until the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = Worker(settings)
    with suppress(EOFError):
        while True:
            job: Any = pipe.recv()
            pipe.send(worker.answer(job))


def _end_with_parent() -> None:
    """Exit when the parent was killed: a job may take hours more."""
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
