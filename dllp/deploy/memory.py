"""Peak memory of one inference in a process of its own: `python memory.py FILE SIZE...` prints bytes.

Run as a plain file, so that the process holds nothing but the runtime: only it and the standard library are imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUNS = 3


def peak_bytes(path: Path, size: tuple[int, ...]) -> int | None:
    """Bytes that an .onnx or .pt2 file needs for inputs of a size, weights included; None where Linux is not there."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    # Freed blocks go back to the system at once, so that what is resident is what is used.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, str(path), *map(str, size)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)  # noqa: S603 # nosec B603
    return int(done.stdout.split()[-1]) if done.returncode == 0 and done.stdout.strip() else None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _growth(call: Callable[[], Any]) -> int:
    """How far the resident memory rises above its level before the call."""
    before = _status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark starts anew
    call()
    return _status("VmHWM:") - before


def _onnx(path: str, size: tuple[int, ...]) -> int:
    import numpy as np
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    x = np.zeros(size, dtype=np.float32)

    def work() -> None:
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        for _ in range(RUNS):
            session.run(None, {session.get_inputs()[0].name: x})

    return _growth(work)


def _pt2(path: str, size: tuple[int, ...]) -> int:
    import torch

    network = torch.export.load(path).module()
    weights = sum(t.nbytes for t in network.state_dict().values())
    with torch.inference_mode():
        network(torch.zeros(1, *size[1:]))  # kernels that are made on first use are no part of the network
        return weights + _growth(lambda: [network(torch.zeros(size)) for _ in range(RUNS)])


if __name__ == "__main__":
    measure = _onnx if sys.argv[1].endswith(".onnx") else _pt2
    print(measure(sys.argv[1], tuple(int(word) for word in sys.argv[2:])))
