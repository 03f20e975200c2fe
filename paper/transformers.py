"""`dllp bench transformers`: transformers and a U-Net against other ways to make them small, at equal training.

For each task and seed one network is trained, or taken as it was published. Every row starts from it: DLLP prunes it in
the course of so many epochs, other methods cut it first and train what is left for as many, and dense it is trained on.
In all of them it teaches. Budgets are shares of the multiply-accumulates of the blocks; streams between blocks, which
all of them read, stay whole. Tests are read once, at the end; `--validation 1` reads the parts for choices instead.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllp import files
from dllp.api import prune, train_dense
from dllp.config import Config
from dllp.data import ArrayData, holdout, load
from dllp.devices import trees
from dllp.devices.device import environment, find_device
from dllp.errors import ConfigError
from dllp.evaluation import metrics
from dllp.method.likelihood import per_position
from dllp.posterior import logits_of
from dllp.report.page import markdown_table
from dllp.structure.groups import Structure, discover
from paper import texts, unet, unit_scores
from paper.provenance import now, source
from paper.render import made_by, plus_minus, provenance, spread
from paper.store import Store
from paper.summary import MARKDOWN, SUMMARY
from paper.tables import Variant

NAME = "transformers"
TITLE = "Transformers and a U-Net: DLLP against other methods at equal training"
SEEDS = (0, 1, 2)
STREAMS = ("output.dense", "o_proj", "down_proj", "fc2", "patch_embeddings.projection", "pooler.dense")
"""Ends of names of modules that write what all blocks read, or stand outside of them: their channels stay whole."""
SCORED = 32
"""Batches of training data by which Taylor, ShortGPT and Wanda judge."""
EVALUATED = 128


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


ENCODER = {"optimizer": "adamw", "lr": 1e-4, "batch_size": 32, "warmup": 1.0}
TASKS = {
    "trec": Task("MiniLM-L6 on TREC's six question classes", 5, 20, ENCODER, pair=0.55),
    "sst2": Task("MiniLM-L6 on SST-2", 3, 12, ENCODER, pair=0.55),
    "wikitext": Task(
        "SmolLM2-135M, recovered on public prose, WikiText-2", 0, 3,
        {"optimizer": "adamw", "lr": 2e-4, "batch_size": 8, "warmup": 0.1}, ("shortgpt", "wanda"), (0.2, 0.4),
        perplexity=True,
    ),
    "vit": Task(
        "ViT of DeiT-tiny's shape, patches of 4, on CIFAR-10", 100, 60,
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


@dataclass(frozen=True)
class Material:
    """A network before any of our training, and its data.

    Attributes:
        train: As :func:`dllp.prune` takes it.
        held: What rows are judged by.
        described: The data in a few words, for the line.
    """

    network: nn.Module
    train: Any
    held: Any
    described: dict[str, Any]


@dataclass(frozen=True)
class Folders:
    """Folders of data and trained networks."""

    texts: Path | None = None
    models: Path | None = None
    data_root: str | None = None


def material(name: str, folders: Folders, seed: int, held: str, *, fewer: int | None = None) -> Material:
    """The material of a task; `held` is `validation` or `test`, and `fewer` takes that many training examples only."""
    made = {"trec": _questions, "sst2": _questions, "wikitext": _prose, "vit": _images, "unet": _shapes}[name]
    found = made(name, folders, seed, held)
    if fewer is not None:
        train = found.train
        part = replace(train, x=train.x[:fewer], y=train.y[:fewer]) if isinstance(train, ArrayData) else None
        found = replace(found, train=part or trees.part(train, slice(0, fewer)))
    size = len(found.train) if isinstance(found.train, ArrayData) else trees.count(found.train)
    return replace(found, described={**found.described, "training": size, "held": held})


def _questions(name: str, folders: Folders, seed: int, held: str) -> Material:
    read, classes, length = (texts.trec, 6, 32) if name == "trec" else (texts.sst2, 2, 64)
    tokenizer, network = texts.minilm(_needed(folders.models, "--models"), classes, seed)
    folder = _needed(folders.texts, "--texts")
    train, judged = (texts.encoded(tokenizer, *read(folder, part), length) for part in ("train", held))
    return Material(network, train, judged, {"length": length})


def _prose(_: str, folders: Folders, seed: int, held: str) -> Material:
    tokenizer, network = texts.smollm2(_needed(folders.models, "--models"))
    folder = _needed(folders.texts, "--texts")
    text = texts.prose(folder)
    train, judged = (texts.windows(tokenizer, each, 512) for each in (text, texts.wikitext(folder, held)))
    return Material(network, train, judged, {"length": 512, "characters": len(text)})


def _images(_: str, folders: Folders, seed: int, held: str) -> Material:
    transformers: Any = texts.library()
    data = load("cifar10", root=folders.data_root)
    if not isinstance(data.train, ArrayData):
        raise ConfigError("CIFAR-10 is needed in memory")
    train, test = (data.train, data.test) if held == "test" else holdout(data.train, 5000, 0)
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=32,
        patch_size=4, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Material(transformers.ViTForImageClassification(config), train, test, {})


def _shapes(_: str, folders: Folders, seed: int, held: str) -> Material:
    torch.manual_seed(seed)
    sets = {"train": (4000, 1), "validation": (1000, 2), "test": (1000, 3)}
    train, judged = (unet.shapes(*sets[part]) for part in ("train", held))
    return Material(unet.UNet(), train, judged, {"side": unet.SIDE})


def _needed(folder: Path | None, option: str) -> Path:
    if folder is None:
        raise ConfigError(f"this row needs {option} DIR: paper/texts.py says what lies there")
    return folder


# ---- one task


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
            "dense_macs": dense, "macs": sizes, "particles": [self.judged([network]) for network in networks],
            "ensemble": self.judged(networks), "train_seconds": seconds, "config": result.config.as_dict(),
            "data": self.material.described, "start_epochs": self.begin, "history": brief(result.history),
        }  # fmt: skip

    def cut(self, row: Row) -> nn.Module:
        """The network that another method leaves, not trained since."""
        network, keep = self.started.to(self.device).eval(), self.kept(row.removed)
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
    def judged(self, networks: Sequence[nn.Module]) -> dict[str, float]:
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
    return [{name: record[name] for name in ("epoch", "phase", "loss", "cost", "lr")} for record in history]


# ---- the command


def execute(given: Mapping[str, Any], command: str, settings: Mapping[str, Any]) -> None:
    """Run the rows that are not finished, and write the table; `command` is what was typed."""
    for option in ("launcher", "shard", "data", "image_size"):
        if option in given:
            raise ConfigError(f"{NAME} runs its rows one after another on their own data: leave out --{option}")
    patterns, seeds = given.get("rows") or ["*"], tuple(given.get("seeds") or SEEDS)
    variant = Variant(given.get("epochs"), given.get("validation", 0), settings)
    chosen = [row for row in rows() if any(fnmatchcase(row.name, pattern) for pattern in patterns)]
    if not chosen:
        names = ", ".join(row.name for row in rows())
        raise ConfigError(f"{NAME} has no row {' '.join(patterns)!r}: choose from {names}")
    store = Store(Path(given.get("out", "results")) / f"{NAME}{variant.suffix}")
    plan = [(row, seed) for seed in seeds for row in chosen]
    finished = store.digests()
    if given.get("list"):
        for row, seed in plan:
            name = digest(row, seed, variant)
            print("done" if name in finished else "    ", name, row.name, "seed", seed)
        return
    try:
        if not given.get("summary_only"):
            _run(plan, store, variant, given, command)
    finally:
        written = write_summary(store, variant)
    if written and not given.get("quiet"):
        print((store.folder / MARKDOWN).read_text(encoding="utf-8"))
        print(f"results: {store.folder}")


def digest(row: Row, seed: int, variant: Variant) -> str:
    """Name of a job: every setting that decides its outcome."""
    task, changes = TASKS[row.task], [variant.epochs, variant.validation, dict(variant.settings)]
    text = json.dumps([row.name, seed, *changes, dict(task.config), task.start, task.epochs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _run(
    plan: Sequence[tuple[Row, int]], store: Store, variant: Variant, given: Mapping[str, Any], command: str
) -> None:
    """One job after another; those of one task and seed follow each other, and share their start."""
    device = find_device(given.get("device", "auto"))
    usual = "bfloat16" if device.type == "cuda" else "float32"
    machine = {"device": str(device), "precision": given.get("precision", usual)}
    note = {**environment(device), **source(), "command": command}
    lengths = {} if variant.epochs is None else {"start": variant.epochs, "epochs": variant.epochs}
    read, models = (Path(given[name]) if name in given else None for name in ("texts", "models"))
    folders = Folders(read, models, given.get("data_root"))
    held = "validation" if variant.validation else "test"
    if "again" in given:
        for row, seed in plan:
            if digest(row, seed, variant) in store.digests():
                store.supersede(digest(row, seed, variant), given["again"])
    # each is looked up when its turn comes: another process may have finished it meanwhile
    lacking = (job for job in plan if digest(*job, variant) not in store.digests())
    for (task, seed), jobs in groupby(lacking, lambda job: (job[0].task, job[1])):
        changes = {**lengths, **variant.settings}
        fewer = changes.pop("examples", None)
        if not TASKS[task].start:
            changes.pop("start", None)
        runner = Runner(task, material(task, folders, seed, held, fewer=fewer), seed, machine, **changes)
        for row, _ in jobs:
            line = runner.run(row)
            named = {"digest": digest(row, seed, variant), "row": row.name, "seed": seed, "task": task}
            store.add({**named, "method": row.method, "removed": row.removed, **line, "date": now(), **note})
            if not given.get("quiet"):
                quality = ", ".join(f"{name} {value:.4f}" for name, value in line["ensemble"].items())
                print(f"{row.name} seed {seed}: {quality}, {line['train_seconds']:.0f} s", flush=True)
        del runner  # its memory goes before the next one's comes


# ---- the table


def write_summary(store: Store, variant: Variant) -> bool:
    """Write summary.json and table.md from the lines of this variant; False where there is none."""
    known = {digest(row, line["seed"], variant): row for line in store.lines() for row in rows()}
    lines = [line for line in store.lines() if line["digest"] in known]
    if not lines:
        return False
    found = [row_summary(row, [line for line in lines if line["row"] == row.name], lines) for row in rows()]
    command = " ".join(["dllp bench", NAME, *variant.words])
    summary = {"title": TITLE, "rows": [each for each in found if each], "command": command, **provenance(lines)}
    files.write_json(store.folder / SUMMARY, summary)
    files.write_bytes(store.folder / MARKDOWN, markdown(summary).encode())
    return True


def row_summary(row: Row, lines: Sequence[Mapping[str, Any]], every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds; differences from the dense network are those of the same seed. Empty without a line."""
    if not lines:
        return {}
    dense = {line["seed"]: line["ensemble"] for line in every if line["row"] == f"{row.task}-dense"}
    quality = "perplexity" if TASKS[row.task].perplexity else "accuracy"
    values = {name: [line["ensemble"][name] for line in lines] for name in lines[0]["ensemble"]}
    pairs = [(line["ensemble"][quality], dense[line["seed"]][quality]) for line in lines if line["seed"] in dense]
    against = [own / other if quality == "perplexity" else 100 * (own - other) for own, other in pairs]
    return {
        "row": row.name, "task": row.task, "quality": quality, "seeds": [line["seed"] for line in lines],
        "macs": statistics.fmean(sum(line["macs"]) / line["dense_macs"] for line in lines),
        "seconds": statistics.fmean(line["train_seconds"] for line in lines),
        "values": {name: spread(found) for name, found in values.items()},
        "against_dense": spread(against) if against else None,
    }  # fmt: skip


def markdown(summary: Mapping[str, Any]) -> str:
    """A table for each task."""
    parts = [f"**{summary['title']}**; mean ± standard deviation over seeds."]
    for name, task in TASKS.items():
        here = [row for row in summary["rows"] if row["task"] == name]
        if not here:
            continue
        word, factor, digits = ("perplexity", 1, 3) if task.perplexity else ("accuracy (%)", 100, 2)
        against = "over dense" if task.perplexity else "against dense (points)"
        head = ["row", "MACs of dense", word, against, "NLL", "ECE (%)", "seconds", "seeds"]
        body = [
            [
                row["row"], f"{row['macs']:.3f}", plus_minus(row["values"][row["quality"]], factor),
                plus_minus(row["against_dense"], digits=digits),
                plus_minus(row["values"]["nll"], digits=4), plus_minus(row["values"].get("ece"), 100),
                f"{row['seconds']:.0f}", str(len(row["seeds"])),
            ]
            for row in here
        ]  # fmt: skip
        parts.append(f"{task.title}:\n\n{markdown_table(head, body)}")
    return "\n\n".join([*parts, made_by(summary)]) + "\n"
