"""Checkpoints on disk: written beside training, whole or not at all, the last two kept, the newest good one used."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from dllp import files
from dllp.errors import ArtifactError, ConfigError, Interrupted
from dllp.runs import artifacts

FORMAT = "dllp-checkpoint-3"
State = tuple[dict[str, Tensor], dict[str, Any]]
Take = Callable[[], Callable[[], State]]
"""Takes a snapshot; what it returns waits until the copies have arrived."""


class Checkpoints:
    """The checkpoints of one training in one folder.

    Args:
        folder: Where they lie; made when the first one is written.
        every_steps, every_minutes: Besides the end of each epoch, whichever comes first; 0 for never.
        kept: How many are kept.
        on_begin: Called when all else was checked, before the folder is looked into.

    Attributes:
        damaged: Files that :meth:`latest` could not use, with the reason.
        signal: What :meth:`stop` was called with.
    """

    def __init__(
        self, folder: str | Path, *, every_steps: int = 0, every_minutes: float = 10.0, kept: int = 2,
        on_begin: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.folder = files.as_path(folder)
        if every_steps < 0 or not 0 <= every_minutes < float("inf"):
            raise ConfigError(f"checkpoints every {every_steps} steps or {every_minutes} minutes: give 0 or more")
        self.kept, self.on_begin = kept, on_begin
        self.every_steps, self.every_seconds = every_steps, 60 * every_minutes
        self.damaged: list[str] = []
        self._unusable: list[Path] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._last_step, self._last_time = 0, time.monotonic()
        self.signal: int | None = None

    def files(self) -> list[Path]:
        """Checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*.safetensors"))

    def begin(self) -> None:
        """Training starts now."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ArtifactError(f"checkpoints cannot be written to {self.folder}: it is no folder, give another")
        if self.on_begin is not None:
            self.on_begin()

    def after_step(self, step: int, epoch_ends: bool, take: Take, *, last: bool = False) -> None:
        """Write a checkpoint if one is due, waiting for the `last` one; after :meth:`stop`, write it and raise."""
        if self.signal is not None:
            self.save(step, take, wait=True)
            raise Interrupted(self.signal)
        if last or self.due(step, epoch_ends):
            self.save(step, take, wait=last)

    @property
    def busy(self) -> bool:
        """Whether one is still being written."""
        return self._pending is not None and not self._pending.done()

    def due(self, step: int, epoch_ends: bool) -> bool:
        """Whether it is time for one."""
        late = self.every_seconds > 0 and time.monotonic() - self._last_time >= self.every_seconds
        return epoch_ends or late or (self.every_steps > 0 and step - self._last_step >= self.every_steps)

    def stop(self, signal: int) -> None:
        """Ask the run to end after its present step; safe to call from a signal handler."""
        self.signal = signal

    def save(self, step: int, take: Take, *, wait: bool = False) -> None:
        """Take a snapshot now and write it in the background; one that is still being written is not overtaken.

        A failure to write is raised by the next call, or at once with `wait`.
        """
        if self.busy and not wait:
            return
        self.flush()
        self._last_step, self._last_time = step, time.monotonic()
        self._pending = self._writer.submit(self._write, step, take())
        if wait:
            self.flush()

    def flush(self) -> None:
        """Wait until what was taken is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def settle(self) -> None:
        """Wait for the writer where an error is on its way already: its own is not told."""
        with suppress(ArtifactError):
            self.flush()

    def close(self) -> None:
        """End the thread that writes."""
        self._writer.shutdown()

    def _write(self, step: int, arrive: Callable[[], State]) -> None:
        tensors, values = arrive()
        content = artifacts.packed(tensors, {"format": FORMAT, "values": json.dumps(values)})
        written = self.folder / f"step-{step:09d}.safetensors"
        try:
            for torn in self.folder.glob(".step-*.tmp"):  # of a process that was killed while it wrote
                torn.unlink(missing_ok=True)
            files.write_bytes(written, content)
            unusable, self._unusable = [path for path in self._unusable if path != written], []
            for old in (*unusable, *[path for path in self.files() if path not in unusable][: -self.kept]):
                old.unlink(missing_ok=True)
        except OSError as error:
            raise ArtifactError(f"cannot write to {self.folder}: {error.strerror}") from None

    def latest(self) -> State | None:
        """The newest checkpoint that is whole; None where there is none."""
        self.damaged, self._unusable = [], []
        for path in reversed(self.files()):
            try:
                return read(path)
            except ArtifactError as error:
                self.damaged.append(str(error))
                self._unusable.append(path)
        return None


def read(path: Path) -> State:
    """One checkpoint, its checksum verified."""
    tensors, texts = artifacts.read_checked(path)
    if texts.get("format") != FORMAT:
        raise ArtifactError(f"{path} is not a checkpoint of this version of dllp")
    try:
        values = json.loads(texts.get("values", ""))
    except (ValueError, RecursionError):
        raise ArtifactError(f"{path}: its values are not valid JSON: the file is damaged") from None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path}: its values are no object: the file is damaged")
    return tensors, values
