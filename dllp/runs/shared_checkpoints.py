"""Checkpoints of a run on several processes: one file that the first writes, and all go on from."""

from __future__ import annotations

from safetensors.torch import load, save

from dllp.devices.ranks import Ranks
from dllp.errors import Interrupted
from dllp.runs.checkpoints import Checkpoints, State, Take


class SharedCheckpoints:
    """What :class:`Checkpoints` is to one process, for one of several: all call the same methods at the same steps.

    Args:
        ranks: All processes.
        own: The first process's checkpoints; None on the others, which need no folder.

    Attributes:
        damaged: Files that could not be used.
        signal: What :meth:`stop` was called with, here or elsewhere.
    """

    def __init__(self, ranks: Ranks, own: Checkpoints | None) -> None:
        self.ranks, self.own = ranks, own
        self.signal: int | None = None

    @property
    def damaged(self) -> list[str]:
        return self.own.damaged if self.own is not None else []

    def begin(self) -> None:
        """Training starts now."""
        self.ranks.together(lambda: self.own.begin() if self.own is not None else None)

    def latest(self) -> State | None:
        """The newest checkpoint that is whole, as the first process reads it."""
        found = self.ranks.together(lambda: self.own.latest() if self.own is not None else None)
        values = self.ranks.hear(found and found[1])
        if values is None:
            return None
        return load(self.ranks.world.hear(save(found[0]) if found is not None else b"")), values

    def after_step(self, step: int, epoch_ends: bool, take: Take, *, last: bool = False) -> None:
        """Write a checkpoint if the first process says that one is due, or if any was asked to stop."""
        due = last or (self.own is not None and not self.own.busy and self.own.due(step, epoch_ends))
        signal, wanted = self.ranks.steps.most(self.signal or 0, int(due))
        if not signal and not wanted:
            return
        taken = take()
        if self.own is not None:
            self.own.save(step, lambda: taken, wait=last or bool(signal))
        if signal:
            self.signal = signal
            raise Interrupted(signal)

    def stop(self, signal: int) -> None:
        """Ask the run to end after its present step; safe to call from a signal handler."""
        self.signal = signal

    def flush(self) -> None:
        """Wait until what was taken is on disk."""
        if self.own is not None:
            self.own.flush()

    def settle(self) -> None:
        """Wait for the writer where an error is on its way already."""
        if self.own is not None:
            self.own.settle()

    def close(self) -> None:
        """End the thread that writes."""
        if self.own is not None:
            self.own.close()


AnyCheckpoints = Checkpoints | SharedCheckpoints
