"""One job, whatever comes of it: the others need not suffer from its failure."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

from dllp.errors import DllpError, WorkerError
from paper.jobs import Job, Outcome, Runner


@dataclass(frozen=True)
class Failed:
    """The job cannot be done; `trace` tells where in the code, if nobody foresaw it."""

    error: DllpError
    trace: str = ""

    @property
    def broken(self) -> bool:
        """Whether the worker should do nothing more: a device may be unusable after such an error."""
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
