"""Preparation of a run: batches that fit the network, the network's structure, and its gates."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dllp.config import Config, usual_batch
from dllp.data import (
    ArrayData,
    Batches,
    Dataset,
    LoaderBatches,
    StreamBatches,
    StreamedData,
    check_labels,
    from_pair,
    holdout,
    load,
    validate,
)  # fmt: skip
from dllp.devices import trees
from dllp.devices.device import check_repeatable, find_device
from dllp.devices.mesh import Place
from dllp.devices.ranks import Ranks
from dllp.errors import ConfigError, DataError, StructureError, first_line
from dllp.structure.groups import Structure, discover
from dllp.structure.select import select
from dllp.structure.slicing import copied
from dllp.structure.trace import check_network, isolated, misfit
from dllp.training.gating import ChannelGating, FilterFn, WeightGating
from dllp.training.particles import Particles
from dllp.training.teacher import Teacher

Data = DataLoader[Any] | tuple[Any, Any] | ArrayData | StreamedData | Dataset | str | os.PathLike[str]
Source = Batches | LoaderBatches | StreamBatches


def prepare(
    model: nn.Module, data: Data, config: Config, filter_fn: FilterFn | None, ranks: Ranks | None = None, *,
    channels: bool = True,
) -> tuple[Source, Tensor, Structure]:  # fmt: skip
    """Batches on the device, an example that the network is known to take, and what of it can be pruned.

    Without `channels` no groups of them are looked for, and any network will do.
    """
    check_network(model)
    device = find_device(config.device, None if ranks is None or ranks.alone else ranks.local)
    check_repeatable(device, config.deterministic)
    batches = as_batches(data, config, device)
    example, targets = example_of(batches)
    if not isinstance(batches, StreamBatches) and not example.is_floating_point() and not _takes(model, example):
        batches.integers, example = False, example.float()
    check_targets(model, batches, config, example, targets)
    return batches, example, discover(model, example, filter_fn=filter_fn, channels=channels)


LOOKED_AT = 256
"""Training examples by which a network's start is judged."""
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
    return config.resolved(trained=learned, batch_size=size)


def has_learned(model: nn.Module, batches: Source, config: Config) -> bool:
    """True where a run starts from a network that answers training examples clearly better than a constant does."""
    if config.init != "given" or config.task == "binary":
        return False
    outputs, targets = [], []
    for x, y in batches.epoch(0):
        outputs.append(_outputs(model, x[:LOOKED_AT].cpu(), training=False).float().flatten(1).cpu())
        targets.append(y[:LOOKED_AT].cpu())
        if sum(map(len, targets)) >= LOOKED_AT:
            break
    answers, y = torch.cat(outputs), torch.cat(targets)
    if config.noise == "input":
        answers = answers[:, :-1]
    if config.task == "regression":
        y = y.flatten(1)
        found, constant = (answers - y).square().mean(), (y - y.mean(0)).square().mean()
    else:
        frequency = y.bincount() / len(y)
        found, constant = F.cross_entropy(answers, y), torch.special.entr(frequency).sum()
    return bool(found < BETTER * constant)


def suited_multiple(structure: Structure, config: Config) -> int:
    """Channels whose multiples a run keeps where nobody chose: :data:`MULTIPLE` in a network that is wide enough."""
    counted, keep = config.budget
    try:
        cost = structure.params if counted == "params" else structure.flops
        select(structure, torch.zeros(structure.units), cost=cost, keep=keep, round_to=MULTIPLE)
    except StructureError:  # so few channels cannot be reached in these steps
        return 1
    return MULTIPLE if all(group.units >= NARROWEST for group in structure.groups) else 1


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


def as_batches(data: Data, config: Config, device: torch.device) -> Source:
    """The user's data, in any of its forms, as a source of batches on the device."""
    channels_last = device.type == "cuda"
    if isinstance(data, DataLoader):
        return LoaderBatches(data, config.seed, device, channels_last, integers=True)
    if isinstance(data, str | os.PathLike):
        data = load(os.fsdecode(data))
    if isinstance(data, Dataset):
        data = data.train
    if isinstance(data, StreamedData):
        return StreamBatches(data, config.batch_size or usual_batch(len(data)), config.seed, device, channels_last)
    if isinstance(data, tuple):
        if len(data) != 2:
            raise DataError(f"data is a tuple of {len(data)}: give (inputs, labels)")
        data = from_pair(*data, integers=True)
    if not isinstance(data, ArrayData):
        raise DataError(f"data of type {type(data).__name__} cannot be used: give a DataLoader or a pair of tensors")
    validate(data)
    return Batches(data, config.batch_size or usual_batch(len(data)), config.seed, device, channels_last, integers=True)


