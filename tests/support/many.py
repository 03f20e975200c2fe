"""What several processes do in tests: twenty steps in float64 through all phases, saved as one state by the first.

python -m tests.support.many FOLDER CASE...        started for every rank by `start`
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dllp.api import share_reading
from dllp.config import Config
from dllp.data import StreamBatches
from dllp.devices.mesh import Place
from dllp.devices.ranks import Ranks, joined
from dllp.prepare import make_gating
from dllp.structure.groups import discover
from dllp.training.particles import Particles
from dllp.training.snapshot import Snapshot, snapshot
from dllp.training.state import RunState
from dllp.training.teacher import Teacher
from dllp.training.trainer import train
from tests.support import pictures
from tests.support.commands import ENVIRONMENT

STEPS, BATCH = 20, 12
BASE: dict[str, Any] = dict(
    particles=2, epochs=2, beta=0.3, epsilon=10.0, slab=5.0, lr=0.1, lr_end=0.02, warmup=0, weight_decay=0.05,
    keep_flops=0.6, lr_gates=0.1, device="cpu", open_until=0.2, ramp_until=0.4,
    discrete_at=0.6,
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"norms": True, "sync_batch_norm": True},
    "weight": {"granularity": "weight", "keep_flops": None, "keep_params": 0.5, "likelihood": "gaussian"},
    "mean": {"teacher": "posterior", "blocks": "all", "bandwidth": 3.0},
    "coordinate": {"blocks": "coordinate", "bandwidth": 3.0, "teacher": "given"},
    "uneven": {"norms": True, "sync_batch_norm": True, "batch": 11, "likelihood": "gaussian"},
    "four": {"particles": 4},
    "parts": {"accumulate": 3, "batch": 11, "likelihood": "gaussian", "teacher": "posterior"},
    "again": {"norms": True, "sync_batch_norm": True, "recompute": True},
    "streamed": {"epochs": 10, "batch": 11, "source": "stream"},
}
"""Changes to BASE; `norms`, `batch` and `source` are no part of Config."""


def network(norms: bool) -> nn.Module:
    norm = nn.BatchNorm2d(6) if norms else nn.Identity()
    end = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 3)
    return nn.Sequential(nn.Conv2d(2, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 5, 1), nn.Tanh(), *end).double()


class Fixed:
    """The same global batches for everyone."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.steps = STEPS // 2
        shape, kind = (STEPS, size, 2, 5, 5), torch.float64
        self.x, self.y = torch.randn(shape, generator=generator, dtype=kind), torch.arange(STEPS * size) % 3

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(epoch * self.steps + start_step, (epoch + 1) * self.steps):
            yield self.x[step], self.y.view(STEPS, -1)[step]


class Streamed:
    """Images on disk, one of which cannot be read, in float64: two batches in an epoch; each process reads its part."""

    def __init__(self, size: int, place: Place) -> None:
        self.held = tempfile.TemporaryDirectory()
        root = pictures.folder(Path(self.held.name) / "set")
        (root / "train" / "cat" / "007.jpg").write_bytes(b"")
        split = pictures.training(root, 5, "5%", workers=1)
        self.source = StreamBatches(split, size, seed=0)
        share_reading(self.source, place)
        self.steps, self.bad = self.source.steps, split.unreadable.reasons

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.source.epoch(epoch, start_step):
            yield x[:, :2].double(), y


def build(
    case: str, parallel: str, place: Place | None = None, ranks: Ranks | None = None
) -> tuple[RunState, Fixed | Streamed]:
    """A run of a case before its first step."""
    options = BASE | CASES[case] | {"parallel": parallel}
    norms, batch, source = (options.pop(*pair) for pair in (("norms", False), ("batch", BATCH), ("source", "fixed")))
    config = Config(**options).resolved()
    torch.manual_seed(1)
    model = network(norms)
    structure = discover(model.float(), torch.randn(2, 2, 5, 5))
    place = place or (ranks or Ranks()).place(config.particles, config.parallel)
    data = Fixed(batch) if source == "fixed" else Streamed(batch, place)
    particles = Particles.start(model.double(), config, torch.device("cpu"), place.own)
    torch.set_default_dtype(torch.float64)
    gating = make_gating(model, structure, particles, config, None)
    torch.set_default_dtype(torch.float32)
    teacher = Teacher(model, config, torch.device("cpu")) if config.teacher == "given" else None
    sizes = {"num_data": 40, "steps_per_epoch": data.steps}
    return RunState(particles, gating, config, **sizes, place=place, teacher=teacher), data


def run(case: str, parallel: str, ranks: Ranks | None = None) -> tuple[Snapshot, float]:
    """The state after the last step, the same for everyone, and the bytes that it took to get there."""
    trainer, data = build(case, parallel, ranks=ranks)
    train(trainer, data)
    sent = trainer.place.sent
    state = snapshot(trainer)
    if isinstance(data, Streamed):
        state[1]["bad"] = {Path(name).name: why for name, why in data.bad.items()}
        data.held.cleanup()
    return state, sent


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def start(
    size: int, words: list[str], *, port: int | None = None, environment: Mapping[int, dict[str, str]] | None = None,
    folders: Mapping[int, Path] | None = None,
) -> list[subprocess.Popen[str]]:  # fmt: skip
    """`python -m ...` once for each rank, as a launcher other than torchrun would start them."""
    shared = ENVIRONMENT | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(size),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=shared | {"RANK": str(k), "LOCAL_RANK": str(k)} | (environment or {}).get(k, {}),
            cwd=(folders or {}).get(k),
        )
        for k in range(size)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen[str]], timeout: float = 120) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of every rank."""
    try:
        ended = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        for name in cases:
            case, parallel = name.split("-")
            (tensors, values), sent = run(case, parallel, ranks)
            if ranks.rank == 0:
                values["sent"] = sent
                save_file(tensors, folder / f"{name}.safetensors")
                (folder / f"{name}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"]
    main(Path(sys.argv[1]), sys.argv[2:])
