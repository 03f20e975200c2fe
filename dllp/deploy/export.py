"""Networks for other runtimes: ONNX or torch.export's pt2, one particle or the posterior, checked against PyTorch.

Those of Hugging Face can also be written as a folder of their own kind (:mod:`dllp.deploy.hugging_face`).
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from dllp import files
from dllp.api import Result
from dllp.deploy import hugging_face, quantise
from dllp.deploy.quantise import Images
from dllp.deploy.zeros import without_zeros
from dllp.devices.device import undisturbed
from dllp.errors import ConfigError, ExportError, check_count, first_line
from dllp.method.likelihood import split_noise
from dllp.posterior import decompose, evaluating, logits_of
from dllp.prepare import Data
from dllp.structure.groups import discover_again
from dllp.structure.padding import fill, kept_units, padded
from dllp.structure.slicing import kept_indices
from dllp.structure.trace import UNFIT
from dllp.training.extract import plain

Format = Literal["onnx", "pt2", "huggingface"]
Shape = tuple[int, ...] | Mapping[str, Tensor]  # of one input, or a batch of several inputs by name
INPUT = "input"
OUTPUTS = ("prediction", "aleatoric", "epistemic")  # of the posterior; `mean` would make an invalid ONNX model
BATCHES = (1, 2, 5)  # batch sizes with which an exported file is checked
TOLERANCE = 1e-3  # largest accepted difference from PyTorch, relative to the largest output (but at least 1)


@dataclass(frozen=True)
class Exported:
    """A file (of Hugging Face a folder) that another runtime can read, and its difference from PyTorch.

    Attributes:
        path, format, bytes: The file.
        outputs: Names of its outputs: `logits` or `output` of one particle, and its `noise` where d(x) was learned;
            :data:`OUTPUTS` of the posterior.
        difference: Largest absolute difference from PyTorch over all outputs of the check; of int8 from floats, of the
            first output for the calibration examples.
        runtime: The one of the check.
        agreement: Of int8, fraction of the calibration examples that get the class that floats give.
        accuracy: Of int8, that of floats and its own on test examples of the data; None where there are none.
    """

    path: Path
    format: Format
    bytes: int
    outputs: tuple[str, ...]
    difference: float
    runtime: str
    agreement: float | None = None
    accuracy: tuple[float, float] | None = None


class Tokens(tuple[int, ...]):
    """The shape of inputs that are rows of a table, and the number of its rows: integers below `words` are inputs."""

    words: int


class Named(nn.Module):
    """A network that takes several inputs: a tuple of tensors -> what it answers to them by their names."""

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.network, self.names = network, tuple(names)

    def forward(self, x: tuple[Tensor, ...]) -> Any:
        return self.network(**dict(zip(self.names, x, strict=True)))


def one_argument(network: nn.Module, shape: Shape) -> nn.Module:
    """The network as a function of what `inputs` gives for a shape: of several inputs one tuple."""
    return Named(network, list(shape)) if isinstance(shape, Mapping) else network


class Logits(nn.Module):
    """A network that returns an object or a mapping: inputs -> the tensor that `select` finds in it."""

    def __init__(self, network: nn.Module, select: Callable[[Any], Tensor] = logits_of) -> None:
        super().__init__()
        self.network, self.select = network, select

    def forward(self, x: Tensor) -> Tensor:
        return self.select(self.network(x))


class Pixels(nn.Module):
    """uint8 images (B, C, H, W) -> the network's outputs, with the normalisation of its training inside."""

    shift: Tensor
    scale: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("shift", torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1) * 255)
        self.register_buffer("scale", 1 / (torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1) * 255))

    def forward(self, x: Tensor) -> Any:
        return self.network((x.float() - self.shift) * self.scale)


