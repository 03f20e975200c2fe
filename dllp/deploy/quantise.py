"""Static int8 of ONNX files: the inputs that calibrate it, and what both files answer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dllp.data import ArrayData, Dataset, load, stratified
from dllp.devices import trees
from dllp.errors import DataError
from dllp.prepare import Data, as_array

CALIBRATION = 256  # training examples that the ranges of int8 activations are taken from
BATCH = 32  # examples at once in calibration and accuracy
WORK = 4e12  # MACs that measuring accuracy may take: all of CIFAR-10's test set by VGG-16


@dataclass(frozen=True)
class Images:
    """Training examples to calibrate int8 with, and the test data of a classification, where there are any."""

    calibration: ArrayData
    test: ArrayData | None


def images(data: Data, shape: tuple[int, ...], macs: float, task: str = "classification") -> Images:
    """Examples of every class in proportion; of the test set as many as a network of `macs` sees within `WORK`."""

    def chosen(part: Any, count: int) -> Any:
        return part.subset(stratified(part.y, min(count, len(part)), 0))

    data = load(os.fsdecode(data)) if isinstance(data, str | os.PathLike) else data
    train: Any = data.train if isinstance(data, Dataset) else as_array(data)
    if train.shape != tuple(shape):
        raise DataError(f"the data has inputs of shape {train.shape}, not {tuple(shape)}: give data of that shape")
    train = chosen(train, CALIBRATION)
    if not isinstance(data, Dataset):
        return Images(train, None)
    train = train if isinstance(train, ArrayData) else train.decoded()
    test = chosen(data.test, max(1, int(WORK / macs)))
    labelled = task == "classification" and test.y.ndim == 1
    return Images(replace(train, mean=test.mean, std=test.std), test if labelled else None)


def batches(data: ArrayData, raw: bool = False) -> Iterator[Tensor]:
    """Inputs in their order, normalised or as they are stored."""
    for start in range(0, len(data), BATCH):
        part = slice(start, start + BATCH)
        yield data.x[part] if raw else data.inputs(part)


def feed(path: Path, x: Any) -> dict[str, np.ndarray]:
    """Inputs of an ONNX file, a tensor or a tuple of them, by the names that it has for them."""
    import onnx

    names = [given.name for given in onnx.load(str(path)).graph.input]
    return dict(zip(names, (value.numpy() for value in trees.tensors(x)), strict=True))


def quantised(path: Path, batches: Iterable[Any]) -> Path:
    """Static int8 in QDQ form: a scale for each channel of the weights, ranges of activations from `batches`."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    parts = (feed(path, batch) for batch in batches)

    class Reader(CalibrationDataReader):
        def get_next(self) -> Any:
            return next(parts, None)

    prepared, result = path.with_suffix(".prepared.onnx"), path.with_suffix(".int8.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    kinds: dict[str, Any] = dict(activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
    quantize_static(prepared, result, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, **kinds)
    return result


def answers(path: Path, data: ArrayData) -> np.ndarray:
    """First output (N, ...) of an ONNX file for every example, on the processor; a file of uint8 gets raw images."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    parts = batches(data, raw=given.type == "tensor(uint8)")
    return np.concatenate([np.asarray(session.run(None, {given.name: part.numpy()})[0]) for part in parts])


def accuracy(path: Path, data: ArrayData) -> float:
    """Fraction of the examples that an ONNX file classifies rightly."""
    return float((answers(path, data).argmax(1) == data.y.numpy()).mean())
