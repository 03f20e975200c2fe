"""The network and the data of each task, before any of our training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dllp.data import ArrayData, holdout, load
from dllp.devices import trees
from dllp.errors import ConfigError
from paper.transformers import texts, unet
from paper.transformers.rows import TASKS


@dataclass(frozen=True)
class Material:
    """A network before any of our training, and its data.

    Attributes:
        train: As :func:`dllp.prune` takes it.
        held: What rows are measured on.
        described: Where it comes from, for the line.
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


def material(
    name: str, folders: Folders, seed: int, held: str, *, fewer: int | None = None, length: int | None = None
) -> Material:
    """The material of a task; `held` is `validation` or `test`.

    For quick tries `fewer` takes that many training examples only, and `length` that many tokens of each.
    """
    if length is not None and not TASKS[name].length:
        raise ConfigError(f"{name} has no tokens: leave out length")
    made = {"trec": _questions, "sst2": _questions, "wikitext": _prose, "vit": _images, "unet": _shapes}[name]
    found = made(name, folders, seed, held, length or TASKS[name].length)
    if fewer is not None:
        train = found.train
        part = replace(train, x=train.x[:fewer], y=train.y[:fewer]) if isinstance(train, ArrayData) else None
        found = replace(found, train=part or trees.part(train, slice(0, fewer)))
    size = len(found.train) if isinstance(found.train, ArrayData) else trees.count(found.train)
    known = {"training": size, "held": held, "digests": [_digest(found.train), _digest(found.held)]}
    return replace(found, described={**found.described, **known})


def _digest(data: Any) -> str:
    """A name for the very numbers that are trained on, or measured on."""
    tensors = [data.x, data.y] if isinstance(data, ArrayData) else trees.tensors(data)
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().numpy().data)
    return total.hexdigest()[:16]


def _questions(name: str, folders: Folders, seed: int, held: str, length: int) -> Material:
    read, classes = (texts.trec, 6) if name == "trec" else (texts.sst2, 2)
    tokenizer, network = texts.minilm(_needed(folders.models, "--models"), classes, seed)
    folder = _needed(folders.texts, "--texts")
    train, test = (texts.encoded(tokenizer, *read(folder, part), length) for part in ("train", held))
    return Material(network, train, test, {"length": length, **texts.origin("minilm")})


def _prose(_: str, folders: Folders, seed: int, held: str, length: int) -> Material:
    tokenizer, network = texts.smollm2(_needed(folders.models, "--models"))
    folder = _needed(folders.texts, "--texts")
    text = texts.prose(folder)
    train, test = (texts.windows(tokenizer, each, length) for each in (text, texts.wikitext(folder, held)))
    return Material(network, train, test, {"length": length, "characters": len(text), **texts.origin("smollm2")})


def _images(_: str, folders: Folders, seed: int, held: str, __: int) -> Material:
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
    return Material(transformers.ViTForImageClassification(config), train, test, texts.origin())


def _shapes(_: str, folders: Folders, seed: int, held: str, __: int) -> Material:
    torch.manual_seed(seed)
    sets = {"train": (4000, 1), "validation": (1000, 2), "test": (1000, 3)}
    train, test = (unet.shapes(*sets[part]) for part in ("train", held))
    return Material(unet.UNet(), train, test, {"side": unet.SIDE})


def _needed(folder: Path | None, option: str) -> Path:
    if folder is None:
        raise ConfigError(f"this row needs {option} DIR: paper/transformers/texts.py says what lies there")
    return folder
