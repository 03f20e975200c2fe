"""What a command works on: the data, the network, and the configuration that suits both."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dllp import files, zoo
from dllp.api import Result
from dllp.baselines import find as find_method
from dllp.config import Config
from dllp.data import ArrayData, Dataset, stratified
from dllp.data import load as load_data
from dllp.data.cifar10 import Progress
from dllp.data.ood import without
from dllp.data.unreadable import MAX_BAD, Report, parse_fraction
from dllp.errors import ArtifactError, ConfigError, DataError, first_line
from dllp.evaluation.evaluate import DENSE
from dllp.runs import artifacts

SETTINGS, DENSE_FILE = "config.yaml", "dense.safetensors"
DLLP = "dllp"
SMALL = 10_000
"""Training sets with fewer examples get batches of 64."""


@dataclass(frozen=True)
class Task:
    """The part of a run's settings that is not :class:`dllp.Config`.

    Args:
        data: `digits` (embedded), `cifar10`, or a folder: train/<class>/*.jpg and val or test/<class>/*.jpg, of any
            size; the same as tar shards; or train_x.npy, train_y.npy, test_x.npy and test_y.npy.
        model: A network's name, or package.module:factory, called without arguments.
        weights: Trained weights to start from, .safetensors or .pt, read without running any code of theirs;
            `--init FILE` is the same.
        preset: `default`, the `paper`'s own setting, or `short` for 5 to 20 epochs from trained weights; single
            options still win.
        data_root: Folder in which `cifar10` is looked for.
        image_size: Side to which images of class folders and shards are resized; other data are taken as they are.
        augment: Augmentation of training images; by default crop-flip for colour images in memory, resized-crop for
            large folders and shards, which are streamed.
        workers: Processes that decode streamed images; by default one for each core, up to 16.
        max_bad: Share of a split's images that may be unreadable; they are named and left out.
        leave_out: Classes by name, separated by commas, that training never shows: see --ood of dllp evaluate.
        validation: Fraction or number of training examples to hold out, and to evaluate on instead of the test set.
        dense: Compare with the dense network: the given one, or one trained by the same recipe where init is fresh.
        method: `dllp`, or one of the methods that `dllp methods` lists, trained by the same recipe to the same budget;
            with hyperparameters, for example `polarization:strength=1e-4,t=1.1`.
        finetune_epochs: Epochs of training after the cut, for other methods than dllp.
    """

    data: str = "digits"
    model: str = "small_cnn"
    weights: str | None = None
    preset: Literal["default", "paper", "short"] = "default"
    data_root: str | None = None
    image_size: int | None = None
    augment: Literal["none", "crop-flip", "resized-crop"] | None = None
    workers: int | None = None
    max_bad: str = MAX_BAD
    leave_out: str = ""
    validation: int | float = 0
    dense: bool = True
    method: str = DLLP
    finetune_epochs: int = 0

    def __post_init__(self) -> None:
        parse_fraction(self.max_bad)
        if self.finetune_epochs and self.method == DLLP:
            raise ConfigError(
                "finetune_epochs is for other methods: dllp trains on within its own epochs, leave it out or give 0"
            )
        if self.method != DLLP:
            find_method(self.method)

    @property
    def split(self) -> str:
        """Name of the part that the run is evaluated on."""
        return "validation" if self.validation else "test"

    @property
    def is_code(self) -> bool:
        """Whether the network comes from an import."""
        return ":" in self.model

    def load(self, seed: int, progress: Progress | None = None, report: Report | None = None) -> Dataset:
        """The data set, with the held-out part in place of the test split where one is asked for."""
        names = ("image_size", "augment", "validation", "workers", "max_bad")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        data = load_data(self.data, root=self.data_root, seed=seed, progress=progress, report=report, **options)
        if self.leave_out:
            data = without(data, tuple(name.strip() for name in self.leave_out.split(",")))
        return replace(data, test=data.validation) if self.validation and data.validation is not None else data

    def anchored(self) -> Task:
        """The same, its folders by absolute paths: it can be read from anywhere."""
        found = {name: getattr(self, name) for name in ("data", "data_root")}
        paths = {name: str(Path(p).resolve()) for name, p in found.items() if p and Path(p).is_dir()}
        if self.weights:
            paths["weights"] = str(Path(self.weights).resolve())
        for path in paths.values():
            files.check_name(path)  # the current folder may be what cannot be written down
        return replace(self, **paths)

    def config(self, values: Mapping[str, Any], data: Dataset | None = None) -> Config:
        """Defaults, what suits the data, the preset, what the user gave: the later wins."""
        suited: dict[str, Any] = {}
        if self.method != DLLP:
            method = find_method(self.method)
            method.refuse_priors(values)
            suited = {"granularity": method.granularity, "particles": 1}
            for name, wanted in suited.items():
                if values.get(name, wanted) != wanted:
                    raise ConfigError(f"method {method.name} has {name} = {wanted}: leave out {name}, or give {wanted}")
            suited["weight_decay"] = Config().resolved().weight_decay  # the dense network's, also for single weights
        if data is not None and not data.train.is_classification:
            suited["task"] = "regression"
        if self.weights:
            suited["init"] = "given"
            if values.get("init", "given") != "given":
                raise ConfigError("weights are given, but init = fresh would throw them away: leave out one of them")
        if self.preset == "paper":
            return Config.paper(**(suited | dict(values)))
        short = self.preset == "short"
        if not self.is_code and not self.weights:
            if short:
                raise ConfigError("preset = short starts from trained weights: give --init FILE, or a network of yours")
            suited["init"] = "fresh"  # a network by name has no weights worth starting from
        if self.data == "digits" and not short:
            suited["epochs"] = 30
        if data is not None and len(data.train) < SMALL:
            suited["batch_size"] = 64
        return (Config.short if short else Config)(**(suited | dict(values)))

    def network(self, num_classes: int, in_channels: int, image_size: int, seed: int) -> nn.Module:
        """The network, its random weights fixed by the seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if self.is_code:
                return imported(self.model)
            return zoo.build(self.model, num_classes, in_channels, image_size=image_size)

    def check_network(self, folder: Path, num_classes: int, in_channels: int, image_size: int) -> None:
        """Raise unless a run folder's first reference has the shapes of this network; no memory is taken for it."""
        if not self.is_code:
            with torch.device("meta"):
                network = zoo.build(self.model, num_classes, in_channels, image_size=image_size)
            artifacts.check_declared(folder / "reference-0.safetensors", network)


def imported(path: str) -> nn.Module:
    """What `package.module:factory` returns; the current folder is importable."""
    module_name, _, factory_name = path.partition(":")
    here = os.getcwd()  # the user's code may leave it
    sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        model = factory()
    except Exception as error:  # whatever the user's code raises is the user's to repair, and one line says what
        raise ConfigError(f"model {path!r} cannot be made ({type(error).__name__}: {first_line(error)})") from error
    finally:
        if here in sys.path:
            sys.path.remove(here)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {path!r} gives a {type(model).__name__}: it must return a torch.nn.Module")
    return model


def describe(data: Dataset) -> dict[str, Any]:
    """What a later evaluation must know about the training data, ready for JSON."""
    return {
        "num_classes": data.num_classes,
        "in_channels": data.in_channels,
        "image_size": data.image_size,
        "shape": list(data.train.shape),
        "dtype": str(data.train.dtype).removeprefix("torch."),
        "classes": list(data.classes),
        "mean": data.train.mean and list(data.train.mean),
        "std": data.train.std and list(data.train.std),
    }


def described(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What :func:`describe` wrote, and the dense network's noise, out of a run.json by anyone."""
    known, noise = run["info"].get("data", {}), run["info"].get("dense_noise")
    number = (int, float)
    checks: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("num_classes", "in_channels", "image_size"), lambda v: type(v) is int and 1 <= v <= 2**20),
        "shape": lambda v: isinstance(v, list) and len(v) <= 8 and all(type(n) is int and n > 0 for n in v),
        "dtype": lambda v: v in ("uint8", "float32"),
        "classes": lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
        **dict.fromkeys(
            ("mean", "std"), lambda v: v is None or (isinstance(v, list) and all(type(n) in number for n in v))
        ),
    }
    place = f"{folder / artifacts.RUN}, 'info'"
    if not isinstance(known, dict) or (noise is not None and type(noise) not in number):
        raise ArtifactError(f"{place}: 'data' or 'dense_noise' is of the wrong kind")
    for name, fits in checks.items():
        if name in known and not fits(known[name]):
            raise ArtifactError(f"{place}, 'data': {name!r} is not what describes a data set")
    if any(n <= 0 for n in known.get("std") or ()):
        raise ArtifactError(f"{place}, 'data': 'std' must be positive")
    return {name: known[name] for name in checks if name in known} | ({} if noise is None else {"dense_noise": noise})


def outputs(run: Mapping[str, Any], wanted: int) -> int:
    """Outputs of a run's networks for so many classes or targets; 0 where that is unknown."""
    return wanted and wanted + (run["config"].get("noise") == "input")


def as_trained(data: Dataset, known: Mapping[str, Any]) -> ArrayData:
    """The test split of other data as the run's networks expect it: same shape and classes, their normalisation."""
    shape, classes = known.get("shape"), known.get("classes")
    if shape is not None and list(data.test.x.shape[1:]) != shape:
        found = tuple(data.test.x.shape[1:])
        raise DataError(
            f"{data.name} has inputs of shape {found}, but the run was trained on {tuple(shape)}: give data of that "
            "shape; images in folders are resized by --image-size"
        )
    if classes is not None and list(data.classes) != classes:
        raise DataError(
            f"{data.name} has other classes ({', '.join(data.classes[:4])}, ...) than the run "
            f"({', '.join(classes[:4])}, ...): the labels would not mean the same"
        )
    mean, std = known.get("mean"), known.get("std")
    return data.test if mean is None or std is None else replace(data.test, mean=tuple(mean), std=tuple(std))


def subset(data: ArrayData, fraction: float, seed: int) -> ArrayData:
    """A random fraction of the examples, each class in proportion."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"subset = {fraction:g}: a share of the examples in (0, 1] is needed, such as 0.2")
    count = round(fraction * len(data))
    if not count:
        raise DataError(f"a subset of {fraction} of {len(data)} examples is empty: give a larger fraction, up to 1")
    return data.subset(stratified(data.y.cpu(), count, seed))


def disk(folder: Path, result: Result) -> dict[str, int]:
    """Bytes of every network of a run folder, by the name of its row."""
    sizes = {f"particle {i + 1}": artifacts.network_bytes(folder, i) for i in range(len(result.particles))}
    if (folder / DENSE_FILE).exists():
        sizes[DENSE] = artifacts.member(folder, DENSE_FILE).stat().st_size
    return sizes
