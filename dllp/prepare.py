"""Preparation of a run: batches that fit the network, the network's structure, and its gates."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from dllp.config import Config, usual_batch
from dllp.data import (
    ArrayData,
    Batches,
    Dataset,
    LabelledBatches,
    LoaderBatches,
    Rows,
    StreamBatches,
    StreamedBatches,
    StreamedData,
    check_labels,
    from_pair,
    holdout,
    load,
    validate,
)  # fmt: skip
from dllp.data.arrays import as_targets, generator, held_count
from dllp.devices import trees
from dllp.devices.device import check_precision, check_repeatable, find_device
from dllp.devices.mesh import Place
from dllp.devices.ranks import Ranks
from dllp.errors import ConfigError, DataError, DllpError, StructureError, first_line
from dllp.method import likelihood
from dllp.structure.groups import Structure, discover
from dllp.structure.select import select
from dllp.structure.slicing import copied
from dllp.structure.trace import UNFIT, check_network, explained, isolated, misfit
from dllp.training.forward import called_by
from dllp.training.gating import ChannelGating, FilterFn, WeightGating
from dllp.training.health import constant_loss
from dllp.training.objective import LABELS, Objective
from dllp.training.particles import Particles
from dllp.training.teacher import Teacher, needed

Data = (
    DataLoader[Any]
    | tuple[Any, ...]
    | Mapping[str, Any]
    | ArrayData
    | StreamedData
    | Dataset
    | torch.utils.data.Dataset[Any]
    | Iterable[Any]
    | str
    | os.PathLike[str]
)
EVALUATED = 256
"""Examples of a batch of validation data that is not a loader."""
Source = Batches | LoaderBatches | StreamBatches | StreamedBatches


class Prepared(NamedTuple):
    """A run before its particles are made.

    Attributes:
        batches: On the device.
        example: Arguments by position that the network is known to take: what it is traced and verified with.
        structure: The units that can be removed, and their cost.
        x, y: Two examples of the first batch, on the CPU.
    """

    batches: Source
    example: Any
    structure: Structure
    x: Any
    y: Tensor | None


def prepare(
    model: nn.Module, data: Data, config: Config, filter_fn: FilterFn | None, ranks: Ranks | None = None, *,
    channels: bool = True, objective: Objective | None = None, steps: int | None = None,
) -> Prepared:  # fmt: skip
    """Batches on the device, an example that the network is known to take, and what of it can be pruned.

    Without `channels` no groups of them are looked for, and any network will do.
    """
    check_network(model)
    device = find_device(config.device, None if ranks is None or ranks.alone else ranks.local)
    check_repeatable(device, config.deterministic)
    check_precision(device, config.precision)
    objective = objective or Objective(config)
    batches = as_batches(data, config, device, as_is=objective.loss is not None, steps=steps)
    x, y = example_of(batches)
    options: dict[str, Any] = {
        "filter_fn": filter_fn, "channels": channels, "units": config.usual_units, "even": config.even,
    }  # fmt: skip
    if y is None or isinstance(batches, StreamedBatches):
        example = check_loss(model, objective, config, x)
        return Prepared(batches, example, discover(model, example, **options), x, None)
    if not isinstance(batches, StreamBatches) and not x.is_floating_point() and not _takes(model, x):
        batches.integers, x = False, x.float()
    check_targets(model, batches, config, objective, x, y)
    return Prepared(batches, x, discover(model, x, **options), x, y)


LOOKED_AT = 256
"""Training examples on which a network is tried before a run."""
BETTER = 0.9
"""Share of the loss of a constant answer below which a network has learned something."""
MULTIPLE, NARROWEST = 8, 32
"""Multiples of channels that runtimes are made for, and the narrowest layer that is cut in them."""


def settled(batches: Source, config: Config, structure: Structure, learned: bool) -> Config:
    """The configuration with every default filled in, by the batches' size and by what the network has learned."""
    size = config.batch_size or batches.num_examples // batches.steps
    if isinstance(batches, LoaderBatches):
        size = batches.loader.batch_size or size
    if learned and config.round_to is None and config.granularity == "channel":
        config = replace(config, round_to=suited_multiple(structure, config))
    trained = learned or config.teacher == "given"  # who lets a network teach knows that it is trained
    return config.resolved(trained=trained, batch_size=size, steps=batches.steps)


