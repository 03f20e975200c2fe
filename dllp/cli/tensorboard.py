"""TensorBoard: the numbers of every epoch as curves, gates and weights as histograms. An extra, off by default."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from dllp.errors import ConfigError
from dllp.records import EpochRecord
from dllp.runs import names
from dllp.training.state import RunState

CURVES = ("loss", "accuracy", "cost", "undecided", "multiplier", "noise", "lr", "temperature", "budget",
          "discrepancy", "seconds")  # fmt: skip


def require_tensorboard() -> None:
    """Raise where it is not installed, with the way to get it."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs tensorboard: pip install 'dllp[tensorboard]'")


class Board:
    """The curves and histograms of one training for TensorBoard.

    Args:
        folder: The run folder.
        training: Its name, `pruned` or `dense`: the board shows them beside each other.
    """

    def __init__(self, folder: Path, training: str) -> None:
        self.place = folder / names.TENSORBOARD / training
        self.writer: Any = None
        self.state: RunState | None = None

    def start(self, state: RunState) -> None:
        """Begin, or begin again after a rollback: what was written of later epochs is purged."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self.state = state
        self.writer = SummaryWriter(str(self.place), purge_step=len(state.history) + 1)

    def epoch(self, record: EpochRecord) -> None:
        """The curves, one for each particle where there are several, and the histograms."""
        if self.writer is None or self.state is None:
            return
        for name in CURVES:
            value = getattr(record, name)
            parts = value if isinstance(value, list) else [] if value is None else [value]
            for i, part in enumerate(parts):
                self.writer.add_scalar(name if len(parts) == 1 else f"{name}/particle {i + 1}", part, record.epoch)
        belief = self.state.latents
        if belief.logits.numel():
            self.writer.add_histogram("gates", belief.logits.sigmoid(), record.epoch)
        for name, parameter in self.state.particles.networks[0].named_parameters():
            if parameter.dim() > 1:
                self.writer.add_histogram(f"weights/{name}", parameter.detach(), record.epoch)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
