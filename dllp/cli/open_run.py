"""The data, the network and the configuration of a run: made from its settings, or read from its folder."""

from __future__ import annotations

import math
import os
import pkgutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dllp import files, zoo
from dllp.api import Result, load
from dllp.baselines import find as find_method
from dllp.cli import progress
from dllp.config import COUNTED, Config, usual_batch
from dllp.data import ArrayData, Dataset
from dllp.data import load as load_data
from dllp.data.ood import same as same_data
from dllp.data.ood import without
from dllp.data.unreadable import Report, parse_fraction
from dllp.errors import ArtifactError, ConfigError, DataError, first_line
from dllp.evaluation.evaluate import DENSE as DENSE_ROW
from dllp.runs import settings
from dllp.runs.folder import DENSE_FILE, RUN, SETTINGS, member, particle_file, reference_file
from dllp.runs.result import Run
from dllp.runs.result import read_run as read_record
from dllp.runs.settings import DENSE, DLLP, Task
from dllp.runs.tensors import check_shapes

LARGEST = 2**20  # largest size of a network that a run.json may ask for


def read_data(task: Task, seed: int, *, quiet: bool, report: Report | None = None) -> Dataset:
    """The data set, with the held-out part in place of the test split where one is asked for."""
    names = ("image_size", "augment", "validation", "workers", "max_bad")
    options: dict[str, Any] = {name: getattr(task, name) for name in names}
    with progress.download(quiet) as bar:
        data = load_data(task.data, root=task.data_root, seed=seed, progress=bar, report=report, **options)
    if task.leave_out:
        data = without(data, tuple(name.strip() for name in task.leave_out.split(",")))
    return replace(data, test=data.validation) if task.validation and data.validation is not None else data


def configure(task: Task, values: Mapping[str, Any], data: Dataset | None = None) -> Config:
    """The configuration that suits the method and the data; the user's `values` win."""
    parse_fraction(task.max_bad)  # a bad value is an error before any data is read
    suited: dict[str, Any] = {}
    if task.method == DENSE:
        budgets = [f"keep_{name}" for name in COUNTED if values.get(f"keep_{name}")]
        if budgets:
            raise ConfigError(f"method dense removes nothing: leave out {budgets[0]}")
        suited["particles"] = 1
    elif task.method != DLLP:
        method = find_method(task.method)
        method.refuse_priors(values)
        suited = {"granularity": method.granularity, "particles": 1}
        for name, wanted in suited.items():
            if values.get(name, wanted) != wanted:
                raise ConfigError(f"method {method.name} has {name} = {wanted}: leave out {name}, or give {wanted}")
        suited["weight_decay"] = Config().resolved().weight_decay  # the dense network's, also for single weights
    if data is not None and not data.train.is_classification:
        suited["task"] = "regression"
    if data is not None and task.preset != "paper":
        suited["batch_size"] = usual_batch(len(data.train))
    return task.config(values, **suited)


def build_network(task: Task, num_classes: int, in_channels: int, image_size: int, seed: int = 0) -> nn.Module:
    """The network, its random weights fixed by the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if task.is_code:
            return imported(task.model)
        return zoo.build(task.model, num_classes, in_channels, image_size=image_size)


def made(what: str, path: str, *, called: bool = True) -> Any:
    """Result of `package.module:function`, or the function itself; the current folder is importable."""
    here = os.getcwd()  # the user's code may leave it
    sys.path.insert(0, here)
    try:
        found = pkgutil.resolve_name(path)
        return found() if called else found
    except Exception as error:  # whatever the user's code raises is the user's to repair, and one line says what
        raise ConfigError(f"{what} {path!r} cannot be made ({type(error).__name__}: {first_line(error)})") from error
    finally:
        sys.path.remove(here)


def imported(path: str) -> nn.Module:
    """The network that `package.module:factory` returns."""
    model = made("model", path)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {path!r} gives a {type(model).__name__}: it must return a torch.nn.Module")
    return model


def check_import(
    task: Task, args: Namespace, whose: str, folder: Path | None = None,
    parts: Sequence[str] = ("model", "data", "loss"),
) -> None:  # fmt: skip
    """Raise where a file names code to import that the user neither names nor trusts, now or before for the folder.

    `parts` are the fields of the task that the command imports.
    """
    code = [name for name in task.code if name in parts]
    for name in code:
        what, path = {"model": "network"}.get(name, name), getattr(task, name)
        known = folder is not None and settings.is_trusted(folder, path)
        if name not in args.chosen and not args.trust_imports and not known:
            raise ConfigError(f"{whose} {what} is code, {path}: name it with --{name}, or add --trust-imports")
    if folder is not None and args.trust_imports:
        settings.trust(folder, [getattr(task, name) for name in code])


@dataclass(frozen=True)
class DataInfo:
    """The training data as `info.data` of run.json describes it; a run that was made in Python says nothing."""

    num_classes: int = 0
    in_channels: int = 0
    image_size: int = 0
    shape: list[int] = field(default_factory=list)
    dtype: str = ""
    classes: list[str] | None = None
    mean: list[float] | None = None
    std: list[float] | None = None


@dataclass(frozen=True)
class Info:
    """The part of `info` in run.json that commands rely on; the dense network's noise is NaN where it was given."""

    data: DataInfo = field(default_factory=DataInfo)
    dense_noise: float = math.nan


