"""The public home of :class:`Checkpoints`, which lives in :mod:`dllp.runs.checkpoints`."""

from dllp.runs.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
