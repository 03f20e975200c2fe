"""Where the seconds of `dllp prune` go: from the command to the final table, part by part, alone on the device.

    python benchmarks/whole_run.py --data cifar10 --data-root DIR --model resnet56 --particles 2 --epochs 60 \\
        --keep-flops 0.45 --batch-size 512 --lr 0.4 --no-dense --out runs/whole

Options are those of `dllp prune`; `--tries N`, before them, is how many kernels of each new shape cuDNN measures (10 in
PyTorch, 0: it takes the first). An epoch's *rest* is what it takes beyond the median one of its phase: libraries choose
kernels, a step is captured, gates are decided. A part is counted without the parts that it contains.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from statistics import median
from typing import Any
from unittest import mock

BEGAN = time.perf_counter()

import torch  # noqa: E402

from dllp import api  # noqa: E402
from dllp.cli import prune  # noqa: E402
from dllp.cli.main import main as dllp  # noqa: E402
from dllp.devices.cuda_graph import Capture  # noqa: E402
from dllp.evaluation import evaluate  # noqa: E402
from dllp.training import step, trainer  # noqa: E402

PARTS = {
    "data": (prune, "read_data"), "schedule (a first look at the structure)": (api, "settle"),
    "structure": (api, "prepare"), "training": (api, "train"), "epochs": (trainer, "train_epoch"),
    "decision": (trainer, "prepare"), "measuring at the decision": (step, "measure"),
    "captures": (Capture, "_capture"), "extraction": (api, "collect"), "evaluation": (evaluate, "measure"),
    "files": (api.Result, "write_networks"),
}  # fmt: skip


class Spans:
    """Seconds of parts, without those of parts within."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.within: list[float] = []
        self.epochs: list[float] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed; of the device, what it waits for."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.within.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                passed = time.perf_counter() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + passed - self.within.pop()
                if self.within:
                    self.within[-1] += passed
                if name == "epochs":
                    self.epochs.append(passed)

        return call


def main() -> int:
    words, tries = sys.argv[1:], None
    if words[:1] == ["--tries"]:
        tries, words = int(words[1]), words[2:]
    spans = Spans()
    loaded = time.perf_counter()
    with ExitStack() as stack:
        for name, (place, function) in PARTS.items():
            stack.enter_context(mock.patch.object(place, function, spans.around(name, getattr(place, function))))
        if tries is not None and torch.cuda.is_available():
            torch.backends.cudnn.benchmark_limit = tries
        code = dllp(["prune", *words])
    total = time.perf_counter() - BEGAN
    print(f"{'imports':45} {loaded - BEGAN:7.1f} s")
    for name, seconds in spans.seconds.items():
        print(f"{name:45} {seconds:7.1f} s")
    usual = median(spans.epochs)
    late = [(seconds - usual, number + 1) for number, seconds in enumerate(spans.epochs) if seconds > 1.5 * usual]
    for rest, number in late:
        print(f"{f'rest of epoch {number}':45} {rest:7.1f} s")
    print(f"{'everything else':45} {total - (loaded - BEGAN) - sum(spans.seconds.values()):7.1f} s")
    print(f"{'all':45} {total:7.1f} s; an epoch {usual:.2f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
