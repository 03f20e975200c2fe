"""What a worker does, in a process or on a cluster: it loads the data itself and answers jobs, one by one."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dllp import __version__
from dllp.data import load
from dllp.data.unreadable import SkippedImage
from dllp.devices.device import find_device
from dllp.errors import DllpError, WorkerError
from paper.attempt import Failed, attempt
from paper.jobs import Job, Outcome, Runner
from paper.run import check_data


@dataclass(frozen=True)
class Settings:
    """What a worker must know; all of it is small and travels well.

    Args:
        data, root: As for :func:`dllp.data.load`.
        device, precision: Where and how it computes.
        threads: Of the processor, for this worker.
        loading: Further arguments for :func:`dllp.data.load`.
        recompute: Whether activations are computed twice instead of kept.
        everywhere: Whether predictions on corrupted and foreign inputs are wanted too.
        seen: What finished runs were trained on.
        told: Images that are known to be left out: whoever hands out the jobs has said so.
        quiet: Whether to say nothing of others.
        version: Of whoever hands out the jobs.
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
    told: Sequence[str] = ()
    quiet: bool = False
    version: str = __version__


@dataclass(frozen=True)
class Unfit:
    """The worker cannot do any job where it is, for example without the data."""

    error: DllpError


@dataclass(frozen=True)
class Lost:
    """The worker is no more; nobody knows how far it came."""

    reason: str


Answer = Outcome | Failed | Unfit | Lost


class Worker:
    """Runs jobs where it was started; dense networks stay at hand for the jobs that start from them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runner: Runner | None = None

    def answer(self, job: Job) -> Answer:
        """Run one job; nothing is raised, so that every error reaches whoever asked in the same way."""
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
        data = load(own.data, root=own.root, report=None if own.quiet else self._tell, **own.loading)
        runner = Runner(data, everywhere=own.everywhere, **machine, recompute=own.recompute)
        check_data(own.seen, runner)
        return runner

    def _tell(self, image: SkippedImage) -> None:
        if image.name not in self.settings.told:
            say_left_out(image)


def say_left_out(image: SkippedImage) -> None:
    """One line on standard error."""
    print("dllp: warning:", " ".join(str(image).split()), file=sys.stderr, flush=True)
