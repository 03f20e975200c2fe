"""Step time, images/s and peak memory of DLLP on one device, as ratios to plain networks captured the same way.

    python benchmarks/train.py --network resnet56 --batch 512 --particles 2

Phases: `plain` n copies trained with SGD (once more with this library's fused norms), `dense` the same through the
state, `soft` with relaxed gates, `discrete` sliced at the budget. Times are medians over repeated windows, which
alternate so that all see the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from plain import PlainCopies

from dllp import zoo
from dllp.config import Config
from dllp.devices import fuse
from dllp.devices.cuda_graph import Capture
from dllp.prepare import make_gating
from dllp.structure.groups import discover
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.step import decide, prepare
from dllp.training.trainer import captured_step


def state_for(model: torch.nn.Module, config: Config, device: torch.device, gated: bool) -> RunState:
    particles = Particles.start(model, config, device)
    gating = None
    if gated:
        structure = discover(model, torch.randn(2, 3, 32, 32))
        gating = make_gating(model, structure, particles, config, None)
    return RunState(particles, gating, config, num_data=50_000, steps_per_epoch=97)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet56")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--particles", type=int, default=2)
    parser.add_argument("--keep-flops", type=float, default=0.45)
    parser.add_argument("--round-to", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--engine", default="auto")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = device.type == "cuda"
    model = zoo.build(options.network, num_classes=10)
    x = torch.randn(options.batch, 3, 32, 32, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if bf16 else x
    y = torch.randint(10, (options.batch,), device=device)
    config = Config(
        particles=options.particles, keep_flops=options.keep_flops, round_to=options.round_to, batch_size=options.batch,
        precision="bfloat16" if bf16 else "float32", init="fresh", engine=options.engine, device=str(device),
    ).resolved()  # fmt: skip

    runs: dict[str, Callable[[], None]] = {}
    memory: dict[str, float] = {}

    def add(name: str, build: Callable[[], Callable[[], None]]) -> None:
        if bf16:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_reserved()
        step = build()
        for _ in range(6):
            step()
        if bf16:
            torch.cuda.synchronize()
            memory[name] = (torch.cuda.max_memory_reserved() - base) / 2**20
        runs[name] = step

    def plain(fused: bool) -> Callable[[], None]:
        copies = PlainCopies(model, options.particles, device, bf16)
        if fused:
            copies.networks = fuse.fuse(copies.networks, x[:16])
        capture = Capture(copies.step, torch.Generator(device), enabled=bf16 and options.engine != "eager")
        return lambda: capture(x, y, key="plain")

    def dllp(phase: str) -> Callable[[], None]:
        state = state_for(model, config, device, gated=phase != "dense")
        state.step_index = 0 if phase == "dense" else int(0.2 * state.total_steps)
        if phase == "discrete":
            state.latents.logits.normal_(generator=state.latents.generator)
            decide(state)
        prepare(state, x, y)
        capture = captured_step(state)

        def step() -> None:
            capture(x, y, key=state.phase)
            states[phase] = capture.state

        return step

    states: dict[str, str] = {}
    add("plain", lambda: plain(False))
    if bf16 and fuse.available():
        add("plain, fused norms", lambda: plain(True))
    for phase in ("dense", "soft", "discrete"):
        add(phase, lambda phase=phase: dllp(phase))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.windows):
        for name, step in runs.items():
            if bf16:
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(options.steps):
                step()
            if bf16:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / options.steps)
    base = statistics.median(times["plain"])
    for name, values in times.items():
        median = statistics.median(values)
        print(json.dumps({
            "phase": name, "network": options.network, "particles": options.particles, "batch": options.batch,
            "engine": states.get(name, "graph" if bf16 else "eager"), "ms": round(1e3 * median, 3),
            "spread_ms": round(1e3 * (max(values) - min(values)), 3), "ratio": round(median / base, 3),
            "images_per_s": round(options.batch / median), "peak_mib": round(memory.get(name, 0)),
            "memory_ratio": round(memory[name] / memory["plain"], 3) if memory else None,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
