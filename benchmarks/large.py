"""What large networks cost: images/s, peak memory, and the share of a step that is neither forward nor backward.

    python benchmarks/large.py                                          # ResNet-50 at 224x224, batch 256, two particles
    python benchmarks/large.py --network small_resnet --side 32 --batch 64 --steps 2        # on a CPU

Prints one JSON line for each setting and phase, each measured in a process of its own: `plain`, with the batch in
`--parts` parts (`accumulate`), with blocks computed again (`recompute`), and with `both`. On CUDA: bfloat16,
channels_last, captured steps, and the allocator's peak; on a CPU: float32, and how far the process grows. Times are
medians over windows in which whole steps and forward with backward alone take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from step import peak_bytes

SETTINGS = {
    "plain": (False, False), "accumulate": (True, False), "recompute": (False, True), "both": (True, True),
}  # fmt: skip
WARM = 6
"""Steps before anything is measured: three are eager, then the step is captured."""


def held_bytes() -> int:
    """What this process holds now; its high-water mark starts anew where the system allows that."""
    mark = Path("/proc/self/clear_refs")
    if mark.exists():
        mark.write_text("5")
    return peak_bytes()


def measure(options: argparse.Namespace, setting: str, phase: str) -> dict[str, object]:
    """One setting in one phase."""
    import torch

    from dllp import zoo
    from dllp.config import Config
    from dllp.devices.cuda_graph import Capture
    from dllp.prepare import make_gating
    from dllp.structure.groups import discover
    from dllp.training.particles import Particles
    from dllp.training.state import RunState
    from dllp.training.step import backward, decide, gates, prepare
    from dllp.training.trainer import captured_step

    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    parts, again = SETTINGS[setting]
    config = Config(
        particles=options.particles, keep_flops=options.keep_flops, batch_size=options.batch, init="fresh",
        precision="bfloat16" if cuda else "float32", device=str(device), open_until=0.0,
        accumulate=options.parts if parts else 1, recompute=again,
    ).resolved()  # fmt: skip
    model = zoo.build(options.network, num_classes=options.classes, image_size=options.side)
    structure = discover(model, torch.randn(2, 3, options.side, options.side))
    base = held_bytes()
    particles = Particles.start(model, config, device)
    gating = make_gating(model, structure, particles, config, None)
    state = RunState(particles, gating, config, num_data=1_281_167, steps_per_epoch=1_281_167 // options.batch)
    x = torch.randn(options.batch, 3, options.side, options.side, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if cuda else x
    y = torch.randint(options.classes, (options.batch,), device=device)
    if phase == "discrete":
        state.latents.logits.normal_(generator=state.latents.generator)
        decide(state)
    prepare(state, x, y)
    assert state.phase == phase
    capture = captured_step(state)

    def step() -> None:
        capture(x, y, key=phase)

    for _ in range(WARM if cuda else 2):
        step()
    peak = torch.cuda.max_memory_reserved() if cuda else peak_bytes() - base
    z = gates(state)

    def forward_and_backward(x: torch.Tensor, y: torch.Tensor) -> None:
        backward(state, x, y, z)

    alone = Capture(forward_and_backward, state.latents.generator, enabled=cuda)
    whole, inner = times(step, lambda: alone(x, y, key=phase), options, torch.cuda.synchronize if cuda else None)
    return {
        "setting": setting, "phase": phase, "network": options.network, "side": options.side, "batch": options.batch,
        "particles": options.particles, "accumulate": config.accumulate, "recompute": again,
        "precision": config.precision, "engine": capture.state,
        "images_per_s": round(options.batch / statistics.median(whole), 1),
        "step_ms": round(1e3 * statistics.median(whole), 2),
        "spread_ms": round(1e3 * (max(whole) - min(whole)), 2),
        "peak_gib": round(peak / 2**30, 3),
        "outside_share": round(1 - statistics.median(i / w for i, w in zip(inner, whole, strict=True)), 4),
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(), "torch": torch.__version__,
    }  # fmt: skip


def times(
    step: Callable[[], None], inner: Callable[[], None], options: argparse.Namespace, wait: Callable[[], None] | None
) -> tuple[list[float], list[float]]:
    """Seconds of a whole step and of its forward and backward alone, window by window."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM if wait else 1):
        inner()
    for _ in range(options.windows):
        for work, seconds in zip((step, inner), found, strict=True):
            if wait:
                wait()
            began = time.perf_counter()
            for _ in range(options.steps):
                work()
            if wait:
                wait()
            seconds.append((time.perf_counter() - began) / options.steps)
    return found


def one(options: argparse.Namespace) -> None:
    """Measure what `--one` names; out of memory is a result too."""
    import torch

    torch.set_num_threads(options.threads)
    setting, phase = options.one.split(":")
    try:
        record = measure(options, setting, phase)
    except torch.OutOfMemoryError:
        record = {"setting": setting, "phase": phase, "network": options.network, "error": "out of memory"}
    print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--particles", type=int, default=2)
    parser.add_argument("--keep-flops", type=float, default=0.3405)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--phases", nargs="+", default=["soft", "discrete"], choices=["soft", "discrete"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(options)
    # freed blocks go back to the system at once: what a process holds is then what its tensors hold
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for phase in options.phases:
        for setting in options.settings:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", f"{setting}:{phase}"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603 # nosec B603
            print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