class WithNoise(nn.Module):
    """A network whose last output is log d(x): inputs -> (B, C) predictions and (B,) noise 1/d(x)^2."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs, log_d = split_noise(self.network(x).float())
        return outputs, (-2 * log_d).exp()


class Ensemble(nn.Module):
    """All particles in one graph: inputs -> mean prediction, aleatoric and epistemic uncertainty (Section 8)."""

    noise: Tensor

    def __init__(self, networks: list[nn.Module], noise: Tensor, task: str, *, head: bool = False) -> None:
        super().__init__()
        self.networks, self.task, self.head = nn.ModuleList(networks), task, head
        self.register_buffer("noise", noise.float().mean().cpu())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        answers = [network(x) for network in self.networks]
        noise = torch.stack([answer[1] for answer in answers]).mean(0)[:, None] if self.head else self.noise
        members = torch.stack([(a[0] if self.head else a).float().flatten(1) for a in answers])
        if self.task == "classification":
            found = decompose(members.softmax(-1))
            return found.mean, found.aleatoric, found.epistemic
        mean = members.mean(0)
        return mean, noise.expand_as(mean).clone(), members.var(0, correction=0)


def format_of(path: Path, wanted: str | None, int8: bool = False) -> Format:
    """The format of a file: the wanted one, or that of its ending; neither must contradict the other, or int8."""
    known, ending = get_args(Format), path.suffix.removeprefix(".")
    if wanted is not None and wanted not in known:
        raise ConfigError(f"format = {wanted!r} is unknown: choose {' or '.join(known)}")
    named = ending if ending in known else None
    if ending and wanted is None and named is None:
        raise ConfigError(f"{path}: there is no export to .{ending}: name it .onnx or .pt2, or give the format")
    if wanted and named and wanted != named:
        raise ConfigError(f"{path} ends in .{named}, but format = {wanted}: give one of them, or both alike")
    found = cast(Format, wanted or named or "onnx")
    if int8 and found != "onnx":
        raise ConfigError(f"int8 is written as onnx alone, not as {found}: give a file that ends in .onnx")
    return found


@undisturbed()
def export(
    result: Result, path: str | Path, shape: Shape, *, format: Format | None = None, particle: int | None = 0,
    uint8: bool = False, pad_to: int = 1, int8: bool = False, data: Data | None = None,
) -> Exported:  # fmt: skip
    """Write a run's networks as one file with a dynamic batch, after checking it against PyTorch.

    Args:
        result: The run.
        path: The file; an old one is replaced. Of `huggingface` a new or empty folder.
        shape: Of one input, without the batch: (channels, height, width), or (tokens,). For a network that takes
            several, a batch of them by name, which the file is checked with: {"input_ids": ..., "attention_mask": ...}.
        format: `onnx`, which needs the extra of that name, `pt2`, or `huggingface` for an even cut of one of its
            networks, which `from_pretrained` then reads; by default that of the file's ending, or onnx.
        particle: Index of an extracted network, or None for the ensemble with its uncertainty.
        uint8: Take raw images and normalise them inside, as `result.info["data"]` says.
        pad_to: Add dead channels up to a multiple of this: the same function, on kernels that like such widths.
        int8: Quantise one particle statically: the ONNX file that :meth:`dllp.Result.speed` times. How far its answers
            are from those of floats is told, and not limited.
        data: For int8, as for :func:`dllp.prune`: 256 training examples set the ranges of the activations, and the test
            examples of a data set give the accuracy.
    """
    path = Path(path)
    format = format_of(path, format, int8)
    if particle is not None and not 0 <= particle < len(result.particles):
        raise ConfigError(f"there is no particle {particle + 1}: the run has {len(result.particles)}")
    check_count(pad_to=pad_to)
    if format == "onnx":
        require_onnx()
    chosen = range(len(result.particles)) if particle is None else [particle]
    small: list[nn.Module] = [result.particles[i].network for i in chosen]
    if isinstance(shape, Mapping):
        if uint8 or pad_to > 1:
            raise ConfigError("uint8 and pad_to are for networks of one input: leave them out")
    else:
        shape = input_shape(small[0], shape)
    images = _images(result, particle, shape, data) if int8 else None
    if format == "huggingface":
        return _pretrained(result, particle, path, shape, plain_only=not uint8 and pad_to == 1)
    small = [one_argument(network, shape) for network in small]
    wide = small if pad_to == 1 else [wider(result, i, cast(tuple[int, ...], shape), pad_to) for i in chosen]
    first = "logits" if result.config.task == "classification" else "output"
    single = (first, "noise") if result.posterior.head else (first,)
    outputs = OUTPUTS if particle is None else single
    with evaluating(*small):
        network, reference = (_assembled(result, networks, particle, uint8, shape) for networks in (wide, small))
        names = list(shape) if isinstance(shape, Mapping) else [INPUT]
        content = packed(trace(network, inputs(2, shape, uint8)), format, outputs, names)
        difference = _check(reference, content, shape, uint8, format)
    runtime = "onnxruntime" if format == "onnx" else "torch.export"
    done = Exported(path, format, len(content), outputs, difference, runtime)
    if images is not None:
        content, done = _int8(content, done, images, result.config.task, raw=uint8)
    files.write_named(path, content)
    return done


def _images(result: Result, particle: int | None, shape: Shape, data: Data | None) -> Images:
    if particle is None or isinstance(shape, Mapping):  # 8 bits are too few for epistemic uncertainty
        raise ConfigError("int8 is for one particle of a network of one input: leave out int8")
    if data is None:
        raise ConfigError("int8 is calibrated with training examples: give data, as for dllp.prune")
    return quantise.images(data, shape, result.dense.macs, result.config.task)


def _int8(content: bytes, done: Exported, images: Images, task: str, raw: bool) -> tuple[bytes, Exported]:
    """An ONNX file in int8, and what it answers otherwise than in floats."""
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "float.onnx"
        files.write_bytes(path, content)
        try:
            both = path, quantise.quantised(path, quantise.batches(images.calibration, raw))
            floats, found = (quantise.answers(each, images.calibration) for each in both)
        except Exception as error:  # each of their many kinds says that it cannot quantise the graph
            raise ExportError(f"onnxruntime cannot quantise it ({first_line(error)}): leave out int8") from error
        classes = task == "classification" and floats.ndim == 2
        agreement = float((floats.argmax(1) == found.argmax(1)).mean()) if classes else None
        test = images.test
        accuracy = None if test is None else (quantise.accuracy(both[0], test), quantise.accuracy(both[1], test))
        content, difference = both[1].read_bytes(), float(abs(floats - found).max())
    return content, replace(done, bytes=len(content), difference=difference, agreement=agreement, accuracy=accuracy)


def _pretrained(result: Result, particle: int | None, path: Path, shape: Shape, *, plain_only: bool) -> Exported:
    if particle is None or not plain_only:
        raise ConfigError("format = huggingface writes one particle as it is: leave out posterior, uint8 and pad_to")
    chosen = result.particles[particle]
    with evaluating(chosen.network), _quiet():
        example = shape if isinstance(shape, Mapping) else inputs(2, shape)
        count = hugging_face.write(chosen.network, chosen.reference, path, example)
    return Exported(path, "huggingface", count, ("logits",), 0.0, "transformers")


def wider(result: Result, particle: int, shape: tuple[int, ...], multiple: int) -> nn.Module:
    """An extracted network with dead channels up to a multiple, its outputs unchanged."""
    chosen = result.particles[particle]
    if not chosen.recipe:  # no channel is gone: there is none to add
        return chosen.network
    whole = plain(chosen.reference)
    fill(whole, chosen.network, kept_indices(whole, chosen.recipe))  # other methods train or mend what they have cut
    structure = discover_again(whole, inputs(2, shape), result.whole, result.config)
    return padded(whole, structure, kept_units(whole, structure, chosen.recipe), multiple)[0].eval()


def _assembled(result: Result, networks: list[nn.Module], particle: int | None, uint8: bool, shape: Shape) -> nn.Module:
    with torch.no_grad(), _one_line():
        output = networks[0](inputs(2, shape))
    if not isinstance(output, Tensor):
        networks = [Logits(network, result.posterior.select) for network in networks]
    if result.posterior.head:
        networks = [WithNoise(network) for network in networks]
    whole = networks[0]
    if particle is None:
        whole = Ensemble(networks, result.posterior.noise, result.config.task, head=result.posterior.head)
    if not uint8:
        return whole.eval()
    known = result.info.get("data", {})
    if known.get("dtype", "uint8") != "uint8" or len(shape) != 3 or "mean" not in known:
        raise ConfigError("the run does not hold the normalisation of uint8 images: export it without --uint8")
    return Pixels(whole, known["mean"] or [0.0], known.get("std") or [1.0]).eval()


def onnx_missing() -> list[str]:
    """Packages that ONNX needs and that are not installed."""
    return [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]


def require_onnx() -> None:
    """Raise unless everything that ONNX needs is installed."""
    missing = onnx_missing()
    if missing:
        raise ExportError(f"{', '.join(missing)} is not installed: pip install 'dllp[onnx]'")


def inputs(batch: int, shape: Shape, uint8: bool = False) -> Any:
    """(batch, *shape) random inputs, always the same ones; of several by name a tuple, their examples in turns."""
    if isinstance(shape, Mapping):
        return tuple(value.cpu()[torch.arange(batch) % len(value)] for value in shape.values())
    generator = torch.Generator().manual_seed(batch)
    if isinstance(shape, Tokens):
        return torch.randint(shape.words, (batch, *shape), generator=generator)
    if uint8:
        return torch.randint(256, (batch, *shape), generator=generator, dtype=torch.uint8)
    return torch.randn(batch, *shape, generator=generator)


def input_shape(network: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same shape, of a network that looks its inputs up as `Tokens`: of the largest table that it runs with."""
    tables = {module.num_embeddings for module in network.modules() if isinstance(module, nn.Embedding)}
    for count in sorted(tables, reverse=True):
        tokens = Tokens(shape)
        tokens.words = count
        with suppress(*UNFIT), torch.no_grad():
            network(inputs(2, tokens))
            return tokens
    return shape