@dataclass(frozen=True)
class StoredRun:
    """A finished run folder before its networks are read."""

    folder: Path
    record: Run  # its run.json
    settings: dict[str, Any]  # its config.yaml; empty where the run was made in Python
    task: Task  # its settings with what the command line chose instead
    info: Info

    @property
    def other_data(self) -> bool:
        """The data is not what the run was trained on."""
        return "data" not in self.settings or not same_data(self.task.data, self.settings["data"])

    def read_data(self, *, quiet: bool, report: Report | None = None) -> Dataset:
        """The run's data, or the data that was chosen instead."""
        return read_data(self.task, self.settings.get("seed", 0), quiet=quiet, report=report)

    def open(self, *, shape: Sequence[int] | None = None, data: Dataset | None = None) -> Result:
        """The run with its networks; where run.json does not give their sizes, `shape` of one input or `data` do."""
        known = self.info.data
        shape = tuple(shape or known.shape or (data.test.x.shape[1:] if data else ()))
        if not shape:
            raise ConfigError(f"{self.folder} does not say what its inputs look like: give it, as in --shape 3 32 32")
        classes = known.num_classes or (data.num_classes if data else 0)
        if not classes and not self.task.is_code:
            raise ConfigError(f"{self.folder} does not say how many outputs its network has: give --model a factory")
        outputs = classes + (self.record.config.get("noise") == "input")
        sizes = outputs, known.in_channels or shape[0], known.image_size or min(shape[1:], default=1)
        make = partial(build_network, self.task, *sizes)
        if not self.task.is_code:
            with torch.device("meta"):  # no memory is taken before the shapes are known to fit
                check_shapes(self.folder / reference_file(0), make())
        return replace(load(self.folder, make()), shape=shape)


def read_run(folder: Path, args: Namespace, *, needed: Sequence[str] = ("model",)) -> StoredRun:
    """A finished run folder; settings that are `needed` come from its config.yaml or from the command line."""
    record, stored, chosen = read_record(folder), read_settings(folder), args.chosen
    for name in needed:
        if name not in chosen and name not in stored:
            raise ConfigError(f"{folder} has no {SETTINGS}: name the run's {name} with --{name}")
    task, _ = settings.split({**stored, **chosen})
    if "model" in needed:
        check_import(task, args, "the run's", folder, ("model",))  # no command on a finished run imports data or loss
    info = files.typed(Info, record.info, f"{folder / RUN}: info")
    sizes = info.data.num_classes, info.data.in_channels, info.data.image_size, *info.data.shape
    if not all(0 <= size <= LARGEST for size in sizes) or min(info.data.std or (1.0,)) <= 0:
        raise ArtifactError(f"{folder / RUN}: info: data holds a size that is not in 0..{LARGEST}, or a std of 0")
    run = StoredRun(folder, record, stored, task, info)
    return replace(run, task=replace(task, validation=0, leave_out="")) if run.other_data else run


def read_settings(folder: Path) -> dict[str, Any]:
    """A run folder's config.yaml; empty where the run was made in Python."""
    return settings.read(member(folder, SETTINGS)) if (folder / SETTINGS).exists() else {}


def describe(data: Dataset) -> DataInfo:
    """Facts about the training data that a later evaluation needs."""
    train, dtype = data.train, str(data.train.dtype).removeprefix("torch.")
    mean, std = (list(values) if values else None for values in (train.mean, train.std))
    sizes = data.num_classes, data.in_channels, data.image_size
    return DataInfo(*sizes, list(train.shape), dtype, list(data.classes), mean, std)


def as_trained(data: Dataset, known: DataInfo) -> ArrayData:
    """The test split of other data as the run's networks expect it: same shape and classes, their normalisation."""
    shape = list(data.test.x.shape[1:])
    if known.shape and shape != known.shape:
        raise DataError(
            f"{data.name} has inputs of shape {tuple(shape)}, but the run was trained on {tuple(known.shape)}: give "
            "data of that shape; images in folders are resized by --image-size"
        )
    if known.classes is not None and list(data.classes) != known.classes:
        raise DataError(
            f"{data.name} has other classes ({', '.join(data.classes[:4])}, ...) than the run "
            f"({', '.join(known.classes[:4])}, ...): the labels would not mean the same"
        )
    if known.mean is None or known.std is None:
        return data.test
    return replace(data.test, mean=tuple(known.mean), std=tuple(known.std))


def disk(folder: Path, result: Result) -> dict[str, int]:
    """Bytes of every network of a run folder, by the name of its row."""
    sizes = {f"particle {i + 1}": member(folder, particle_file(i)).stat().st_size for i in range(len(result.particles))}
    if (folder / DENSE_FILE).exists():
        sizes[DENSE_ROW] = member(folder, DENSE_FILE).stat().st_size
    return sizes