def has_learned(model: nn.Module, batches: Source, config: Config, objective: Objective) -> bool:
    """True where a run starts from a network that answers training examples clearly better than a constant does."""
    if config.init != "given" or config.task == "binary" or not objective.scored:
        return False
    losses, targets, examples = [], [], 0
    with isolated(model), torch.no_grad():
        network = copied(model).cpu().eval()
        for batch in batches.epoch(0):
            x, y = (trees.apply(trees.part(part, slice(0, LOOKED_AT)), Tensor.cpu) for part in batch)
            with explained(x, cut=False):
                found = objective(network, x, y)
            if found.output is None or found.labels is None:
                return False
            y = found.labels
            targets.append(y if y.is_floating_point() else y[y != likelihood.IGNORED])
            losses.append(trees.count(x) * likelihood.task_loss(found.output.float(), y, config.task))
            examples += trees.count(x)
            if examples >= LOOKED_AT:
                break
    y = torch.cat(targets)
    soft = config.task == "classification" and y.is_floating_point()
    constant = torch.special.entr(y.mean(0)).sum() if soft else constant_loss(y)
    return bool(sum(losses) < BETTER * examples * constant)


def suited_multiple(structure: Structure, config: Config) -> int:
    """Channels whose multiples a run keeps where nobody chose: :data:`MULTIPLE` in a network that is wide enough."""
    counted, keep = config.budget
    if counted == "latency":  # which has its own widths
        return 1
    try:
        cost = structure.params if counted == "params" else structure.flops
        select(structure, torch.zeros(structure.units), cost=cost, keep=keep, round_to=MULTIPLE)
    except StructureError:  # so few channels cannot be reached in these steps
        return 1
    return MULTIPLE if all(group.units >= NARROWEST for group in structure.groups if not group.gone) else 1


def _takes(model: nn.Module, example: Tensor) -> bool:
    """True for a network that takes integers, as an embedding does; most need real numbers."""
    try:
        _outputs(model, example, training=False)
    except IndexError as error:  # they are looked up, but not found
        raise StructureError(misfit(model, [example], error)) from error
    except Exception:  # whatever a stranger's forward raises about them
        return False
    return True


def _outputs(model: nn.Module, example: Tensor, *, training: bool) -> Any:
    """Outputs of a copy of the network, random numbers left as they were; in training its gradients must exist."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), example)
    example = example.to(weight.device, weight.dtype if example.is_floating_point() else None)
    with isolated(model), torch.set_grad_enabled(training):
        network = copied(model).train(training)
        outputs = network(example)
        learning = [p for p in network.parameters() if p.requires_grad]
        if training and isinstance(outputs, Tensor) and learning:
            torch.autograd.grad(outputs.sum(), learning, allow_unused=True)
    return outputs


def as_batches(
    data: Data, config: Config, device: torch.device, *, as_is: bool = False, steps: int | None = None
) -> Source:
    """The user's data, in any of its forms, as a source of batches on the device; `as_is` leaves them as they are."""
    channels_last = device.type == "cuda"
    data = _opened(data, pairs=not as_is)
    if isinstance(data, Dataset):
        data = data.train
    if isinstance(data, StreamedData):
        return StreamBatches(data, config.batch_size or usual_batch(len(data)), config.seed, device, channels_last)
    if isinstance(data, (tuple, Mapping)):
        data = _rows(data)
    if isinstance(data, ArrayData):
        validate(data)
        size = config.batch_size or usual_batch(len(data))
        return Batches(data, size, config.seed, device, channels_last, integers=True)
    if (
        steps is None
        and not isinstance(data, (DataLoader, list))
        and hasattr(data, "__getitem__")
        and _has_length(data)
    ):
        whole = len(data)  # pyright: ignore[reportArgumentType]
        size = config.batch_size or usual_batch(whole)
        data = DataLoader(data, size, shuffle=True, drop_last=whole > size)  # pyright: ignore[reportArgumentType]
    if isinstance(data, DataLoader) and steps is None:
        return LoaderBatches(data, config.seed, device, channels_last, integers=True, as_is=as_is)
    if not isinstance(data, Iterable):
        raise DataError(f"data of type {type(data).__name__} cannot be used: give a DataLoader or a pair of tensors")
    return StreamedBatches(data, steps, config.seed, device)


