"""Runs that are killed until they are done, against one that never was: every file must be the same.

    python -m tests.robustness.crash.harness --kills 300 --demo 2 --summary results/trust/summary.json

A process that has imported everything forks one child for each start of `dllp prune`; the signals are real, and the
child is the process that trains. `lost` counts runs that did not end, `differing` those that ended otherwise than the
run that was never killed, `orphans` those that left a file behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # what a run imports late, imported before the forks
from sklearn.datasets import load_digits

import dllp
from dllp.cli.main import main
from dllp.files import write_json
from tests.robustness.crash.faults import Fault, Kind

DEMO = "--data digits --model small_cnn --keep-flops 0.2 --particles 2 --granularity channel"
STARTS = 60
"""A run that is not done after so many starts is lost."""


@dataclass
class Subject:
    """One `dllp prune`, and what it gives when nothing happens to it."""

    name: str
    options: list[str]
    seconds: float = 0.0
    operations: int = 0
    digest: str = ""
    names: list[str] = field(default_factory=list)


class Harness:
    """Kills and resumes in `folder`, and counts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self.count = folder, random.Random(seed), Counter[str]()  # noqa: S311
        self.trouble: list[str] = []

    def subjects(self) -> list[Subject]:
        """Runs of a second, of both granularities, with and without checkpoints inside an epoch."""
        x, y = load_digits(return_X_y=True)
        data = self.folder / "data"
        data.mkdir()
        for part, places in (("train", slice(0, 160)), ("test", slice(160, 220))):
            np.save(data / f"{part}_x.npy", (x[places].reshape(-1, 8, 8) * 15).astype(np.uint8))
            np.save(data / f"{part}_y.npy", y[places].astype(np.int64))
        short = ["--data", str(data), "--epochs", "3", "--batch-size", "32", "--lr", "0.05", "--augment", "none"]
        channel = ["--model", "small_cnn", "--keep-flops", "0.4", *short]
        weight = ["--model", "mlp", "--granularity", "weight", "--gate-linear", "--keep-params", "0.3", *short]
        tiny = [*weight, "--epochs", "2", "--particles", "1", "--no-dense"]
        return [
            Subject("tiny", tiny),
            Subject("channel", channel),
            Subject("weight", [*weight, "--checkpoint-steps", "2"]),
            Subject("channel, checkpoints inside epochs", [*channel, "--no-dense", "--checkpoint-steps", "3"]),
        ]

    # ---- one start of the command

    def start(self, words: Sequence[str], out: Path, fault: Fault | None = None) -> int:
        """Fork a child that runs `dllp prune`; returns its process id."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        code = 99
        try:
            for number, name in ((1, "out"), (2, "err")):
                handle = os.open(self.folder / f"std{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, number)
            if fault is not None:
                fault.install()
            code = main(["prune", *words, "--out", str(out)])
            if fault is not None:
                (self.folder / "operations").write_text(str(fault.count))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def errors(self) -> list[str]:
        """Lines on the last child's standard error, but for warnings."""
        lines = (self.folder / "stderr").read_text().splitlines()
        return [line for line in lines if not line.startswith("dllp: warning:")]

    def reference(self, subject: Subject) -> None:
        """Run once in peace."""
        out = self.folder / "reference"
        began = time.monotonic()
        code = _wait(self.start(subject.options, out, Fault()))
        subject.seconds = time.monotonic() - began
        if code:
            raise SystemExit(f"{subject.name} failed by itself: {self.errors()}")
        subject.operations = int((self.folder / "operations").read_text())
        subject.digest, subject.names = digest(out), names(out)
        shutil.rmtree(out)

    def words(self, subject: Subject, out: Path) -> list[str]:
        """What a user would type now."""
        begun = (out / "config.yaml").is_file() and ((out / "checkpoints").is_dir() or (out / "run.json").is_file())
        return ["--resume"] if begun else subject.options

    # ---- one run, whatever happens to it

    def trial(self, subject: Subject, harms: Iterator[Harm]) -> None:
        """Start and harm one run until nothing is left to harm, let it end, and compare."""
        out = self.folder / "run"
        self.count["runs"] += 1
        story: list[str] = []
        for _ in range(STARTS):
            harm = next(harms, None)
            story.append(str(harm))
            if self._one_start(subject, out, harm):
                break
        else:
            self.count["lost"] += 1
            self.trouble.append(f"{subject.name}: not done after {story}: {self.errors()}")
            shutil.rmtree(out, ignore_errors=True)
            return
        if names(out) != subject.names:
            self.count["orphans"] += 1
            self.trouble.append(f"{subject.name}: {sorted(set(names(out)) ^ set(subject.names))} after {story}")
        elif digest(out) != subject.digest:
            self.count["differing"] += 1
            self.trouble.append(f"{subject.name}: another result after {story}")
        shutil.rmtree(out)

    def _one_start(self, subject: Subject, out: Path, harm: Harm | None) -> bool:
        """Whether the run is done, and nobody interfered with its end."""
        fault = Fault(harm.fault, harm.at) if harm is not None and harm.fault is not None else None
        child = self.start(self.words(subject, out), out, fault)
        if harm is not None and harm.signal:
            _sleep(child, harm.after)
            os.kill(child, harm.signal)  # it is not reaped yet: the id is still its own
        code = _wait(child)
        self.count["starts"] += 1
        killed = code == -signal.SIGKILL
        self.count["kills"] += killed
        self.count["kills inside writing"] += killed and fault is not None
        if not killed and (code or harm is None):
            self._check_end(code, harm, out)
        if code == 0 and harm is not None and harm.signal:
            subject.seconds *= 0.9  # it ended before its time: aim earlier
        return code == 0 and fault is None

    def _check_end(self, code: int, harm: Harm | None, out: Path) -> None:
        lines, stopped = self.errors(), harm is not None and harm.signal == signal.SIGTERM
        self.count["stops"] += stopped
        self.count["faults"] += harm is not None and harm.fault is not None
        if code == 0 or (stopped and code == -signal.SIGTERM):  # before the command was there to hear it
            return
        expected = 143 if stopped else 2
        if code != expected or len(lines) != 1 or not lines[0].startswith("dllp: "):
            self.count["unclear ends"] += 1
            self.trouble.append(f"{harm}: exit {code}, {lines[-3:]}")
        kept = any((out / "checkpoints").glob("*/*.safetensors")) and not (out / "run.json").exists()
        if kept and "--resume" not in lines[0]:
            self.count["unclear ends"] += 1
            self.trouble.append(f"{harm}: does not say how to go on: {lines}")


