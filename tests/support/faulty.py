"""`dllp` with a fault in one of its processes, named by $FAULT: KIND:RANK, and :STEP for a kill.

kill       SIGKILL after a step of the pruned training, in its first life under torchrun
version    another version of the package
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from dllp.cli import main
from dllp.devices import ranks
from dllp.runs.checkpoints import Checkpoints


def install(kind: str, step: int) -> None:
    after = Checkpoints.after_step

    def deadly(self: Checkpoints, now: int, *rest: Any, **options: Any) -> None:
        if now == step and not ranks.restarts():
            os.kill(os.getpid(), signal.SIGKILL)
        after(self, now, *rest, **options)

    if kind == "version":
        ranks.__version__ = "0.0.1"
    if kind == "kill":
        Checkpoints.after_step = deadly


if __name__ == "__main__":
    kind, rank, step, *_ = [*os.environ["FAULT"].split(":"), "0"]
    if os.environ["RANK"] == rank:
        install(kind, int(step))
    sys.exit(main.main())