def write(network: nn.Module, path: Path, example: Tensor, format: Format) -> None:
    """Trace a network with a dynamic batch and write it; nothing is checked."""
    files.write_bytes(path, packed(trace(network, example), format))


def trace(network: nn.Module, example: Tensor | tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """The network as a graph for any batch."""
    with torch.no_grad(), _quiet(), _one_line():
        if not isinstance(network(example), (Tensor, tuple)):
            network = Logits(network)
        if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(network.forward).parameters.values()):
            network = Logits(network, lambda outputs: outputs)  # *args, as cut modules take them, hide the one input
        return without_zeros(torch.export.export(network, (example,), dynamic_shapes=_any_batch(example)))


def packed(
    program: torch.export.ExportedProgram, format: Format, outputs: Sequence[str] = ("output",),
    names: Sequence[str] = (INPUT,),
) -> bytes:  # fmt: skip
    """A graph as the content of an ONNX or pt2 file, without places in source code, which tell of the machine.

    PyTorch's own writing of files aborts on a full disk.
    """
    with _quiet(), _one_line():
        if format == "pt2":
            buffer = io.BytesIO()
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)
            torch.export.save(program, buffer)
            return buffer.getvalue()
        example = program.example_inputs[0][0] if program.example_inputs else None
        named: dict[str, Any] = dict(input_names=list(names), output_names=list(outputs))
        named["dynamic_shapes"] = _any_batch(example)
        done = torch.onnx.export(program, (), dynamo=True, external_data=False, verbose=False, **named)
        model = cast(torch.onnx.ONNXProgram, done).model_proto
        graph = model.graph
        for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            part.ClearField("metadata_props")
        return model.SerializeToString()