def _rows(data: tuple[Any, ...] | Mapping[str, Any]) -> Rows:
    """Tensors with one entry for each example as a data set."""
    return Rows(tuple(map(torch.as_tensor, data)) if isinstance(data, tuple) else data)


def _opened(data: Data, *, pairs: bool = True) -> Data:
    """The data set of a name or folder, the split in memory of a pair of tensors; anything else as it is."""
    if isinstance(data, str | os.PathLike):
        return load(os.fsdecode(data))
    return from_pair(*data, integers=True) if pairs and isinstance(data, tuple) and len(data) == 2 else data


def _has_length(data: object) -> bool:
    """True for a data set that knows its length: PyTorch's are all of one type, with one or without."""
    try:
        return len(data) > 0  # pyright: ignore[reportArgumentType]
    except TypeError:
        return False


def as_array(data: Data) -> ArrayData:
    """The user's data, in any of its forms, as a split in memory that is evaluated on; of a data set its test split."""
    split = as_labelled(data)
    if not isinstance(split, ArrayData):
        raise DataError("data of several inputs cannot be used here: give pairs of inputs and labels")
    return split


def as_labelled(data: Data | LabelledBatches) -> ArrayData | LabelledBatches:
    """The same, or where an example has several inputs or a batch is a dict, batches with their labels."""
    if isinstance(data, LabelledBatches):
        return data
    if isinstance(data, Mapping) or (isinstance(data, tuple) and len(data) > 2):
        data = _rows(data)
    if not isinstance(data, (str, tuple, list, DataLoader, ArrayData, Tensor)) and hasattr(data, "__getitem__"):
        data = DataLoader(data, EVALUATED)  # pyright: ignore[reportArgumentType]
    if isinstance(data, (DataLoader, list)):
        batches = [_labels_apart(batch) for batch in data]
        labels = torch.cat([y for _, y in batches]) if batches else torch.empty(0)
        if not all(isinstance(x, Tensor) for x, _ in batches):
            return LabelledBatches([x for x, _ in batches], as_targets(labels))
        data = torch.cat([x for x, _ in batches]) if batches else labels, labels
    split = _opened(data)
    split = split.test if isinstance(split, Dataset) else split
    split = split.decoded() if isinstance(split, StreamedData) else split
    if not isinstance(split, ArrayData):
        raise DataError(f"data of type {type(data).__name__} cannot be used: give a DataLoader or a pair of tensors")
    return split


def _labels_apart(batch: Any) -> tuple[Any, Tensor]:
    """A batch without its labels, and these."""
    x, y = trees.plain(batch), None
    if isinstance(x, dict):
        x, y = {name: value for name, value in x.items() if name != LABELS}, x.get(LABELS)
    elif isinstance(x, (tuple, list)) and len(x) > 1:
        x, y = x[0] if len(x) == 2 else tuple(x[:-1]), x[-1]
    if not isinstance(y, Tensor):
        kind = type(batch).__name__
        raise DataError(f"a batch is a {kind} without labels: give (inputs, ..., labels), or a dict with them")
    if not y.dim():
        raise DataError("a batch is a single example: give a DataLoader, which makes batches of them")
    if isinstance(x, dict) and y.dim() > 1 and not y.is_floating_point():
        raise DataError(
            "labels of tokens in a dict: the network's own loss may compare each with the token before, so that right "
            "answers cannot be counted; give validation= to prune, which measures this loss"
        )
    return x, y


