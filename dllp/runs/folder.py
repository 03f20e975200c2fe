"""The folder of a run: the names of its files, and how it is written.

One process at a time writes, what is in it is whole, and a killed run goes on: `dllp prune` works in the folder itself
(:class:`RunFolder`), a result that is saved takes its place at once (:func:`new_folder`).

.lock                         held by the process that works here; without meaning once that is gone
config.yaml                   every setting, written before the first step
checkpoints/TRAINING/step-*   the last two of each training, while it goes on
log.jsonl                     a line for each image that is left out, and for each epoch
particle-K.safetensors        M_p of particle K; single pruned weights are stored as positions and values
reference-K.safetensors       M_0 of particle K
gates.safetensors             gate logits, decisions, slab precisions, noise
dense.safetensors             the dense network that the run is compared with
evaluation.json               metrics of every network
examples.safetensors          predictions for single test examples
run.json                      format, configuration, recipes, costs, history; written last: the run is finished
speed.json, corruptions.json, report.html, tensorboard/    added by other commands
"""

from __future__ import annotations

import fnmatch
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dllp import files
from dllp.errors import ArtifactError, Interrupted
from dllp.records import EpochRecord

LOCK, SETTINGS, CHECKPOINTS, LOG, RUN = ".lock", "config.yaml", "checkpoints", "log.jsonl", "run.json"
GATES, DENSE_FILE, EXAMPLES = "gates.safetensors", "dense.safetensors", "examples.safetensors"
EVALUATION, SPEED, CORRUPTIONS = "evaluation.json", "speed.json", "corruptions.json"
PROFILE = "profile.json"
PAGE, TENSORBOARD = "report.html", "tensorboard"
OWN = (
    LOCK, SETTINGS, CHECKPOINTS, LOG, RUN, GATES, DENSE_FILE, EXAMPLES, EVALUATION, SPEED, CORRUPTIONS, PROFILE, PAGE,
    TENSORBOARD, "particle-*.safetensors", "reference-*.safetensors", ".*.tmp",
)  # fmt: skip
"""Patterns of all files; an unfinished run's folder with any other file in it is never replaced."""
HOLDS_RUN = "{} already holds a run: choose another folder, or replace it (--overwrite)"
HOLDS_OTHERS = "{} holds other files: choose another folder for the run"


def particle_file(k: int) -> str:
    """Name of the file of M_p, the extracted network of particle k."""
    return f"particle-{k}.safetensors"


def reference_file(k: int) -> str:
    """Name of the file of M_0, particle k in its full shape."""
    return f"reference-{k}.safetensors"


def member(folder: Path, name: str) -> Path:
    """A file of a run folder; a link that leads out of the folder is an error."""
    return files.contained(folder, folder / name)