def _any_batch(example: Any) -> tuple[Any]:
    batch = {0: torch.export.Dim("batch", min=1)}
    return (tuple(batch for _ in example) if isinstance(example, tuple) else batch,)


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn whatever the exporter raises about the user's network into an error of one line."""
    try:
        yield
    except OSError as error:  # not the network's fault
        raise ExportError(f"the exporter cannot write: {error.strerror or error}; free some space") from error
    except Exception as error:
        traced = not isinstance(error, torch.onnx.OnnxExporterError)
        cause: BaseException = error
        while not traced and cause.__cause__ is not None:  # the first of several is about what was tried, not why
            cause = cause.__cause__
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        reason = f"{type(cause).__name__}: {lines[0] if lines else ''}"
        if "Constraints violated" in reason:  # by the batch, the one dynamic size; the advice that follows is to fix it
            reason = "its forward fixes the batch's size by len(x), int(x.shape[0]) or a loop over it: use x.shape[0]"
        what = "the network cannot be traced with a dynamic batch" if traced else "ONNX has no form for the network"
        raise ExportError(f"{what} ({reason}){'' if traced else ': use format = pt2'}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's exporter but for its errors: warnings, logs, and the graph of a network that it refuses."""
    before = logging.root.manager.disable
    logging.disable()  # its loggers have handlers of their own, and some are made while it works
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check(reference: nn.Module, content: bytes, shape: Shape, uint8: bool, format: Format) -> float:
    """Largest absolute difference between a file's answers and PyTorch's, for several batch sizes."""
    loaded, worst = _loaded(content, format), 0.0
    for batch in BATCHES:
        x = inputs(batch, shape, uint8)
        with torch.no_grad():
            found, wanted = (y if isinstance(y, tuple) else (y,) for y in (loaded(x), reference(x)))
        for a, b in zip(found, wanted, strict=True):
            gap = (a - b).abs().max().item() if a.shape == b.shape else float("inf")
            if not gap <= TOLERANCE * max(1.0, b.abs().max().item()):
                raise ExportError(
                    f"the exported network differs from PyTorch by {gap:.2g} in a batch of {batch}: nothing was written"
                )
            worst = max(worst, gap)
    return worst


def _loaded(content: bytes, format: Format) -> Callable[[Any], Any]:
    """A file in its own runtime, as a function of the inputs."""
    if format == "pt2":
        with _quiet():
            return torch.export.load(io.BytesIO(content)).module()
    import onnx
    import onnxruntime

    try:
        onnx.checker.check_model(content, full_check=True)
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # each of their many kinds says that it cannot run the graph
        raise ExportError(f"ONNX cannot run the network ({first_line(error)}): use format = pt2") from error
    names = [given.name for given in session.get_inputs()]

    def run(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = [value.numpy() for value in (x if isinstance(x, tuple) else (x,))]
        return tuple(torch.from_numpy(y) for y in session.run(None, dict(zip(names, values, strict=True))))

    return run
