"""Training and judging the rows of one task and seed, all of which start from one network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp.api import prune, train_dense
from dllp.config import Config
from dllp.data import ArrayData
from dllp.devices import trees
from dllp.devices.device import find_device
from dllp.evaluation import metrics
from dllp.method.likelihood import per_position
from dllp.posterior import logits_of
from dllp.structure.groups import Structure, discover
from dllp.structure.slicing import copied
from paper.transformers import unit_scores
from paper.transformers.material import Material
from paper.transformers.rows import TASKS, Row

STREAMS = ("output.dense", "o_proj", "down_proj", "fc2", "patch_embeddings.projection", "pooler.dense")
"""Ends of names of modules that write what all blocks read, or stand outside of them: their channels stay whole."""
SCORED = 32
"""Batches of training data by which Taylor, ShortGPT and Wanda judge."""
EVALUATED = 128


class Runner:
    """Trains and judges the rows of one task and seed; the network that all start from is trained once."""

    def __init__(self, name: str, found: Material, seed: int, machine: Mapping[str, Any], **changes: Any) -> None:
        """`changes` are fields of the configuration instead of the task's; `start` and `epochs` its lengths."""
        self.task, self.material = TASKS[name], found
        self.begin, self.epochs = changes.pop("start", self.task.start), changes.pop("epochs", self.task.epochs)
        self.shared = {"seed": seed, **self.task.config, **machine, **changes}
        self.device = find_device(self.shared["device"])

    @cached_property
    def started(self) -> nn.Module:
        """The network that every row starts from."""
        if not self.begin:
            return self.material.network
        config = Config(**self.shared, epochs=self.begin, teacher="off")
        return train_dense(self.material.network, self.material.train, config, progress=False).model

    def config(self, row: Row) -> Config:
        """Of a row; a budget of the blocks is one of the whole network here."""
        values = {**self.shared, "epochs": self.epochs, "teacher": "given", "particles": row.particles}
        return Config(**values, keep_flops=self.kept(row.removed) if row.method == "dllp" else None)

    def kept(self, removed: float) -> float:
        """Share of all multiply-accumulates that is left where a share of the blocks' is removed."""
        structure = self.structure
        outside = sum(layer.macs for layer in structure.layers if self.task.blocks not in layer.name)
        return 1 - removed * (1 - outside / structure.flops.dense)

    @cached_property
    def structure(self) -> Structure:
        """Of the network that rows start from, its streams whole."""
        return discover(self.started, self.example, filter_fn=in_blocks)

    @property
    def example(self) -> Any:
        """Two examples as arguments by position."""
        batch = next(walk(self.material.train, 2))
        if isinstance(batch, dict):
            return tuple(value for name, value in batch.items() if name != "labels")
        return batch[0]

    def run(self, row: Row) -> dict[str, Any]:
        """Train a row, and judge it: the content of its line."""
        started, config, began = self.started, self.config(row), time.perf_counter()
        if row.method == "dllp":
            result = prune(started, self.material.train, config, filter_fn=in_blocks, progress=False)
        else:
            network = started if row.method == "dense" else self.cut(row)
            result = train_dense(network, self.material.train, config, teacher=started, progress=False)
        seconds = time.perf_counter() - began
        networks = [particle.network for particle in result.particles]
        dense = self.structure.flops.dense
        sizes = [discover(network, self.example, channels=False).flops.dense for network in networks]
        return {
            "dense_macs": dense, "macs": sizes, "particles": [self.quality([network]) for network in networks],
            "ensemble": self.quality(networks), "train_seconds": seconds, "config": result.config.as_dict(),
            "data": self.material.described, "start_epochs": self.begin, "history": brief(result.history),
        }  # fmt: skip

    def cut(self, row: Row) -> nn.Module:
        """The network that another method leaves, not trained since."""
        network, keep = copied(self.started).to(self.device).eval(), self.kept(row.removed)
        batches = list(islice(self.on_device(self.material.train, self.shared["batch_size"]), SCORED))
        if row.method == "shortgpt":
            return unit_scores.shortgpt(network, batches, row.removed).cpu()
        if row.method == "wanda":
            return unit_scores.wanda_neurons(network, self.structure, batches, keep).cpu()
        if row.method == "taylor":
            scores = unit_scores.taylor(network, self.structure, mean_loss, batches)
        else:
            scores = unit_scores.magnitude(network, self.structure)
        return unit_scores.chosen(network, self.structure, scores, keep).cpu()

    def on_device(self, data: Any, size: int) -> Iterator[Any]:
        """Batches of data in its own order."""
        for batch in walk(data, size):
            yield trees.moved(batch, self.device)

    @torch.no_grad()
    def quality(self, networks: Sequence[nn.Module]) -> dict[str, float]:
        """Quality of the mean prediction on the data that is held out: per example, token or pixel."""
        networks = [network.to(self.device).eval() for network in networks]
        if self.task.perplexity:
            losses = [(mean_loss(networks[0], b), len(b["labels"])) for b in self.on_device(self.material.held, 8)]
            nll = sum(float(loss) * count for loss, count in losses) / sum(count for _, count in losses)
            return {"nll": nll, "perplexity": float(torch.tensor(nll).exp())}
        answers, labels = [], []
        for batch in self.on_device(self.material.held, EVALUATED):
            pairs = [per_position(*logits_and_labels(network, batch)) for network in networks]
            answers.append(torch.stack([logits.double().softmax(-1) for logits, _ in pairs]).mean(0).cpu())
            labels.append(pairs[0][1].cpu())
        found = metrics.summary(torch.cat(answers), torch.cat(labels))
        return {name: found[name] for name in ("accuracy", "nll", "ece")}


def in_blocks(module: nn.Module, name: str) -> bool:
    """True for layers whose channels may be cut."""
    return not name.endswith(STREAMS)


def walk(data: Any, size: int) -> Iterator[Any]:
    """Batches of a dict or tuple of tensors, or of a split in memory, in their own order."""
    if isinstance(data, ArrayData):
        for start in range(0, len(data), size):
            part = slice(start, start + size)
            yield data.inputs(part), data.y[part]
        return
    for start in range(0, trees.count(data), size):
        yield trees.part(data, slice(start, start + size))


def logits_and_labels(network: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Of a batch as the network takes it."""
    if isinstance(batch, dict):
        return logits_of(network(**{k: v for k, v in batch.items() if k != "labels"})), batch["labels"]
    return logits_of(network(batch[0])), batch[1]


def mean_loss(network: Any, batch: Any) -> Tensor:
    """Of a language model its own, of each token but the first; of others the cross-entropy."""
    if isinstance(batch, dict) and batch["labels"].dim() > 1:
        return network(**batch).loss
    return F.cross_entropy(*per_position(*logits_and_labels(network, batch)))


def brief(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The epochs as a line keeps them."""
    return [
        {name: record[name] for name in ("epoch", "phase", "loss", "cost", "lr", "seconds", "engine")}
        for record in history
    ]
