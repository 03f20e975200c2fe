"""Run what a table still lacks, in this process or spread over workers; one process hands out jobs and writes.

A job whose worker is lost is given to another one. Jobs that start from the same dense network go to the same worker,
behind it, so that the network is trained once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from dllp.errors import DllpError, Interrupted, WorkerError
from dllp.runs.checkpoints import Signals
from paper.jobs import Job, Outcome, Runner
from paper.provenance import now
from paper.store import LABELS, Store
from paper.tables import Planned, units
from paper.workers import Answer, Failed, Lost, Unfit, attempt

KEPT = "finished jobs are kept, the same command goes on"
Hand = Any
"""A pool's name for one of its workers; hashable."""


class Pool(Protocol):
    """Workers of one kind; `retries` is how often a job is given away again after its worker was lost."""

    retries: int

    def room(self, busy: int) -> bool:
        """Room for one more worker beside `busy` others; raises where none ever will be."""
        ...

    def hire(self) -> Hand:
        """Start a worker."""

    def give(self, hand: Hand, job: Job) -> None:
        """Hand it a job; each has one at a time."""

    def answers(self) -> Iterator[tuple[Hand, Answer]]:
        """Answers that came within a second; workers that answered :class:`Lost` are forgotten."""
        ...

    def dismiss(self, hand: Hand) -> None:
        """A worker without a job ends."""

    def close(self) -> None:
        """All workers end at once."""


class Spread:
    """Hands out the jobs of a plan.

    Args:
        pool: Closed at the end, whatever happens.
        book: Stores finished jobs, at once.
        report: Called with a line about an error that does not end the bench.
    """

    def __init__(
        self, plan: Sequence[Planned], pool: Pool, book: Book, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self.pool, self.book, self.report = pool, book, report
        self.waiting = deque(map(deque, units(plan)))
        self.running: dict[Hand, deque[Planned]] = {}
        self.lost: Counter[str] = Counter()
        self.unfit: list[Unfit] = []

    def run(self) -> None:
        """Run until every job is finished or has failed; failures are raised at the end."""
        with Signals() as signals:
            asked: list[int] = []
            signals.stop = asked.append
            try:
                while self._go_on():
                    for hand, answer in self.pool.answers():
                        self._hear(hand, answer)
                    if asked:
                        error = Interrupted(asked[0])
                        error.add_note(KEPT)
                        raise error
            finally:
                self.pool.close()
        for text in sorted({str(unfit.error) for unfit in self.unfit}):
            self.report(f"{text}; the others went on without it")
        self.book.close()

    def _go_on(self) -> bool:
        """Give work to as many workers as there is room for; False where no work is left."""
        while self.waiting and self.pool.room(len(self.running) + len(self.unfit)):
            unit = self._due()
            if unit is not None:
                self._give(self.pool.hire(), unit)
        if self.waiting and not self.running and self.unfit:
            raise self.unfit[0].error
        return bool(self.waiting or self.running)

    def _due(self) -> deque[Planned] | None:
        """The next unit that begins with a job nobody has finished meanwhile."""
        while self.waiting:
            unit = self.waiting.popleft()
            while unit and not self.book.lacks(unit[0]):
                unit.popleft()
            if unit:
                return unit
        return None

    def _give(self, hand: Hand, unit: deque[Planned]) -> None:
        self.running[hand] = unit
        self.pool.give(hand, unit[0].job)

    def _hear(self, hand: Hand, answer: Answer) -> None:
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
                self.report(f"{describe(planned)}: {answer.error}\n{answer.trace}")
        else:
            self.book.keep(planned, answer)
        if unit:
            self.waiting.appendleft(unit)  # first, so that it stays with the worker that has its dense network
        if not isinstance(answer, Lost):
            broken = isinstance(answer, Unfit) or (isinstance(answer, Failed) and answer.broken)
            following = None if broken else self._due()
            if following is None:
                self.pool.dismiss(hand)
            else:
                self._give(hand, following)

    def _retry(self, unit: deque[Planned], planned: Planned, answer: Lost) -> None:
        self.lost[planned.job.digest] += 1
        times = self.lost[planned.job.digest]
        if times > self.pool.retries:
            self.book.failed(planned, WorkerError(f"its worker was lost {times} times, last time {answer.reason}"))
        else:
            self.report(f"{describe(planned)}: its worker was lost ({answer.reason}), another one takes the job")
            unit.appendleft(planned)


class Book:
    """Stores finished jobs and remembers failed ones.

    Args:
        store: Other processes may add to it meanwhile.
        note: Added to every line, for example the command.
        done: Called with a job's line after it was stored.
    """

    def __init__(
        self,
        store: Store,
        note: Mapping[str, Any] | None = None,
        done: Callable[[Planned, dict[str, Any]], None] = lambda planned, line: None,
    ) -> None:
        self.store, self.note, self.done = store, note or {}, done
        self.failures: list[tuple[Planned, DllpError]] = []

    def lacks(self, planned: Planned) -> bool:
        """True where the job is still to be run: another process may have finished it meanwhile."""
        return planned.job.digest not in self.store.digests()

    def keep(self, planned: Planned, outcome: Outcome) -> None:
        """The job is finished."""
        line = {"row": planned.row.name, **outcome.line, "date": now(), **self.note}
        keep = planned.row.predictions != "none" and not planned.job.validation
        if self.store.add(line, {**outcome.probabilities, LABELS: outcome.labels} if keep else None):
            self.done(planned, line)

    def failed(self, planned: Planned, error: DllpError) -> None:
        """The job will not be finished."""
        self.failures.append((planned, error))

    def close(self) -> None:
        """Raise what failed, after all other jobs have run."""
        if self.failures:
            (planned, error), more = self.failures[0], len(self.failures) - 1
            others = f" ({more} more failed)" if more else ""
            raise type(error)(f"{planned.row.name}, seed {planned.job.seed}: {error}{others}")


def finish(
    plan: Sequence[Planned],
    book: Book,
    runner: Runner,
    *,
    begin: Callable[[Planned], None] = lambda planned: None,
) -> None:
    """Run the jobs that are not yet finished, one after another; `begin` is called before each."""
    runner.splits.check(seen_data(book.store))
    for planned in plan:
        if not book.lacks(planned):
            continue
        begin(planned)
        found = attempt(runner, planned.job)
        if isinstance(found, Outcome):
            book.keep(planned, found)
            continue
        book.failed(planned, found.error)
        if found.trace:
            print(found.trace, file=sys.stderr)
    book.close()


def seen_data(store: Store) -> list[dict[str, Any]]:
    """Data of the finished runs, each once."""
    found = {json.dumps(line["data"]): line["data"] for line in store.lines() if "data" in line}
    return list(found.values())


def describe(planned: Planned) -> str:
    """A job in words."""
    return f"{planned.row.name} seed {planned.job.seed}"


def in_short(line: Mapping[str, Any]) -> str:
    """The line of a finished job in short."""
    particles, together = line["particles"], line["ensemble"]
    parts = ["accuracy " + " / ".join(f"{100 * particle['accuracy']:.2f}" for particle in particles)]
    if len(particles) > 1:
        parts.append(f"all {100 * together['accuracy']:.2f}")
    parts += [f"NLL {together['nll']:.3f}", f"ECE {100 * together['ece']:.2f}"]
    parts += [f"{100 * min(line['flops_removed']):.2f}% of FLOPs removed", f"{line['train_seconds']:.0f} s"]
    return ", ".join(parts)