class RunFolder(AbstractContextManager["RunFolder"]):
    """The folder of one `dllp prune`, held by this process from the first moment that it exists.

    A new run touches nothing before :meth:`begin`. One that fails before its first checkpoint leaves nothing; later
    failures carry a note that says how to go on. `resume` goes on with the run in the folder, `overwrite` replaces it.
    """

    def __init__(self, folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.folder, self.resume, self.overwrite = folder, resume, overwrite
        self.checkpoints = folder / CHECKPOINTS
        self.command = f"dllp prune --resume --out {shlex.quote(str(folder))}"  # goes on with the run
        self.advice = ""  # the way out after an error, where the command alone would not help
        self._lock = FileLock(folder / LOCK)
        self._made: list[Path] = []  # folders that were not there before, the deepest first
        self._begun = False
        self._log: list[dict[str, Any]] = []
        self._left_out: dict[str, str] = {}

    @property
    def finished(self) -> bool:
        return (self.folder / RUN).is_file()

    @property
    def unfinished(self) -> bool:
        """True where a run was begun and can go on; a run.json is not looked for."""
        return (self.folder / SETTINGS).is_file() and self.checkpoints.is_dir()

    def __enter__(self) -> RunFolder:
        self._check_names()
        if self.folder.is_dir():
            self._hold()
        try:
            self._check_free()
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and (self._begun or (self.resume and isinstance(error, (Interrupted, KeyboardInterrupt)))):
            if not self.resume and not any(self.checkpoints.glob("*/*.safetensors")):
                with suppress(OSError):
                    self._clear()
                self._let_go()
                _remove_empty(self._made)
            else:
                error.add_note(self.advice or f"go on with {self.command}")
        if self._lock.is_locked:
            self._sweep()
        self._let_go()

    def _check_names(self) -> None:
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise ArtifactError(f"{self.folder} is a file: give a folder for the run")
        for place in (self.checkpoints, *self.checkpoints.glob("*")):  # files are written and removed there
            files.contained(self.folder, place)
        names = [path.name for path in self.folder.iterdir()]
        strange = any(not any(fnmatch.fnmatchcase(name, own) for own in OWN) for name in names)
        if not self.finished and (strange or (SETTINGS in names and not self.unfinished)):
            raise ArtifactError(HOLDS_OTHERS.format(self.folder))

    def _check_free(self) -> None:
        if self.resume and not self.finished and not self.unfinished:
            raise ArtifactError(f"{self.folder} holds no unfinished run: start one without --resume")
        if self.resume or self.overwrite:
            return
        if self.finished:
            raise ArtifactError(HOLDS_RUN.format(self.folder))
        if self.unfinished:
            ways = f"go on with {self.command}, or start over with --overwrite"
            raise ArtifactError(f"{self.folder} holds an unfinished run: {ways}")

    def _hold(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ArtifactError(f"another process works in {self.folder}: wait for it, or choose another") from None
        except OSError as error:
            raise ArtifactError(f"cannot write to {self.folder}: {error.strerror}") from None

    def _let_go(self) -> None:
        if self._lock.is_locked:
            with suppress(OSError):
                (self.folder / LOCK).unlink()  # while it is held: nobody else can mistake it for theirs
            self._lock.release()

    def begin(self, settings: bytes) -> None:
        """Take the folder, once all that can be checked beforehand was checked."""
        if self._begun:
            return
        try:
            if self.resume:
                self._left_out = self._known() | self._left_out
            else:
                self._take()
            self._sweep()
            self._begun = True
            self.checkpoints.mkdir(exist_ok=True)  # first: settings alone may be a user's own
        except OSError as error:
            raise ArtifactError(f"cannot write to {self.folder}: {error.strerror}") from None
        files.write_bytes(self.folder / SETTINGS, settings)

    def _take(self) -> None:
        self._made = _missing(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._lock.is_locked:
                self._hold()
                self._check_names()
                self._check_free()
        except BaseException:
            _remove_empty(self._made)
            raise
        self._clear()

    def start_log(self, training: str, history: Sequence[EpochRecord]) -> None:
        """The log as it was when `training` stood at its checkpoint: no epoch is in it twice."""
        self._log = [line for line in self._log if line["training"] != training]
        self._log += [{"training": training, **record.as_dict()} for record in history]
        images = [{"left_out": name, "reason": reason} for name, reason in self._left_out.items()]
        text = "".join(json.dumps(line) + "\n" for line in (*images, *self._log))
        files.write_bytes(self.folder / LOG, text.encode())

    def log(self, training: str, record: EpochRecord) -> None:
        """One more epoch."""
        self._log.append({"training": training, **record.as_dict()})
        self._append(self._log[-1])

    def leave_out(self, name: str, reason: str) -> None:
        """An image that is left out: in the log once, from the log's start on."""
        name = os.path.abspath(name)  # a run that goes on reads its data by absolute paths
        if name not in self._left_out:
            self._left_out[name] = reason
            if self._begun:
                self._append({"left_out": name, "reason": reason})

    def _known(self) -> dict[str, str]:
        """Images that the log of a run that goes on has already; a line that was torn says nothing."""
        found: dict[str, str] = {}
        path = member(self.folder, LOG)
        for line in files.read_bytes(path, files.cap()).splitlines() if path.exists() else ():
            with suppress(ArtifactError):
                value = files.parse_json(line, path)
                if isinstance(value, dict) and isinstance(value.get("left_out"), str):
                    found[value["left_out"]] = str(value.get("reason", ""))
        return found

    def _append(self, line: dict[str, Any]) -> None:
        try:
            with open(self.folder / LOG, "a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ArtifactError(f"cannot write {self.folder / LOG}: {error.strerror}; free some space") from None

    def _sweep(self) -> None:
        """Remove what a killed process left, and after the end the checkpoints."""
        for torn in (*self.folder.glob(".*.tmp"), *self.checkpoints.glob("*/.*.tmp")):
            with suppress(OSError):
                torn.unlink()
        if self.finished:
            shutil.rmtree(self.checkpoints, ignore_errors=True)

    def _clear(self) -> None:
        # in this order, so that what is half removed is neither an unfinished run, nor a finished one, nor a user's own
        for name in (SETTINGS, RUN):
            (self.folder / name).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _missing(folder: Path) -> list[Path]:
    """The folder and its parents that are not there yet, the deepest first."""
    return [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]


def _remove_empty(folders: Sequence[Path]) -> None:
    for path in folders:
        with suppress(OSError):
            path.rmdir()


@contextmanager
def new_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the place of `folder`, empty or a run, when the block ends well; gone otherwise."""
    holds_run = (folder / RUN).exists()
    if holds_run and not overwrite:
        raise ArtifactError(HOLDS_RUN.format(folder))
    if not holds_run and folder.is_dir() and any(folder.iterdir()):
        raise ArtifactError(HOLDS_OTHERS.format(folder))
    folder = folder.absolute()
    made = _missing(folder.parent)
    # the name is cut, so that the longest one that is allowed can still be written
    temporary = folder.with_name(f".{folder.name[:32]}-{secrets.token_hex(4)}")
    replaced = temporary.with_name(temporary.name + "-old")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if holds_run:
            os.rename(folder, replaced)
        os.rename(temporary, folder)
    except BaseException as error:
        if replaced.exists() and not folder.exists():
            os.rename(replaced, folder)
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(made)
        if isinstance(error, OSError):
            raise ArtifactError(f"cannot write {folder}: {error.strerror}; free some space or choose another") from None
        raise
    shutil.rmtree(replaced, ignore_errors=True)