def held_out(data: Data, size: float, seed: int) -> tuple[Data, Data]:
    """(training, validation): data without `size` of its examples, a fraction or a number.

    Each class in proportion, where an example has one label in memory or on disk.
    """
    data = _opened(data)
    if isinstance(data, Dataset):
        train, held = held_out(data.train, size, seed)
        return replace(data, train=train), held
    if isinstance(data, ArrayData | StreamedData):
        train, held = holdout(data, size, seed)
        return train, held.decoded() if isinstance(held, StreamedData) else held
    if isinstance(data, (tuple, Mapping)):
        data = _rows(data)
    if isinstance(data, (DataLoader, list)) or not hasattr(data, "__getitem__") or not _has_length(data):
        raise DataError(
            f"validation = {size:g} cannot be held out of a {type(data).__name__}: give data to validate on instead"
        )
    whole: Any = data
    count, order = held_count(len(whole), size), torch.randperm(len(whole), generator=generator(seed, 3)).tolist()
    return Subset(whole, sorted(order[count:])), Subset(whole, sorted(order[:count]))


def evaluation_batches(data: Data, device: torch.device, prepared: Prepared) -> Callable[[], Iterator[tuple[Any, Any]]]:
    """The user's data on the device, as they are evaluated: not augmented, in their own order."""
    split: Any = data
    if prepared.y is not None and isinstance(data, (str, os.PathLike, Dataset, StreamedData, tuple)):
        split = as_array(data)
    elif isinstance(data, (tuple, Mapping)):
        split = DataLoader(Rows(data), EVALUATED)
    elif not isinstance(data, (ArrayData, DataLoader, list)) and hasattr(data, "__getitem__"):
        split = DataLoader(data, EVALUATED)  # pyright: ignore[reportArgumentType]
    as_is = prepared.y is None

    def walk() -> Iterator[tuple[Any, Any]]:
        if not isinstance(split, ArrayData):
            for batch in split:
                x, y = (batch, None) if as_is else batch
                yield trees.moved(x, device), None if y is None else y.to(device)
            return
        done = 0
        for x in split.parts():
            yield x.to(device, prepared.x.dtype), split.y[done : done + len(x)].to(device)
            done += len(x)

    found, wanted = next(walk())[0], prepared.x
    if isinstance(found, Tensor) and found.shape[1:] != wanted.shape[1:]:
        shapes = tuple(found.shape[1:]), tuple(wanted.shape[1:])
        raise DataError(
            f"validation inputs of shape {shapes[0]}, but those of training have {shapes[1]}: both must agree"
        )
    return walk


def example_of(batches: Source) -> tuple[Any, Tensor | None]:
    """Two inputs of the first batch and their targets, on the CPU: what the network is traced with."""
    x, y = batches.first() if isinstance(batches, StreamBatches) else next(iter(batches.epoch(0)))
    few = trees.apply(trees.part(x, slice(0, 2)), lambda tensor: tensor.cpu().contiguous())
    return few, None if y is None else y[:2].cpu()


# ---- data and network fit each other


