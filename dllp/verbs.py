"""Verbs of a finished result: evaluate, export, time and show it. The methods of :class:`dllp.Result` call these.

They stand above the rooms that they bring together; a result finds them when one of its methods is called.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dllp import files, report
from dllp.api import Result
from dllp.data import ArrayData, Dataset, LabelledBatches
from dllp.data.corruptions import parse as parse_corruption
from dllp.data.ood import find as find_outside
from dllp.data.ood import unlabelled
from dllp.deploy import export as exporting
from dllp.deploy import speed as timing
from dllp.deploy.profiles import Clock
from dllp.devices.device import find_device, undisturbed
from dllp.errors import ConfigError, DataError
from dllp.evaluation import evaluate as evaluation
from dllp.evaluation import examples
from dllp.evaluation.evaluate import Evaluation
from dllp.prepare import Data, as_array, as_labelled
from dllp.report import contents
from dllp.runs.folder import EVALUATION

Example = Mapping[str, Tensor] | Sequence[Tensor]
__all__ = ["Clock", "evaluate", "export", "show", "speed"]


@undisturbed()
def evaluate(
    result: Result, data: Data | LabelledBatches, *, corrupt: str | Iterable[str] = (),
    ood: str | Iterable[str] | Mapping[str, Any] = (), device: str = "auto",
) -> Evaluation:  # fmt: skip
    """Measure every network of a run; :meth:`dllp.Result.evaluate`."""
    test = as_labelled(data)
    corruptions = [c for text in _words(corrupt) for c in parse_corruption(text, result.config.seed)]
    left_out = data.left_out if isinstance(data, Dataset) else None
    named = ood if isinstance(ood, Mapping) else dict.fromkeys(_words(ood))
    outside: dict[str, ArrayData | LabelledBatches]
    if isinstance(test, ArrayData):
        outside = {
            name: find_outside(name, test, left_out=left_out) if given is None else _inputs(given, test)
            for name, given in named.items()
        }
    elif corruptions or None in named.values():
        raise DataError("corrupt= and names in ood= are for data of one input: give ood={name: data of the same kind}")
    else:
        outside = {name: as_labelled(given) for name, given in named.items() if given is not None}
    dense = evaluation.dense_posterior(result)
    return evaluation.measure(result, test, dense, corruptions=corruptions, ood=outside, device=find_device(device))


def export(result: Result, path: str | Path, *, example: Example | None = None, **options: Any) -> exporting.Exported:
    """Write the networks of a run as one file; :meth:`dllp.Result.export`."""
    return exporting.export(result, path, _shape(result, example), **options)


@undisturbed()
def speed(
    result: Result, *, batches: Iterable[int] = (1, 64), seconds: float = 1.0, particle: int = 0,
    data: Dataset | None = None, example: Example | None = None,
) -> timing.Timed:  # fmt: skip
    """Time the dense against the pruned network; :meth:`dllp.Result.speed`."""
    shape, images = _shape(result, example), None
    subjects = timing.subjects(result, shape, particle=particle)
    if data is not None:
        if isinstance(shape, Mapping):
            raise ConfigError("data is for networks of one input: leave it out")
        images = timing.images(data, shape, subjects[0].macs, result.config.task)
    rows = timing.measure(subjects, shape, batches=tuple(batches), seconds=seconds, images=images)
    return timing.Timed(rows, timing.layers(subjects[0], subjects[1], shape, batch=max(batches)))


@undisturbed()
def show(result: Result, path: str | Path, data: Data | None = None) -> Path:
    """Write a run as one HTML page; :meth:`dllp.Result.report`."""
    report.require_plotly()
    path = Path(path)
    labelled = None if result.shape or data is None else as_labelled(data)
    several = labelled if isinstance(labelled, LabelledBatches) else None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / (path.stem or "run")
        result.save(folder)
        if data is not None:
            found = evaluate(result, several or data)
            rows = {"rows": [vars(row) for row in found.rows], **found.besides()}
            files.write_json(folder / EVALUATION, rows)
            if result.config.task == "classification":
                dense = found.clean.get(evaluation.DENSE)
                examples.collect(found.clean[evaluation.TOGETHER], dense).write(folder)
        run = contents.read(folder)
        if result.shape or several is not None:
            run = replace(run, speed=contents.brief(result, _shape(result, several.batches[0] if several else None)))
        page = report.build([run])
    files.write_named(path, page)
    return path


def _words(given: str | Iterable[str]) -> list[str]:
    words = [given] if isinstance(given, str) else [] if isinstance(given, Tensor) else list(given)
    if isinstance(given, Tensor) or not all(isinstance(word, str) for word in words):
        raise ConfigError("corrupt and ood take names: give inputs of your own as ood={name: inputs}")
    return words


def _inputs(given: Any, like: ArrayData) -> ArrayData:
    """Inputs alone, or any data whose labels are not looked at."""
    if isinstance(given, Tensor):
        return unlabelled(like, given if given.dtype == like.x.dtype else given.to(like.x.dtype))
    return unlabelled(like, as_array(given).x)


def _shape(result: Result, example: Example | None) -> exporting.Shape:
    """Shape of the one input, or a batch of several by name: those in order have the names of the forward's own."""
    if example is not None:
        names = inspect.signature(result.reference.forward).parameters
        return example if isinstance(example, Mapping) else dict(zip(names, example, strict=False))
    if not result.shape:
        raise ConfigError("the result does not know one shape of inputs: give example={name: tensor}, a batch")
    return exporting.input_shape(result.model, result.shape)
