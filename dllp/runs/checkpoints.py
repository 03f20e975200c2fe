"""Checkpoints on disk: written beside training, whole or not at all, the last two kept, the newest good one used.

Processes that share a run have one file between them: the first writes and reads it, and all go on from it. SIGTERM and
SIGINT end a run after a checkpoint.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from dllp import files
from dllp.devices.ranks import Ranks
from dllp.errors import ArtifactError, Interrupted
from dllp.runs import tensors

FORMAT = "dllp-checkpoint-3"
State = tuple[dict[str, Tensor], dict[str, Any]]
Take = Callable[[], Callable[[], State]]  # takes a snapshot; what it returns waits until the copies have arrived


class Checkpoints:
    """The checkpoints of one training in one folder.

    Args:
        folder: Where they lie; made when the first one is written. None on processes of a run but the first.
        every_steps, every_minutes: Besides the end of each epoch, whichever comes first; 0 for never.
        kept: How many are kept.
        on_begin: Called when all else was checked, before the folder is looked into.
        ranks: The processes that share the run; all call the same methods at the same steps.

    Attributes:
        damaged: Files that :meth:`latest` could not use, with the reason.
        signal: The argument of :meth:`stop`, here or on another process.
    """

    def __init__(
        self, folder: str | Path | None, *, every_steps: int = 0, every_minutes: float = 10.0, kept: int = 2,
        on_begin: Callable[[], None] | None = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.folder = None if folder is None else Path(folder)
        self.kept, self.on_begin, self.ranks = kept, on_begin, ranks or Ranks()
        self.every_steps, self.every_seconds = every_steps, 60 * every_minutes
        self.damaged: list[str] = []
        self.signal: int | None = None
        self._unusable: list[Path] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._last_step, self._last_time = 0, time.monotonic()

    def files(self) -> list[Path]:
        """Checkpoints, oldest first."""
        return [] if self.folder is None else sorted(self.folder.glob("step-*.safetensors"))

    def begin(self) -> None:
        """Training starts now."""
        self.ranks.together(self._begin)

    def _begin(self) -> None:
        if self.folder is not None and self.folder.exists() and not self.folder.is_dir():
            raise ArtifactError(f"checkpoints cannot be written to {self.folder}: it is no folder, give another")
        if self.on_begin is not None:
            self.on_begin()

    def after_step(self, step: int, epoch_ends: bool, take: Take, *, last: bool = False) -> None:
        """Write a checkpoint if one is due, waiting for the `last` one; after :meth:`stop`, write it and raise."""
        asked, wanted = self.ranks.steps.maximum(self.signal or 0, int(last or self._due(step, epoch_ends)))
        if asked or wanted:
            self.save(step, take, wait=last or bool(asked))
        if asked:
            self.signal = asked
            raise Interrupted(asked)

    def _due(self, step: int, epoch_ends: bool) -> bool:
        """True when it is time for one, and none is still being written."""
        if self.folder is None or (self._pending is not None and not self._pending.done()):
            return False
        late = self.every_seconds > 0 and time.monotonic() - self._last_time >= self.every_seconds
        return epoch_ends or late or (self.every_steps > 0 and step - self._last_step >= self.every_steps)

    def stop(self, number: int) -> None:
        """Ask the run to end after its present step; safe to call from a signal handler."""
        self.signal = number

    def save(self, step: int, take: Take, *, wait: bool = False) -> None:
        """Take a snapshot now and write it in the background.

        A failure to write is raised by the next call, or at once with `wait`.
        """
        if self.ranks.alone:
            self.flush()  # before memory is taken for another; processes of one run must take theirs together first
        taken = take()
        self.flush()
        self._last_step, self._last_time = step, time.monotonic()
        if self.folder is not None:
            self._pending = self._writer.submit(self._write, self.folder, step, taken)
        if wait:
            self.flush()

    def flush(self) -> None:
        """Wait until what was taken is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def settle(self) -> None:
        """Wait for the writer where an error is on its way already: its own is not reported."""
        with suppress(ArtifactError):
            self.flush()

    def close(self) -> None:
        """End the thread that writes."""
        self._writer.shutdown()

    def _write(self, folder: Path, step: int, arrive: Callable[[], State]) -> None:
        found, values = arrive()
        content = tensors.packed(found, {"format": FORMAT, "values": json.dumps(values)})
        written = folder / f"step-{step:09d}.safetensors"
        try:
            for torn in folder.glob(".step-*.tmp"):  # of a process that was killed while it wrote
                torn.unlink(missing_ok=True)
            files.write_bytes(written, content)
            unusable, self._unusable = [path for path in self._unusable if path != written], []
            for old in (*unusable, *[path for path in self.files() if path not in unusable][: -self.kept]):
                old.unlink(missing_ok=True)
        except OSError as error:
            raise ArtifactError(f"cannot write to {folder}: {error.strerror}") from None

    def latest(self) -> State | None:
        """The newest checkpoint that is whole, as the first process reads it; None where there is none."""
        return self.ranks.world.broadcast_object(self.ranks.together(self._latest))

    def _latest(self) -> State | None:
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
    found, texts = tensors.read_checked(path)
    if texts.get("format") != FORMAT:
        raise ArtifactError(f"{path} is not a checkpoint of this version of dllp")
    with suppress(ValueError, RecursionError):
        values = json.loads(texts.get("values", ""))
        if isinstance(values, dict):
            return found, values
    raise ArtifactError(f"{path}: its values are no JSON object: the file is damaged")


def interrupt(number: int) -> None:
    """End at once: nothing is lost."""
    raise Interrupted(number)


class Signals(AbstractContextManager["Signals"]):
    """Within the block the first SIGTERM or SIGINT calls `stop` with its number; a second one kills.

    While a training runs, `stop` ends it after its present step.
    """

    def __init__(self) -> None:
        self.stop: Callable[[int], None] = interrupt
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and shells ask for
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore further signals: the run ends by itself, and its launcher must not cut its error message short."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self.stop(number)
