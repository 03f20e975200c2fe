"""What a run needs before it can start: batches that fit the network, its structure, and its gates."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dllp.config import Config
from dllp.data import (
    ArrayData,
    Batches,
    Dataset,
    LoaderBatches,
    StreamBatches,
    StreamedData,
    check_labels,
    from_pair,
    load,
    validate,
)  # fmt: skip
from dllp.devices import check_repeatable, find_device
from dllp.errors import DataError, StructureError
from dllp.gating import ChannelGating, FilterFn, WeightGating
from dllp.parallel import Place
from dllp.particles import Particles
from dllp.ranks import Ranks
from dllp.structure import Structure, discover
from dllp.tracing import check_network, first_line, isolated

Data = DataLoader[Any] | tuple[Any, Any] | ArrayData | StreamedData | Dataset | str
Source = Batches | LoaderBatches | StreamBatches


def prepare(
    model: nn.Module, data: Data, config: Config, filter_fn: FilterFn | None, ranks: Ranks | None = None
) -> tuple[Source, Tensor, Structure]:
    """Batches on the device, an example that the network is known to take, and what of it can be pruned."""
    check_network(model)
    device = find_device(config.device, None if ranks is None or ranks.alone else ranks.local)
    check_repeatable(device, config.deterministic)
    batches = as_batches(data, config, device)
    example, targets = example_of(batches)
    structure = discover(model, example, filter_fn=filter_fn)
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise StructureError("every parameter of the network is frozen: set requires_grad on those that may learn")
    check_targets(model, batches, config, example, targets)
    return batches, example, structure


def as_batches(data: Data, config: Config, device: torch.device) -> Source:
    """Whatever the user gave as a source of batches on the device."""
    channels_last = device.type == "cuda"
    if isinstance(data, DataLoader):
        return LoaderBatches(data, config.seed, device, channels_last)
    if isinstance(data, str):
        data = load(data)
    if isinstance(data, Dataset):
        data = data.train
    if isinstance(data, StreamedData):
        return StreamBatches(data, config.batch_size, config.seed, device, channels_last)
    if isinstance(data, tuple):
        if len(data) != 2:
            raise DataError(f"data is a tuple of {len(data)}: give (inputs, labels)")
        data = from_pair(*data)
    if not isinstance(data, ArrayData):
        raise DataError(f"data of type {type(data).__name__} cannot be used: give a DataLoader or a pair of tensors")
    validate(data)
    return Batches(data, config.batch_size, config.seed, device, channels_last)


def example_of(batches: Source) -> tuple[Tensor, Tensor]:
    """Two inputs of the first batch and their targets, on the CPU: what the network is traced with."""
    x, y = batches.first() if isinstance(batches, StreamBatches) else next(iter(batches.epoch(0)))
    return x[:2].cpu().contiguous(), y[:2].cpu()


def check_targets(model: nn.Module, batches: Source, config: Config, example: Tensor, targets: Tensor) -> None:
    """Targets must fit the task and the network's outputs; discover() has shown that it takes the inputs."""
    task, head = config.task, int(config.noise == "input")
    if targets.is_floating_point() != (task == "regression"):
        other = "regression" if task == "classification" else "classification"
        raise DataError(f"task = {task} does not fit labels of type {targets.dtype}: use task = {other}")
    with torch.no_grad():
        first = next(model.parameters(), example)
        probe = copy.deepcopy(model).eval()
        outputs = probe(example.to(first.device, first.dtype) if example.is_floating_point() else example)
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        raise StructureError("the network must return one tensor of shape (batch, outputs)")
    if task == "regression":
        found, wanted = outputs[0].numel() - head, targets[0].numel()
        if found != wanted:
            besides = " besides that for log d(x)" if head else ""
            raise DataError(
                f"the network gives {found} outputs{besides} but the data has {wanted} targets: both must agree"
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
            copy.deepcopy(model).train()(example[:1].to(first.device))
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