def check_loss(model: nn.Module, objective: Objective, config: Config, x: Any) -> Any:
    """Arguments by position that the network is called with for a batch x of any structure; its loss must be one.

    Sets what the objective learns from the first examples: who takes the labels, and whether equation 9 applies.
    """
    x = trees.apply(x, lambda tensor: tensor.to(_device(model)))
    if objective.loss is None and isinstance(x, Mapping) and LABELS in x:
        parameters = inspect.signature(model.forward).parameters
        named = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        objective.labels_apart = LABELS not in parameters and not named
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for training in (False, True):
        with isolated(model):
            network = copied(model).train(training)

            def call(args: Any, kwargs: Any, network: nn.Module = network) -> Any:
                calls.append((args, kwargs))
                return network(*args, **kwargs)

            found = objective(called_by(network, call), x)
            _check_value(found.loss, network, bool(calls))
    objective.residuals, objective.scored = found.residual is not None, found.scored
    if config.likelihood == "gaussian" and config.task == "classification" and not objective.residuals:
        raise ConfigError("likelihood = gaussian (equation 9) needs one label for each example: leave it out")
    args, kwargs = calls[0]
    without = {name: value for name, value in kwargs.items() if name != LABELS}
    with isolated(model), suppress(Exception):  # traced without labels where the network runs without them
        copied(model).eval()(*args, **without)
        kwargs = without
    return positional(model, args, kwargs)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _check_value(loss: Tensor, network: nn.Module, called: bool) -> None:
    """Raise unless the loss is finite and depends on the network."""
    if not called:
        raise StructureError("loss does not call the network: compute it from what network(...) returns")
    learning = [p for p in network.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, learning, allow_unused=True) if loss.requires_grad and learning else []
    if learning and all(gradient is None for gradient in found):
        raise StructureError(
            "the loss does not depend on the network's weights: compute it from what network(...) returns"
        )
    if not bool(torch.isfinite(loss)):
        raise DataError(f"the loss of the first examples is {float(loss)}: look at the data and at the loss")


def check_targets(
    model: nn.Module, batches: Source, config: Config, objective: Objective, example: Tensor, targets: Tensor
) -> None:
    """Targets must fit the task and the network's outputs, in evaluation and in training."""
    task, head = config.task, int(config.noise == "input")
    real = targets.is_floating_point()
    if (task == "classification" and real and not _are_soft(targets)) or (task == "regression" and not real):
        whole = task == "classification" and bool((targets == targets.round()).all())
        other = "regression" if task == "classification" else "classification"
        besides = ", or give classes as integers (labels.long())" if whole else ""
        if task == "classification" and targets.ndim == 2 and targets.shape[1] > 1:
            raise DataError(_advice(targets, _target_shape(batches)))
        raise DataError(f"task = {task} does not fit labels of type {targets.dtype}: use task = {other}{besides}")
    try:
        outputs = objective.select(_outputs(model, example, training=False))
    except DllpError:
        raise
    except Exception as error:
        raise StructureError(misfit(model, [example], error)) from error
    wanted = "one tensor of shape (batch, outputs)"
    if not isinstance(outputs, Tensor) or outputs.dim() < (1 if task == "binary" else 2):
        raise StructureError(f"the network must return {wanted}, not {_described(outputs)}")
    if len(outputs) != len(example):
        raise StructureError(
            f"a copy of the network gives {len(outputs)} outputs for {len(example)} inputs: one for each is needed, "
            "and no hook or attribute may refer to the original network"
        )
    try:
        pair = torch.cat([example, example])[:2]  # one example is another matter: see check_parts
        found = objective.select(_outputs(model, pair, training=True))
    except Exception as error:
        raise StructureError(f"the network cannot be trained: {first_line(error)}") from error
    if not isinstance(found, Tensor) or found.shape[1:] != outputs.shape[1:]:
        raise StructureError(
            f"in training the network must return {wanted} as it does in evaluation, not {_described(found)}: switch "
            "auxiliary outputs off"
        )
    if task == "regression":
        _check_regression(batches, outputs, targets, head)
    elif task == "binary":
        if outputs[0].numel() != targets[0].numel() or not bool(((targets >= 0) & (targets <= 1)).all()):
            raise DataError(
                f"task = binary with labels of shape {tuple(targets.shape[1:])} from {float(targets.min()):g} to "
                f"{float(targets.max()):g}: give one from 0 to 1 for each of the {outputs[0].numel()} outputs"
            )
        objective.residuals = False
    elif outputs.dim() > 2 or (not real and targets.dim() > 1):
        _check_positions(outputs, targets, config)
        objective.residuals = False
    else:
        _check_classes(batches, outputs, targets, head)


