"""Time and peak memory of one DLLP step over one step each of n plain copies of the network, both in one run.

    python benchmarks/step.py --network small_resnet --particles 2

Prints one JSON line. `time_ratio` is the median over interleaved windows of (DLLP window / plain window), gates soft:
the dearest phase. `memory_ratio` compares how far a process of its own grows at its peak above what it held before it
built networks and optimiser. Targets stand beside the figures and are not asserted: a busy machine moves the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TARGETS = {"time": 1.15, "memory": 1.1}
VARIANTS = ("plain", "dllp")


def peak_bytes() -> int:
    """Most memory this process has held: VmHWM, which unlike ru_maxrss does not inherit the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def stepper(variant: str, options: argparse.Namespace) -> Callable[[], None]:
    """One step of n networks with everything it needs resident."""
    import torch
    from plain import PlainCopies

    from dllp import zoo
    from dllp.config import Config
    from dllp.prepare import make_gating
    from dllp.structure.groups import discover
    from dllp.training.particles import Particles
    from dllp.training.state import RunState
    from dllp.training.step import prepare, step

    torch.manual_seed(0)
    device = torch.device("cpu")
    model = zoo.build(options.network, num_classes=10)
    x = torch.randn(options.batch, 3, options.side, options.side)
    y = torch.randint(10, (options.batch,))
    if variant == "plain":
        copies = PlainCopies(model, options.particles, device, bf16=False)
        return lambda: copies.step(x, y)
    config = Config(
        particles=options.particles, granularity=options.granularity, keep_flops=0.45, batch_size=options.batch,
        device="cpu", init="fresh", open_until=0.0,
    ).resolved()  # fmt: skip
    particles = Particles.start(model, config, device)
    gating = make_gating(model, discover(model, x[:2]), particles, config, None)
    state = RunState(particles, gating, config, num_data=50_000, steps_per_epoch=50_000 // options.batch)
    prepare(state, x, y)
    assert state.phase == "soft"
    return lambda: step(state, x, y)


def grown(variant: str, options: argparse.Namespace) -> int:
    """Growth of this process from before the networks to the peak of a few steps."""
    import torch

    torch.set_num_threads(options.threads)
    stepper(variant, argparse.Namespace(**(vars(options) | {"batch": 2, "side": 8})))()  # libraries load and settle
    base = peak_bytes()
    step = stepper(variant, options)
    for _ in range(4):
        step()
    return peak_bytes() - base


def memory(options: argparse.Namespace) -> dict[str, int]:
    """Bytes of each variant, measured in processes of their own.

    glibc is told to map every larger block by itself and give it back at once: what a process holds is then what its
    tensors hold, without the fragments that otherwise move such a figure by half.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    result = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--grown", variant]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603 # nosec B603
        result[variant] = int(done.stdout)
    return result


def times(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step in each window; windows of both variants alternate, so that both see the same machine."""
    import torch

    torch.set_num_threads(options.threads)
    steps = {variant: stepper(variant, options) for variant in VARIANTS}
    for step in steps.values():
        step()
        step()
    result: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for window in range(options.windows):
        for variant in VARIANTS if window % 2 else reversed(VARIANTS):
            began = time.perf_counter()
            for _ in range(options.steps):
                steps[variant]()
            result[variant].append((time.perf_counter() - began) / options.steps)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--granularity", default="channel", choices=["channel", "weight"])
    parser.add_argument("--particles", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--grown", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grown:
        print(grown(options.grown, options))
        return
    used = memory(options)
    measured = times(options)
    ratios = [d / p for d, p in zip(measured["dllp"], measured["plain"], strict=True)]
    import torch

    print(json.dumps({
        "network": options.network, "granularity": options.granularity, "particles": options.particles,
        "batch": options.batch, "side": options.side, "threads": options.threads,
        "time_ratio": round(statistics.median(ratios), 3), "time_target": TARGETS["time"],
        "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "memory_ratio": round(used["dllp"] / used["plain"], 3), "memory_target": TARGETS["memory"],
        "plain_ms": round(1e3 * statistics.median(measured["plain"]), 1),
        "dllp_ms": round(1e3 * statistics.median(measured["dllp"]), 1),
        "plain_mib": round(used["plain"] / 2**20, 1), "dllp_mib": round(used["dllp"] / 2**20, 1),
        "torch": torch.__version__, "machine": platform.machine(), "system": platform.system(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