def as_array(data: Data) -> ArrayData:
    """The user's data, in any of its forms, as a split in memory that is evaluated on; of a data set its test split."""
    if isinstance(data, DataLoader):
        parts = [(x, y) for x, y in data]
        data = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    if isinstance(data, str | os.PathLike):
        data = load(os.fsdecode(data))
    split = data.test if isinstance(data, Dataset) else data
    split = split.decoded() if isinstance(split, StreamedData) else split
    if isinstance(split, tuple) and len(split) == 2:
        split = from_pair(*split, integers=True)
    if not isinstance(split, ArrayData):
        raise DataError(f"data of type {type(data).__name__} cannot be used: give a DataLoader or a pair of tensors")
    return split


def held_out(data: Data, size: float, seed: int) -> tuple[Data, ArrayData]:
    """(training, validation): data in memory or on disk without `size` of its examples, a fraction or a number."""
    if isinstance(data, str | os.PathLike):
        data = load(os.fsdecode(data))
    if isinstance(data, Dataset):
        train, held = held_out(data.train, size, seed)
        return replace(data, train=train), held
    if isinstance(data, tuple) and len(data) == 2:
        data = from_pair(*data, integers=True)
    if not isinstance(data, ArrayData | StreamedData):
        raise DataError(
            f"validation = {size:g} cannot be held out of a {type(data).__name__}: give data to validate on instead"
        )
    train, held = holdout(data, size, seed)
    return train, held.decoded() if isinstance(held, StreamedData) else held


def evaluation_batches(
    data: Data, device: torch.device, example: Tensor
) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """The user's data as inputs and labels on the device, as they are evaluated: not augmented, in their own order."""
    split = data if isinstance(data, DataLoader) else as_array(data)

    def walk() -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(split, DataLoader):
            yield from ((x.to(device), y.to(device)) for x, y in split)
            return
        done = 0
        for x in split.parts():
            yield x.to(device), split.y[done : done + len(x)].to(device)
            done += len(x)

    shape, wanted = tuple(next(walk())[0].shape[1:]), tuple(example.shape[1:])
    if shape != wanted:
        raise DataError(f"validation inputs of shape {shape}, but those of training have {wanted}: both must agree")
    return walk


def example_of(batches: Source) -> tuple[Tensor, Tensor]:
    """Two inputs of the first batch and their targets, on the CPU: what the network is traced with."""
    x, y = batches.first() if isinstance(batches, StreamBatches) else next(iter(batches.epoch(0)))
    return x[:2].cpu().contiguous(), y[:2].cpu()


def check_targets(model: nn.Module, batches: Source, config: Config, example: Tensor, targets: Tensor) -> None:
    """Targets must fit the task and the network's outputs, in evaluation and in training."""
    task, head = config.task, int(config.noise == "input")
    if targets.is_floating_point() != (task == "regression"):
        whole = task == "classification" and bool((targets == targets.round()).all())
        other = "regression" if task == "classification" else "classification"
        besides = ", or give classes as integers (labels.long())" if whole else ""
        if task == "classification" and targets.ndim == 2 and targets.shape[1] > 1:
            raise DataError(_advice(targets))
        raise DataError(f"task = {task} does not fit labels of type {targets.dtype}: use task = {other}{besides}")
    try:
        outputs = _outputs(model, example, training=False)
    except Exception as error:
        raise StructureError(misfit(model, [example], error)) from error
    wanted = "one tensor of shape (batch, outputs)"
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or (task == "classification" and outputs.dim() > 2):
        raise StructureError(f"the network must return {wanted}, not {_described(outputs)}")
    if len(outputs) != len(example):
        raise StructureError(
            f"a copy of the network gives {len(outputs)} outputs for {len(example)} inputs: one for each is needed, "
            "and no hook or attribute may refer to the original network"
        )
    try:
        pair = torch.cat([example, example])[:2]  # one example is another matter: see check_parts
        found = _outputs(model, pair, training=True)
    except Exception as error:
        raise StructureError(f"the network cannot be trained: {first_line(error)}") from error
    if not isinstance(found, Tensor) or found.shape[1:] != outputs.shape[1:]:
        raise StructureError(
            f"in training the network must return {wanted} as it does in evaluation, not {_described(found)}: switch "
            "auxiliary outputs off"
        )
    if task == "classification" and _are_probabilities(outputs if not head else outputs[:, :-1]):
        raise StructureError(
            "the network's outputs are probabilities, and their softmax would be taken again: remove the last softmax"
        )
    if task == "regression":
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
    elif isinstance(batches, LoaderBatches):
        batches.num_classes = outputs.shape[1] - head
    elif head and int(batches.data.y.max()) + 1 >= outputs.shape[1]:
        raise DataError(
            f"noise = input needs one output more than there are classes, the last for log d(x): the network gives "
            f"{outputs.shape[1]} outputs for {int(batches.data.y.max()) + 1} classes"
        )
    else:
        check_labels(batches.data.y, outputs.shape[1] - head)