def _check_classes(batches: Source, outputs: Tensor, targets: Tensor, head: int) -> None:
    """One label for each example, an integer or a probability of each class."""
    if _are_probabilities(outputs if not head else outputs[:, :-1]):
        raise StructureError(
            "the network's outputs are probabilities, and their softmax would be taken again: remove the last softmax"
        )
    if targets.is_floating_point():
        if targets.shape[1] != outputs.shape[1] - head:
            raise DataError(
                f"soft labels of {targets.shape[1]} classes for {outputs.shape[1] - head} outputs: both must agree"
            )
    elif isinstance(batches, LoaderBatches):
        batches.num_classes = outputs.shape[1] - head
    elif head and int(batches.data.y.max()) + 1 >= outputs.shape[1]:  # pyright: ignore[reportAttributeAccessIssue]
        raise DataError(
            f"noise = input needs one output more than there are classes, the last for log d(x): the network gives "
            f"{outputs.shape[1]} outputs for {int(batches.data.y.max()) + 1} classes"  # pyright: ignore[reportAttributeAccessIssue]
        )
    else:
        check_labels(batches.data.y, outputs.shape[1] - head)  # pyright: ignore[reportAttributeAccessIssue]


def _check_positions(outputs: Tensor, targets: Tensor, config: Config) -> None:
    """One label for each token or pixel."""
    if config.likelihood == "gaussian" or config.noise == "input":
        raise ConfigError("equation 9 and noise = input need one label for each example: use likelihood = categorical")
    logits = likelihood.class_last(outputs)
    if logits.shape[:-1] != targets.shape:
        raise DataError(
            f"labels of shape {tuple(targets.shape[1:])} for outputs of shape {tuple(outputs.shape[1:])}: give one "
            "class for each token (batch, tokens, classes) or pixel (batch, classes, height, width), or select="
        )
    check_labels(targets, logits.shape[-1], positions=True)


def _check_regression(batches: Source, outputs: Tensor, targets: Tensor, head: int) -> None:
    """As many outputs as targets, in the same order."""
    found, wanted = outputs[0].numel() - head, targets[0].numel()
    if found != wanted:
        besides = " besides that for log d(x)" if head else ""
        raise DataError(
            f"the network gives {found} outputs{besides} but the data has {wanted} targets: both must agree"
        )
    shape = _target_shape(batches)
    given, own = ([size for size in sizes if size > 1] for sizes in (shape, outputs.shape[1:]))
    if given != own and sorted(given) == sorted(own):  # as many sides of the same lengths
        raise DataError(
            f"targets of shape {shape} for outputs of shape {tuple(outputs.shape[1:])}: give them in "
            "the order of the outputs"
        )


def _are_soft(targets: Tensor) -> bool:
    """True for probabilities of several classes, of one-hot labels too."""
    return targets.dim() == 2 and _are_probabilities(targets)


def _advice(targets: Tensor, shape: tuple[int, ...]) -> str:
    """The way out for real targets (B, C) of a classification that are no probabilities: several labels, or numbers.

    Of another shape as they were given they may be one-hot classes of pixels.
    """
    if len(shape) > 1 and _are_probabilities(targets.reshape(-1, *shape).movedim(1, -1).flatten(0, -2)):
        return f"labels of shape {shape} are probabilities of each place's classes: give the classes, labels.argmax(1)"
    given = f"labels of type {targets.dtype} and shape (batch, {targets.shape[1]}) for a classification"
    if bool(((targets == 0) | (targets == 1)).all()):
        return f"{given} are several labels at once: use task = binary"
    return f"{given}: use task = regression"


def _target_shape(batches: Source) -> tuple[int, ...]:
    """Shape of one target of a regression, as it was given."""
    if isinstance(batches, LoaderBatches):
        return batches.target_shape
    data = batches.data  # pyright: ignore[reportAttributeAccessIssue]
    return data.target_shape or tuple(data.y.shape[1:]) if isinstance(data, ArrayData) else ()


def _are_probabilities(outputs: Tensor) -> bool:
    """True for the outputs of a softmax: never negative, and adding up to 1."""
    if outputs.shape[1] < 2:
        return False
    return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), outputs.new_ones(len(outputs)), atol=1e-3)


def _described(outputs: Any) -> str:
    return f"one of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"


