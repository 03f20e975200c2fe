"""What checkpoints cost: the share of training time that they add, with and without them interleaved in one run.

    python benchmarks/checkpoint.py --task demo
    python benchmarks/checkpoint.py --task resnet56 --device cuda

Prints one JSON line. `demo` is the demo's own training with a checkpoint at the end of each epoch, as by default;
windows of whole epochs with and without take turns, and the writer is waited for within its window. `resnet20` and
`resnet56` have CIFAR-10's size (50,000 random images of 32 x 32, batches of 512, two particles), and their gates stay
open: what is compiled for another phase, by whichever arm is the first in it, is no cost of checkpoints. Epochs are
long on a CPU, so there the time of a checkpoint, waited for, is set against the time of an epoch's steps.
`wall_share` and `cpu_share` are the median over windows of (with - without) / without; `waited_share` is an upper
bound: the whole time of a checkpoint, as if nothing went on beside it, over an epoch's. The target stands beside the
figures and is not asserted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dllp
from dllp import prepare, zoo
from dllp.api import healthy_snapshot
from dllp.config import Config
from dllp.data import ArrayData, Dataset, load
from dllp.devices import device as devices
from dllp.runs.checkpoints import Checkpoints
from dllp.structure.groups import discover
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.step import prepare as prepare_step
from dllp.training.trainer import captured_step, deterministic_kernels, train_epoch

TARGET = 0.02


def demo(device: str) -> tuple[Dataset, Config, str]:
    config = Config(
        keep_flops=0.2, particles=2, granularity="channel", epochs=30, batch_size=64, init="fresh", device=device
    )
    return load("digits"), config, "small_cnn"


def cifar10(device: str, network: str) -> tuple[Dataset, Config, str]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (50_000, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (50_000,), generator=generator)
    part = ArrayData(x, y, (0.5,) * 3, (0.25,) * 3, "crop-flip")
    precision = "bfloat16" if device.startswith("cuda") else "float32"
    config = Config(
        keep_flops=0.45, particles=2, epochs=60, init="fresh", device=device, precision=precision, open_until=1.0,
        ramp_until=1.0, discrete_at=1.0,
    )  # fmt: skip
    return Dataset("random", part, part, tuple("0123456789")), config, network


class Arm:
    """One training, epoch by epoch, with or without checkpoints."""

    def __init__(self, data: Dataset, config: Config, network: str, folder: Path | None) -> None:
        device = devices.find_device(config.device)
        model = zoo.build(network, data.num_classes, data.in_channels, image_size=data.image_size)
        self.batches = prepare.as_batches(data, config, device)
        example, _ = prepare.example_of(self.batches)
        particles = Particles.start(model, config, device)
        gating = prepare.make_gating(model, discover(model, example), particles, config, None)
        sizes = {"num_data": self.batches.num_examples, "steps_per_epoch": self.batches.steps}
        self.state = RunState(particles, gating, config, **sizes)
        self.capture = captured_step(self.state)
        self.held = None if folder is None else Checkpoints(folder)

    def window(self, epochs: int) -> tuple[float, float]:
        """Wall and processor seconds of so many epochs, the writer waited for."""
        self.synchronise()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(epochs):
            epoch = self.state.step_index // self.state.steps_per_epoch
            train_epoch(self.state, self.capture, epoch, self.batches, self.after_step)
        if self.held is not None:
            self.held.flush()
        self.synchronise()
        return time.perf_counter() - wall, time.process_time() - cpu

    def after_step(self, state: RunState) -> None:
        if self.held is not None:
            self.held.after_step(state.step_index, state.epoch_ends, lambda: healthy_snapshot(state))

    def steps(self, count: int) -> float:
        """Seconds of one step, the median of `count`."""
        found, batches = [], iter(self.batches.epoch(0))
        for _ in range(count):
            x, y = next(batches)
            self.synchronise()
            began = time.perf_counter()
            prepare_step(self.state, x)
            self.capture(x, y, key=self.state.phase)
            self.synchronise()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    def checkpoint(self, count: int) -> tuple[float, float]:
        """Seconds of one snapshot, which training waits for, and of one checkpoint until it is on the disk."""
        snapshots, wholes = [], []
        for k in range(count):
            self.synchronise()
            began = time.perf_counter()
            arrive = healthy_snapshot(self.state)
            snapshots.append(time.perf_counter() - began)
            assert self.held is not None
            self.held.save(10**6 + k, lambda arrive=arrive: arrive, wait=True)
            wholes.append(time.perf_counter() - began)
        return statistics.median(snapshots), statistics.median(wholes)

    def synchronise(self) -> None:
        if self.state.particles.device.type == "cuda":
            torch.cuda.synchronize()


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    data, config, network = demo(given.device) if given.task == "demo" else cifar10(given.device, given.task)
    config = config.resolved()
    arms = [Arm(data, config, network, place) for place in (None, folder)]
    figures: dict[str, Any] = {"steps_per_epoch": arms[1].state.steps_per_epoch}
    if given.windows:
        for arm in arms:
            arm.window(1)  # warm
        pairs = []
        for k in range(given.windows):
            found = {i: arms[i].window(given.epochs) for i in ((0, 1) if k % 2 else (1, 0))}
            pairs.append((found[0], found[1]))
        for place, name in enumerate(("wall", "cpu")):
            shares = [(held[place] - plain[place]) / plain[place] for plain, held in pairs]
            figures[f"{name}_share"] = round(statistics.median(shares), 4)
            figures[f"{name}_shares"] = [round(share, 4) for share in shares]
        epoch = statistics.median(plain[0] for plain, _ in pairs) / given.epochs
    else:
        epoch = arms[1].steps(given.steps) * arms[1].state.steps_per_epoch
    snapshot, whole = arms[1].checkpoint(9)
    held = arms[1].held
    assert held is not None
    return figures | {
        "epoch_seconds": round(epoch, 4),
        "snapshot_seconds": round(snapshot, 5),
        "checkpoint_seconds": round(whole, 5),
        "checkpoint_bytes": held.files()[-1].stat().st_size,
        "waited_share": round(whole / epoch, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("demo", "resnet20", "resnet56"), default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, help="pairs of windows; 0 for single steps (CIFAR-10 on a CPU)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of a window")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed without windows")
    given = parser.parse_args()
    if given.windows is None:
        given.windows = 0 if given.task != "demo" and given.device == "cpu" else 7
    if given.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, deterministic_kernels(False):
        figures = measure(given, Path(folder))
    hardware = torch.cuda.get_device_name() if given.device != "cpu" else platform.processor() or platform.machine()
    versions = {"dllp": dllp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {"task": given.task, "device": given.device, "hardware": hardware, "versions": versions}
    print(json.dumps(about | figures | {"target": TARGET}))


if __name__ == "__main__":
    main()