def _advice(targets: Tensor) -> str:
    """The way out for real targets (B, C) of a classification: one-hot, mixed, several labels at once, or numbers."""
    given = f"labels of type {targets.dtype} and shape (batch, {targets.shape[1]}) for a classification"
    if torch.allclose(targets.sum(1), targets.new_ones(len(targets)), atol=1e-3) and bool((targets >= 0).all()):
        if bool((targets == targets.round()).all()):
            return f"{given} are one-hot: give the classes (labels.argmax(1))"
        return f"{given} are mixed or smoothed: give the classes, mixup and smoothing are left out in a run"
    if bool(((targets == 0) | (targets == 1)).all()):
        return f"{given} are several labels at once: task = regression fits them by squared error"
    return f"{given}: use task = regression"


def _target_shape(batches: Source) -> tuple[int, ...]:
    """Shape of one target of a regression, as it was given."""
    if isinstance(batches, LoaderBatches):
        return batches.target_shape
    data = batches.data
    return data.target_shape or tuple(data.y.shape[1:]) if isinstance(data, ArrayData) else ()


def _are_probabilities(outputs: Tensor) -> bool:
    """True for the outputs of a softmax: never negative, and adding up to 1."""
    if outputs.shape[1] < 2:
        return False
    return bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), outputs.new_ones(len(outputs)), atol=1e-3)


def _described(outputs: Any) -> str:
    return f"one of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"


def check_parts(model: nn.Module, batches: Source, config: Config, example: Tensor, place: Place) -> None:
    """Raise where the smallest part of a batch is one example, and the network cannot learn from that (batch norm)."""
    size = batches.smallest if isinstance(batches, LoaderBatches) else batches.batch_size
    if size is None or (config.sync_batch_norm and place.shards.size > 1):
        return
    size = max(1, size // place.shards.size)
    if size // min(config.accumulate, size) > 1:
        return
    first = next(model.parameters(), example)
    try:
        with isolated(model), torch.no_grad():
            copied(model).train()(example[:1].to(first.device))
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
    if config.granularity == "channel":
        gating = ChannelGating(model, structure, layout, device, round_to=config.round_to)
    else:
        gating = WeightGating(model, structure, layout, device, linear=config.gate_linear, filter_fn=filter_fn)
    keep = config.keep_params or config.keep_flops
    gating.select(torch.zeros(gating.units), "params" if config.keep_params else "flops", keep)
    return gating


def make_teacher(
    model: nn.Module, other: nn.Module | None, config: Config, device: torch.device, example: Tensor
) -> Teacher | None:
    """The network that teaches a run, `model` itself or another one in its place; None where no network does."""
    if config.teacher != "given":
        if other is not None:
            raise ConfigError(f"a teacher is handed over, but teacher = {config.teacher}: use Config(teacher='given')")
        return None
    teacher = Teacher(model if other is None else other, config, device)
    if other is not None:
        _check_teacher(teacher.network, example, _outputs(model, example, training=False)[0].numel())
    return teacher


def _check_teacher(network: nn.Module, example: Tensor, outputs: int) -> None:
    """Raise where the teacher does not give as many outputs for an example (2, ...) as the network it teaches."""
    weight = next(network.parameters(), example)
    found = network(example.to(weight.device, weight.dtype if example.is_floating_point() else None))
    if not isinstance(found, Tensor) or found[0].numel() != outputs:
        given = f"{found[0].numel()} outputs" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise StructureError(f"the teacher gives {given} where the network gives {outputs}: both must agree")


# ---- networks and their arguments


def called_with(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A user's example as arguments of the network: a dict by name, a tuple or list in order, anything else alone."""
    example = trees.plain(example)
    if isinstance(example, dict):
        return (), example
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


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