def check_parts(model: nn.Module, batches: Source, config: Config, example: Any, place: Place) -> None:
    """Raise where the smallest part of a batch is one example, and the network cannot learn from that (batch norm)."""
    known = isinstance(batches, (LoaderBatches, StreamedBatches))
    size = batches.smallest if known else batches.batch_size
    if size is None or (config.sync_batch_norm and place.shards.size > 1):
        return
    size = max(1, size // place.shards.size)
    if size // min(config.accumulate, size) > 1:
        return
    alone = trees.apply(trees.part(example, slice(0, 1)), lambda tensor: tensor.to(_device(model)))
    try:
        with isolated(model), torch.no_grad():
            copied(model).train()(*(alone if isinstance(alone, tuple) else (alone,)))
    except ValueError as error:
        raise DataError(
            "a batch, or a part of one, is a single example, from which the network cannot learn: use drop_last=True, "
            f"another batch_size or less accumulate ({first_line(error)})"
        ) from error


def make_gating(
    model: nn.Module, structure: Structure, particles: Particles, config: Config, filter_fn: FilterFn | None
) -> ChannelGating | WeightGating:
    """The gates of the chosen granularity; a budget below what can be reached is an error before any training."""
    layout, device = particles.layout, particles.device
    if config.keep_latency is not None and structure.latency is None:
        raise ConfigError("keep_latency is a budget of dllp.prune: give keep_flops or keep_params here")
    if config.granularity == "channel":
        gating = ChannelGating(model, structure, layout, device, round_to=config.round_to)
    else:
        gating = WeightGating(model, structure, layout, device, linear=config.gate_linear, filter_fn=filter_fn)
    gating.select(torch.zeros(gating.units), *config.budget)
    return gating


def make_teacher(
    model: nn.Module, other: nn.Module | None, config: Config, objective: Objective, prepared: Prepared
) -> Teacher | None:
    """The network that teaches a run, `model` itself or another one in its place; None where no network does."""
    if config.teacher == "off" and other is None:
        return None
    if config.teacher != "given" and other is not None:
        raise ConfigError(f"a teacher is handed over, but teacher = {config.teacher}: use Config(teacher='given')")
    networks = [copied(model).eval(), *([] if other is None else [copied(other).eval()])]
    shapes = []
    for network in networks:
        weight = next(network.parameters(), torch.zeros(()))

        def fitting(tensor: Tensor, weight: Tensor = weight) -> Tensor:
            return tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else None)

        x, y = (trees.apply(part, fitting) for part in (prepared.x, prepared.y))
        with isolated(network):
            try:
                shapes.append(tuple(needed(objective(network, x, y).output).shape))
            except UNFIT as error:
                raise StructureError(f"the teacher cannot take the batch: {first_line(error)}") from error
    if shapes[0] != shapes[-1]:
        raise StructureError(
            f"the teacher gives outputs of shape {shapes[-1][1:]}, the network {shapes[0][1:]}: both must agree"
        )
    return (
        Teacher(model if other is None else other, config, prepared.batches.device)
        if config.teacher == "given"
        else None
    )


# ---- networks and their arguments


def positional(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call in the order of the network's forward, left-out ones at their defaults; one alone as is.

    A network is traced, cut and verified by position.
    """
    if kwargs:
        try:
            bound = inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise StructureError(f"the batch does not fit the network's forward: {first_line(error)}") from None
        last = max((k for k, name in enumerate(bound.signature.parameters) if name in bound.arguments), default=-1)
        bound.apply_defaults()
        if bound.kwargs:
            raise StructureError(f"forward takes {', '.join(bound.kwargs)} by name only: let it take them by position")
        args = bound.args[: last + 1]
    return args[0] if len(args) == 1 else args


def as_float32(model: nn.Module) -> nn.Module:
    """The network itself, or a float32 copy of one in another precision, with a warning."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not kinds or kinds == {torch.float32}:
        return model
    names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
    warnings.warn(f"the network is {names}: it is pruned as a float32 copy, and so is the result", stacklevel=3)
    return copied(model).float()
