"""Finished jobs of a bench in its store, and what its workers run; :mod:`dllp.runs.launch` hands the jobs out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dllp.data.unreadable import SkippedImage
from dllp.devices.device import find_device
from dllp.runs import launch, workers
from paper.coloured_digits import load_data
from paper.jobs import Job, Outcome, Runner
from paper.provenance import now
from paper.store import LABELS, Store
from paper.tables import Planned


class Book(launch.Book):
    """Stores finished jobs.

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
        super().__init__()
        self.store, self.note, self.done = store, note or {}, done

    def is_pending(self, planned: Planned) -> bool:
        """True where the store has no line of it."""
        return planned.job.digest not in self.store.digests()

    def keep(self, planned: Planned, answer: Outcome) -> None:
        """Add the line, and what was predicted where the row wants it."""
        line = {"row": planned.row.name, **answer.line, "date": now(), **self.note}
        keep = planned.row.predictions != "none" and not planned.job.validation
        if self.store.add(line, {**answer.probabilities, LABELS: answer.labels} if keep else None):
            self.done(planned, line)


@dataclass(frozen=True)
class Settings(workers.Settings):
    """Settings of a worker of a bench.

    Args:
        data, root: As for :func:`paper.coloured_digits.load_data`.
        precision, recompute: As in :class:`dllp.Config`.
        loading: Further arguments for it.
        everywhere: As for :class:`paper.jobs.Splits`.
        seen: Data of finished runs.
        reported: Images that are left out, as the launcher has reported.
        quiet: Report no others.
    """

    data: str
    root: str | None
    precision: str
    loading: Mapping[str, Any] = field(default_factory=dict)
    recompute: bool = False
    everywhere: bool = True
    seen: Sequence[dict[str, Any]] = ()
    reported: Sequence[str] = ()
    quiet: bool = False

    def prepare(self) -> Callable[[Job], Outcome]:
        """A runner on the data, which keeps dense networks at hand for the jobs that start from them."""
        machine: dict[str, Any] = {"device": str(find_device(self.device)), "precision": self.precision}
        data = load_data(self.data, root=self.root, report=None if self.quiet else self._report, **self.loading)
        runner = Runner(data, everywhere=self.everywhere, **machine, recompute=self.recompute)
        runner.splits.check(self.seen)
        return runner.run

    def _report(self, image: SkippedImage) -> None:
        if image.name not in self.reported:
            say_left_out(image)


def say_left_out(image: SkippedImage) -> None:
    """One line on standard error."""
    print("dllp: warning:", " ".join(str(image).split()), file=sys.stderr, flush=True)


def seen_data(store: Store) -> list[dict[str, Any]]:
    """Data of the finished runs, each once."""
    found = {json.dumps(line["data"]): line["data"] for line in store.lines() if "data" in line}
    return list(found.values())


def in_short(line: Mapping[str, Any]) -> str:
    """The line of a finished job in short."""
    particles, together = line["particles"], line["ensemble"]
    parts = ["accuracy " + " / ".join(f"{100 * particle['accuracy']:.2f}" for particle in particles)]
    if len(particles) > 1:
        parts.append(f"all {100 * together['accuracy']:.2f}")
    parts += [f"NLL {together['nll']:.3f}", f"ECE {100 * together['ece']:.2f}"]
    parts += [f"{100 * min(line['flops_removed']):.2f}% of FLOPs removed", f"{line['train_seconds']:.0f} s"]
    return ", ".join(parts)
