"""Feed damaged files to every reader: `python tests/robustness/fuzz/run.py --inputs 100000`.

The figures go into the part "fuzz" of results/trust/summary.json; other parts of that file stay as they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from readers import Reader, readers  # noqa: E402

from dllp.files import write_json  # noqa: E402

LED = (
    "run (channel)", "particle-0 (weight)", "config.yaml", "train_x.npy", "CIFAR-10 python", "CIFAR-10 binary archive",
    "image .png", "tar shard", "probabilities", "runs.jsonl", "checkpoint",
)  # fmt: skip
"""Readers that atheris gets: one of each kind."""
LIMIT = 20
"""Seconds after which a reader counts as hanging."""
MEMORY = "/dev/shm"  # noqa: S108 - files that live for one input
PACKAGES = ("dllp", "torch", "safetensors", "numpy", "pillow", "PyYAML")


class Hang(BaseException):
    """Not an Exception: no reader may swallow it."""


def _too_long(number: int, frame: Any) -> None:
    raise Hang(f"more than {LIMIT} s")


def feed(reader: Reader, inputs: Sequence[int]) -> dict[str, Any]:
    """Numbers of inputs by outcome, and the first few failures in full."""
    figures: dict[str, Any] = {"inputs": len(inputs), "refused": 0, "taken": 0, "uncaught": 0, "slowest_seconds": 0.0}
    failures: list[str] = []
    before = signal.signal(signal.SIGALRM, _too_long)
    start = time.perf_counter()
    try:
        for number in inputs:
            content = reader.damaged(number)
            begun = time.perf_counter()
            signal.alarm(LIMIT)
            try:
                figures["taken" if reader.check(content) else "refused"] += 1
            except (Exception, Hang) as error:
                figures["uncaught"] += 1
                if len(failures) < 3:
                    failures.append(f"{reader.name} {number}: {''.join(traceback.format_exception(error))[-1500:]}")
            finally:
                signal.alarm(0)
            figures["slowest_seconds"] = max(figures["slowest_seconds"], round(time.perf_counter() - begun, 3))
    finally:
        signal.signal(signal.SIGALRM, before)
    figures["seconds"] = round(time.perf_counter() - start, 1)
    return figures | ({"failures": failures} if failures else {})


def campaign(inputs: int, every: Sequence[Reader], first: int = 0) -> dict[str, Any]:
    """At least `inputs` damaged files, shared out among the readers."""
    total = sum(reader.share for reader in every)
    by_reader = {}
    for reader in every:
        count = -int(-inputs * reader.share // total)
        by_reader[reader.name] = feed(reader, range(first, first + count))
    names = ("inputs", "refused", "taken", "uncaught", "seconds")
    return {
        **{name: round(sum(figures[name] for figures in by_reader.values()), 1) for name in names},
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "readers": by_reader,
    }


def led_by_coverage(runs: int) -> dict[str, Any]:
    """The same readers under atheris, each in a process of its own; says so where atheris cannot be had."""
    if not runs or importlib.util.find_spec("atheris") is None:
        return {"skipped": "atheris is not installed" if runs else "not asked for"}
    figures: dict[str, Any] = {"version": importlib.metadata.version("atheris"), "readers": {}}
    for name in LED:
        with tempfile.TemporaryDirectory(prefix="dllp-atheris-") as folder:
            command = [sys.executable, str(Path(__file__).with_name("harness.py")), name, folder, f"-runs={runs}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        counts = re.findall(r"^#(\d+)\s.*cov: (\d+)", done.stdout, re.MULTILINE)
        inputs, covered = map(int, counts[-1]) if counts else (0, 0)
        whole = done.returncode == 0 and inputs >= runs
        figures["readers"][name] = {"inputs": inputs, "edges": covered, "uncaught": 0 if whole else 1}
        if not whole:
            figures["readers"][name]["failure"] = done.stdout[-3000:]
    figures["inputs"] = sum(own["inputs"] for own in figures["readers"].values())
    figures["uncaught"] = sum(own["uncaught"] for own in figures["readers"].values())
    return figures


def merge(path: Path, part: str, value: Any) -> None:
    """Put one part into a JSON file that others share."""
    try:
        whole = json.loads(path.read_bytes())
    except (OSError, ValueError):
        whole = {}
    write_json(path, {**(whole if isinstance(whole, dict) else {}), part: value})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--atheris", type=int, default=0, help="inputs for each reader that atheris leads")
    parser.add_argument("--first", type=int, default=0, help="number of the first input of each reader")
    parser.add_argument("--only", default="", help="part of a reader's name")
    parser.add_argument("--out", type=Path, help="summary.json to merge the figures into")
    given = parser.parse_args()
    warnings.simplefilter("error")
    os.fsync = lambda handle: None  # what is tested is reading
    with tempfile.TemporaryDirectory(prefix="dllp-fuzz-", dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        every = [reader for reader in readers(Path(folder)) if given.only in reader.name]
        figures = campaign(given.inputs, every, given.first)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    figures = {
        "command": " ".join(["python", "tests/robustness/fuzz/run.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), **versions},
        **figures,
    }
    figures["atheris"] = led = led_by_coverage(given.atheris)
    if given.out is not None:
        merge(given.out, "fuzz", figures)
    for name, own in figures["readers"].items():
        print(
            f"{name:36} {own['inputs']:7} inputs {own['taken']:6} taken {own['uncaught']:4} uncaught {own['seconds']} s"
        )
        for failure in own.get("failures", ()):
            print(failure)
    print("atheris:", json.dumps(led))
    print(f"{figures['inputs']} inputs, {figures['uncaught']} uncaught exceptions, {figures['seconds']} s")
    return 1 if figures["uncaught"] or led.get("uncaught") else 0


if __name__ == "__main__":
    raise SystemExit(main())