@dataclass(frozen=True)
class Harm:
    """A signal after so many seconds, or a fault at the `at`-th operation on the disk."""

    signal: int = 0
    after: float = 0.0
    fault: Kind | None = None
    at: int = 0


def timed(harness: Harness, subject: Subject, kills: int, stop: float = 0.15) -> Iterator[Harm]:
    """Signals at random moments, most of them SIGKILL."""
    for _ in range(kills):
        number = signal.SIGTERM if harness.random.random() < stop else signal.SIGKILL
        yield Harm(number, harness.random.uniform(0, subject.seconds))


def swept(harness: Harness, subject: Subject, kind: Kind, share: float) -> Iterator[Harm]:
    """One fault at every operation of the run, or at a share of them (their number varies a little with time)."""
    for at in range(1, subject.operations + 1):
        if harness.random.random() < share:
            yield Harm(fault=kind, at=at)


def digest(out: Path) -> str:
    """All that a run left, but for the time it took."""
    total = hashlib.sha256()
    for path in sorted(out.iterdir()):
        content = path.read_bytes()
        if path.suffix in (".json", ".jsonl"):
            content = re.sub(rb'"seconds": [0-9.e+-]+', b"", content)
        total.update(path.name.encode() + b"\0" + content)
    return total.hexdigest()


def names(out: Path) -> list[str]:
    """Every file below the folder."""
    return sorted(str(path.relative_to(out)) for path in out.rglob("*"))


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _sleep(child: int, seconds: float) -> None:
    """Until the time has come, or the child has ended but is not reaped."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(min(0.005, max(0.0, end - time.monotonic())))


def campaign(harness: Harness, kills: int, share: float, demo: int, echo: bool) -> None:
    """Faults at a share of the smallest run's operations and at some of the others', the demo, then random moments."""
    subjects = harness.subjects()
    for subject in subjects:
        harness.reference(subject)
    for subject in subjects:
        part = share if subject is subjects[0] else share / 20
        for kind in ("kill", "full", "denied", "lost"):
            for harm in swept(harness, subject, kind, part):
                harness.trial(subject, iter([harm]))
        _say(harness, echo)
    if demo:
        real = Subject("demo", DEMO.split())
        harness.reference(real)
        for _ in range(demo):
            harness.trial(real, timed(harness, real, 6))
            _say(harness, echo)
    while harness.count["kills"] < kills:
        subject = harness.random.choice(subjects)
        harness.trial(subject, timed(harness, subject, min(3, kills - harness.count["kills"])))
        _say(harness, echo and harness.count["runs"] % 20 == 0)


def _say(harness: Harness, echo: bool) -> None:
    if echo:
        print(dict(harness.count), harness.trouble[-1:], flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs in all, at the least")
    parser.add_argument(
        "--faults", type=float, default=1.0, help="share of the smallest run's disk operations that go wrong"
    )
    parser.add_argument("--demo", type=int, default=0, help="runs of the real demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--summary", type=Path, help="JSON file whose part `crash` is written")
    return parser.parse_args()


def report(harness: Harness, seconds: float) -> dict[str, Any]:
    """The figures, ready for JSON."""
    kinds = ("runs", "starts", "kills", "kills inside writing", "stops", "faults")
    bad = ("lost", "differing", "orphans", "unclear ends")
    figures: dict[str, Any] = {name.replace(" ", "_"): harness.count[name] for name in (*kinds, *bad)}
    versions = {"dllp": dllp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    command = " ".join(["python -m tests.robustness.crash.harness", *sys.argv[1:]])
    return {**figures, "seconds": round(seconds), "versions": versions, "command": command}


def run() -> int:
    given = arguments()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        harness = Harness(Path(folder), given.seed)
        campaign(harness, given.kills, given.faults, given.demo, echo=given.summary is not None)
    figures = report(harness, time.monotonic() - began)
    if given.summary is not None:
        whole = json.loads(given.summary.read_text()) if given.summary.exists() else {}
        write_json(given.summary, whole | {"crash": figures})
    print(json.dumps(figures | {"trouble": harness.trouble[:20]}))
    return int(any(figures[name] for name in ("lost", "differing", "orphans", "unclear_ends")))


if __name__ == "__main__":
    sys.exit(run())
