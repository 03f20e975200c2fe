"""The tasks of the transformer bench, and the rows of its table: one method at one budget on one task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paper.tables import Variant

NAME = "transformers"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Task:
    """One network on one kind of data.

    Attributes:
        start: Epochs that train the network before it is pruned; 0 where it comes trained.
        epochs: Of every row from there on.
        config: Shared by all trainings.
        methods: Those that are compared at each budget, besides DLLP.
        removed: Shares of the blocks' multiply-accumulates to remove.
        pair: Share that two particles remove each, where their ensemble is compared with one dense network.
        blocks: Part of a module's name that says that it is in a block; empty where all are.
        perplexity: The quality of a language model; of others it is accuracy.
        length: Tokens of an example; 0 where there are none.
    """

    title: str
    start: int
    epochs: int
    config: Mapping[str, Any]
    methods: tuple[str, ...] = ("magnitude", "taylor")
    removed: tuple[float, ...] = (0.5, 0.8)
    pair: float | None = None
    blocks: str = ".layer"
    perplexity: bool = False
    length: int = 0


ENCODER = {"optimizer": "adamw", "lr": 1e-4, "batch_size": 32, "warmup": 1.0}
TASKS = {
    "trec": Task("MiniLM-L6 on TREC's six question classes", 5, 20, ENCODER, pair=0.55, length=32),
    "sst2": Task("MiniLM-L6 on SST-2", 3, 12, ENCODER, pair=0.55, length=64),
    "wikitext": Task(
        "SmolLM2-135M, recovered on public prose, WikiText-2", 0, 3,
        {"optimizer": "adamw", "lr": 2e-4, "batch_size": 8, "warmup": 0.1}, ("shortgpt", "wanda"), (0.2, 0.4),
        perplexity=True, length=512,
    ),
    "vit": Task(
        "ViT of DeiT-tiny's shape, patches of 4, on CIFAR-10", 60, 40,
        {"optimizer": "adamw", "lr": 1e-3, "batch_size": 512, "weight_decay": 0.05, "warmup": 5.0}, removed=(0.5,),
    ),
    "unet": Task("U-Net on made shapes", 15, 20, {"lr": 0.1, "batch_size": 64}, removed=(0.5, 0.8), blocks=""),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One method at one budget on one task."""

    task: str
    method: str
    removed: float = 0.0
    particles: int = 1

    @property
    def name(self) -> str:
        parts = [self.task, self.method if self.particles == 1 else f"{self.method}{self.particles}"]
        return "-".join([*parts, f"{100 * self.removed:g}"] if self.removed else parts)


def rows() -> list[Row]:
    """All rows, those of one task together."""
    found = []
    for name, task in TASKS.items():
        found.append(Row(name, "dense"))
        found += [Row(name, method, removed) for removed in task.removed for method in ("dllp", *task.methods)]
        if task.pair is not None:
            found.append(Row(name, "dllp", task.pair, particles=2))
    return found


def digest(row: Row, seed: int, variant: Variant) -> str:
    """Name of a job: every setting that decides its outcome."""
    task, changes = TASKS[row.task], [variant.epochs, variant.validation, dict(variant.settings)]
    text = json.dumps([row.name, seed, *changes, dict(task.config), task.start, task.epochs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
