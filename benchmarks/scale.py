"""What one step on several processes costs: time, memory, and bytes sent against the formulas of docs/scale.md.

    python benchmarks/scale.py --network resnet20 --ranks 1 2 4 --out results/scale/cpu.jsonl

One JSON line for each layout, gates soft: the phase in which most is sent. `sent` is what the package counts,
`wire` what the kernel counts on a loopback of the run's own, headers and all, summed over the processes; it needs root
and `unshare`, and is left out elsewhere. Processes share the machine's cores: times say what sharing costs, not what
more machines would gain.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WARM = 2
RANK = ("RANK", "LOCAL_RANK")


def predicted(particles: int, width: int, gates: int, lines: int, shards: int, itemsize: int = 4) -> float:
    """Bytes that each process sends in a step while gates are soft and one backward serves both (docs/scale.md)."""
    own = particles // lines
    summed = 2 * (shards - 1) / shards * own * (width + gates + 3)
    gathered = (lines - 1) * own * 2 * width + 2 * (lines - 1) / lines
    return itemsize * (summed + gathered)


def on_loopback() -> int:
    """Bytes that left through the loopback interface of this network namespace."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """One process's part; the first returns the record."""
    import torch

    from dllp import zoo
    from dllp.config import Config
    from dllp.devices.ranks import joined
    from dllp.prepare import make_gating
    from dllp.structure.groups import discover
    from dllp.training.particles import Particles
    from dllp.training.state import RunState
    from dllp.training.step import prepare, step

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = zoo.build(options.network, num_classes=10)
    x, y = torch.randn(options.batch, 3, options.side, options.side), torch.randint(10, (options.batch,))
    config = Config(
        particles=options.particles, granularity=options.granularity, keep_flops=0.45, batch_size=options.batch,
        device="cpu", init="fresh", open_until=0.0, parallel=options.parallel,
    ).resolved()  # fmt: skip
    with joined() as ranks:
        place = ranks.place(config.particles, config.parallel)
        particles = Particles.start(model, config, torch.device("cpu"), place.own)
        gating = make_gating(model, discover(model, x[:2]), particles, config, None)
        state = RunState(particles, gating, config, num_data=50_000, steps_per_epoch=1000, place=place)
        own_x, own_y, state.share = place.shard(x, y)
        prepare(state, own_x, own_y)
        for _ in range(WARM):
            step(state, own_x, own_y)
        place.everyone.maximum(0)
        time.sleep(0.1)  # what others still acknowledge
        sent, wire, seconds = place.sent, on_loopback(), []
        for _ in range(options.steps):
            began = time.perf_counter()
            step(state, own_x, own_y)
            seconds.append(time.perf_counter() - began)
        sent = (place.sent - sent) / options.steps
        place.everyone.maximum(0)
        wire = (on_loopback() - wire) / options.steps
        rows, gates = particles.rows, state.latents.logits.shape[1]
        formula = predicted(config.particles, rows.shape[1], gates, place.rows.size, place.shards.size)
        memory = place.everyone.maximum(peak_bytes())[0]
        if ranks.rank:
            return None
        return {
            "network": options.network, "granularity": options.granularity, "particles": config.particles,
            "batch": options.batch, "ranks": ranks.world.size, "parallel": options.parallel, "P": rows.shape[1],
            "U": gates, "formula_bytes": round(formula), "sent_bytes": round(sent),
            "wire_bytes": round(wire / ranks.world.size) if options.private else None,
            "step_ms": round(1e3 * statistics.median(seconds), 1), "peak_mib": round(memory / 2**20, 1),
            "torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count(),
        }  # fmt: skip


def layouts(ranks: list[int], particles: int) -> list[tuple[int, str]]:
    """Every way to share the work that differs from the others."""
    found = [(size, "data") for size in ranks]
    found += [(size, "particles") for size in ranks if size > 1 and particles % size == 0]
    return found + [(size, "both") for size in ranks if 1 < math.gcd(size, particles) < size]


def launched(size: int, parallel: str, private: bool) -> dict[str, Any]:
    """The record of one layout, from processes of their own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--parallel", parallel]
    if size == 1:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 # nosec B603
        return json.loads(done.stdout)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    start = [sys.executable, __file__, *sys.argv[1:], "--parallel", parallel, "--start", f"{size}:{port}"]
    if private:
        start = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *start, "--private"]
    done = subprocess.run(start, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 # nosec B603
    return json.loads(done.stdout)


def start(options: argparse.Namespace) -> int:
    """All processes of one layout."""
    size, port = options.start.split(":")
    command = [sys.executable, __file__, *sys.argv[1:], "--start", ""]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size}
    each = [shared | dict.fromkeys(RANK, str(rank)) for rank in range(int(size))]
    processes = [subprocess.Popen(command, env=environment) for environment in each]  # noqa: S603 # nosec B603
    return max([process.wait() for process in processes])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--granularity", default="channel", choices=["channel", "weight"])
    parser.add_argument("--particles", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parallel", choices=["data", "particles", "both"], help=argparse.SUPPRESS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--private", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        return start(options)
    if options.parallel:
        record = measure(options)
        if record is not None:
            print(json.dumps(record))
        return 0
    private = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip")))
    for size, parallel in layouts(options.ranks, options.particles):
        line = json.dumps(launched(size, parallel, private))
        print(line, flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as handle:
                handle.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
