"""Run the jobs of a plan, in this process or spread over workers; one process hands out jobs and keeps what they give.

A job whose worker is lost is given to another one. Jobs of one unit go to the same worker, one behind the other.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from dllp.devices.device import find_device
from dllp.errors import ConfigError, DllpError, Interrupted, WorkerError
from dllp.runs import cluster
from dllp.runs.checkpoints import Signals
from dllp.runs.workers import Answer, Failed, Lost, Processes, Settings, Unfit, attempt

KEPT = "finished jobs are kept, the same command goes on"
LAUNCHERS = {"local": ("jobs",), "ray": ("jobs", "address", "cpus")}
"""Where jobs run besides this process, with the options of each."""
Hand = Any  # one worker of a pool


class Planned(Protocol):
    """A job, which only its worker needs to understand, and its name, which no other of the plan has."""

    @property
    def name(self) -> str: ...

    @property
    def job(self) -> Any: ...


Pool = Processes | cluster.Cluster  # workers of one kind


class Spread:
    """Hands out the jobs of a plan, in units that stay together, and closes the pool at the end, whatever happens.

    The book keeps what finished jobs give, at once; `report` is called with errors that do not end the others.
    """

    def __init__(
        self, units: Iterable[Sequence[Any]], pool: Pool, book: Book,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.pool, self.book, self.report = pool, book, report
        self.waiting = deque(map(deque, units))
        self.running: dict[Hand, deque[Planned]] = {}
        self.lost: Counter[str] = Counter()
        self.unfit: list[Unfit] = []

    def run(self) -> None:
        """Run until every job is finished or has failed."""
        with Signals() as signals:
            asked: list[int] = []
            signals.stop = asked.append
            try:
                while self._dispatch():
                    for hand, answer in self.pool.answers():
                        self._receive(hand, answer)
                    if asked:
                        error = Interrupted(asked[0])
                        error.add_note(KEPT)
                        raise error
            finally:
                self.pool.close()
        for text in sorted({str(unfit.error) for unfit in self.unfit}):
            self.report(f"{text}; the others went on without it")

    def _dispatch(self) -> bool:
        """Give work to as many workers as there is room for; False where no work is left."""
        while self.waiting and self.pool.room(len(self.running) + len(self.unfit)):
            unit = self._next_unit()
            if unit is not None:
                self._give(self.pool.start_worker(), unit)
        if self.waiting and not self.running and self.unfit:
            raise self.unfit[0].error
        return bool(self.waiting or self.running)

    def _next_unit(self) -> deque[Planned] | None:
        """The next unit that begins with a job nobody has finished meanwhile."""
        while self.waiting:
            unit = self.waiting.popleft()
            while unit and not self.book.is_pending(unit[0]):
                unit.popleft()
            if unit:
                return unit
        return None

    def _give(self, hand: Hand, unit: deque[Planned]) -> None:
        self.running[hand] = unit
        self.pool.give(hand, unit[0].job)

    def _receive(self, hand: Hand, answer: Answer) -> None:
        unit = self.running.pop(hand)
        planned = unit.popleft()
        if isinstance(answer, Lost):
            self._retry(unit, planned, answer)
        elif isinstance(answer, Unfit):
            self.unfit.append(answer)
            unit.appendleft(planned)
        elif isinstance(answer, Failed):
            self.book.failed(planned, answer.error)
            if answer.trace:
                self.report(f"{planned.name}: {answer.error}\n{answer.trace}")
        else:
            self.book.keep(planned, answer)
        if unit:
            self.waiting.appendleft(unit)  # first, so that it stays with the worker that has what it needs
        if not isinstance(answer, Lost):
            broken = isinstance(answer, Unfit) or (isinstance(answer, Failed) and answer.broken)
            following = None if broken else self._next_unit()
            if following is None:
                self.pool.dismiss(hand)
            else:
                self._give(hand, following)

    def _retry(self, unit: deque[Planned], planned: Planned, answer: Lost) -> None:
        self.lost[planned.name] += 1
        times = self.lost[planned.name]
        if times > self.pool.retries:
            self.book.failed(planned, WorkerError(f"its worker was lost {times} times, last time {answer.reason}"))
        else:
            self.report(f"{planned.name}: its worker was lost ({answer.reason}), another one takes the job")
            unit.appendleft(planned)


class Book(ABC):
    """Keeps what finished jobs give, and remembers failed ones."""

    def __init__(self) -> None:
        self.failures: list[tuple[Planned, DllpError]] = []

    @abstractmethod
    def is_pending(self, planned: Any) -> bool:
        """True where the job is still to be run: another process may have finished it meanwhile."""

    @abstractmethod
    def keep(self, planned: Any, answer: Answer) -> None:
        """The job is finished."""

    def failed(self, planned: Planned, error: DllpError) -> None:
        """The job will not be finished."""
        self.failures.append((planned, error))

    def close(self) -> None:
        """Raise what failed, after all other jobs have run."""
        if self.failures:
            (planned, error), more = self.failures[0], len(self.failures) - 1
            others = f" ({more} more failed)" if more else ""
            raise type(error)(f"{planned.name}: {error}{others}")


def finish(
    plan: Iterable[Planned], book: Book, run: Callable[[Any], Any], begin: Callable[[Any], None] = lambda planned: None
) -> None:
    """Run the jobs that are not yet finished, one after another; `begin` is called before each."""
    for planned in plan:
        if not book.is_pending(planned):
            continue
        begin(planned)
        found = attempt(run, planned.job)
        if isinstance(found, Failed):
            book.failed(planned, found.error)
            if found.trace:
                print(found.trace, file=sys.stderr)
        else:
            book.keep(planned, found)


def check_launcher(given: Mapping[str, Any]) -> None:
    """Raise where the options of a launcher do not fit it, or it is not installed."""
    launcher = given.get("launcher")
    for option in ("jobs", "address", "cpus"):
        if option in given and option not in LAUNCHERS.get(launcher or "", ()):
            able = " or ".join(f"--launcher {name}" for name, options in LAUNCHERS.items() if option in options)
            raise ConfigError(f"--{option} needs {able}")
        if option != "address" and given.get(option, 1) < 1:
            raise ConfigError(f"{option} = {given[option]}: at least 1 is needed")
    if launcher == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("--launcher ray needs Ray: pip install 'dllp[ray]'")


@contextmanager
def opened_pool(given: Mapping[str, Any], settings: Callable[[str], Settings]) -> Iterator[Pool]:
    """The workers that options ask for, made from their settings for a device; on a cluster while it is connected."""
    device, count = given.get("device", "auto"), given.get("jobs")
    if given["launcher"] == "ray":
        with cluster.connected(given.get("address")):
            yield cluster.Cluster(settings(cluster.device(device)), given.get("cpus", 1), count)
    else:
        yield Processes(settings(str(find_device(device))), count)
