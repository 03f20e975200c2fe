"""The one verb: prune a network, and hold, save and load what came of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dllp import artifacts, health, notebook
from dllp.checkpoints import State
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
    validate,
)  # fmt: skip
from dllp.data import load as load_data
from dllp.devices import check_repeatable, environment, find_device
from dllp.errors import ArtifactError, ConfigError, DataError, NumericsError, StructureError
from dllp.extract import Slab, extract
from dllp.gating import ChannelGating, FilterFn, WeightGating
from dllp.parallel import Place
from dllp.particles import Particles
from dllp.posterior import Posterior
from dllp.ranks import Ranks
from dllp.sharing import AnyCheckpoints
from dllp.slicing import cut
from dllp.state import restore, snapshot
from dllp.structure import Structure, discover
from dllp.train import EpochRecord, Trainer

OnEpoch = Callable[[EpochRecord], None]
OnStep = Callable[[Trainer], None]
ROLLBACKS = 3
"""How often a run may go back to its last checkpoint with half the learning rate."""
Data = DataLoader[Any] | tuple[Any, Any] | ArrayData | StreamedData | Dataset | str
Source = Batches | LoaderBatches | StreamBatches


@dataclass(frozen=True)
class Size:
    """What a network costs: multiply-accumulates of one example and stored numbers, of non-zero weights only."""

    macs: float
    params: int


@dataclass(frozen=True)
class Result:
    """A pruned network and everything known about it.

    Attributes:
        config: The configuration of the run, every default filled in.
        slabs: The extracted particles, M_p and M_0 of each.
        posterior: Predicts with all extracted particles.
        history: One record for each epoch.
        dense, sizes: Costs of the original network and of each extracted one.
        gates: Gate logits (n, U), decisions (n, U), slab precisions (n, modules) and noise 1/d^2 (n,).
        widths: Kept and original channels (or weights) of each group, for each particle.
        whole: Groups that were kept whole, and why.
        info: Versions and hardware of the run, and whatever a caller adds.
    """

    config: Config
    slabs: list[Slab]
    posterior: Posterior
    history: list[dict[str, Any]]
    dense: Size
    sizes: list[Size]
    gates: dict[str, Tensor]
    widths: dict[str, list[int]]
    whole: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """M_p, the pruned network: the slab part of the first particle."""
        return self.slabs[0].network

    @property
    def reference(self) -> nn.Module:
        """M_0, the first particle in its full shape."""
        return self.slabs[0].reference

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        sizes = [vars(size) for size in self.sizes]
        return notebook.summary(self.config.as_dict(), vars(self.dense), sizes, self.widths, self.history)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the run into a new or empty folder, whole or not at all; `overwrite` replaces a run. Returns it."""
        folder = Path(folder)
        with artifacts.new_folder(folder, overwrite) as temporary:
            self.write_networks(temporary)
            self.write_run(temporary)
        return folder

    def write_networks(self, folder: Path) -> None:
        """The extracted networks and the gates."""
        for i, slab in enumerate(self.slabs):
            artifacts.write_network(folder / f"particle-{i}.safetensors", slab.network, slab.gated)
            artifacts.write_network(folder / f"reference-{i}.safetensors", slab.reference)
        artifacts.write_tensors(folder / "gates.safetensors", self.gates)

    def write_run(self, folder: Path) -> None:
        """run.json, the last file: where it is, a run is finished."""
        run = {
            "format": artifacts.FORMAT,
            "config": self.config.as_dict(),
            "recipes": [slab.recipe for slab in self.slabs],
            "gated": list(self.slabs[0].gated),
            "dense": vars(self.dense),
            "sizes": [vars(size) for size in self.sizes],
            "widths": self.widths,
            "whole": self.whole,
            "history": self.history,
            "info": self.info,
        }
        artifacts.write_json(folder / artifacts.RUN, run)


def prune(
    model: nn.Module,
    data: Data,
    config: Config | None = None,
    *,
    filter_fn: FilterFn | None = None,
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    on_start: OnStep | None = None,
    checkpoints: AnyCheckpoints | None = None,
    ranks: Ranks | None = None,
) -> Result:
    """Prune a network by DLLP in one training run; `model` itself is left as it was.

    Args:
        model: Any network that maps a batch of inputs to a batch of outputs.
        data: A DataLoader of (inputs, labels), a pair of tensors, a split in memory or on disk, or the name of a data
            set.
        config: How; `dllp.Config(keep_flops=0.45)` for a budget.
        filter_fn: `filter_fn(module, name)` says what may be touched.
        on_epoch: Called with an :class:`EpochRecord` after each epoch.
        on_step: Called with the :class:`Trainer` after each step.
        on_start: Called with the :class:`Trainer` before its first step and after a rollback: its history has the
            epochs that a checkpoint brought.
        checkpoints: Where the run writes its checkpoints; it goes on from the newest one that it finds there.
        ranks: The processes that share the run, from :func:`dllp.ranks.joined`: all call this, with the same
            arguments, and all get the same result; `config.parallel` says what they share.
    """
    config, ranks = (config or Config()).resolved(), ranks or Ranks()
    batches, example, structure = ranks.together(lambda: prepare(model, data, config, filter_fn, ranks))
    if config.granularity == "channel" and not structure.groups:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(structure.whole.items())[:3])
        raise StructureError(f"the network has no channels that can be pruned ({reasons}): try granularity='weight'")
    place = _placed(ranks, config, batches)

    def build(place: Place) -> Trainer:
        particles = Particles.start(model, config, batches.device, place.own)
        gating = make_gating(model, structure, particles, config, filter_fn)
        sizes = {"num_data": batches.num_examples, "steps_per_epoch": batches.steps}
        return Trainer(particles, gating, config, **sizes, place=place)

    return collect(_train(build, place, batches, checkpoints, on_epoch, on_step, on_start), structure, example)


def train_dense(
    model: nn.Module,
    data: Data,
    config: Config | None = None,
    *,
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    on_start: OnStep | None = None,
    checkpoints: AnyCheckpoints | None = None,
    ranks: Ranks | None = None,
) -> Result:
    """Train the unpruned network by the same recipe, without gates, prior and Stein term: what to compare with."""
    config, ranks = (config or Config()).resolved(), ranks or Ranks()
    batches, example, structure = ranks.together(
        lambda: prepare(model, data, config, lambda module, name: False, ranks)
    )
    place = _placed(ranks, config, batches)

    def build(place: Place) -> Trainer:
        particles = Particles.start(model, config, batches.device, place.own)
        sizes = {"num_data": batches.num_examples, "steps_per_epoch": batches.steps}
        return Trainer(particles, None, config, **sizes, place=place)

    return collect(_train(build, place, batches, checkpoints, on_epoch, on_step, on_start), structure, example)


def prepare(
    model: nn.Module, data: Data, config: Config, filter_fn: FilterFn | None, ranks: Ranks | None = None
) -> tuple[Source, Tensor, Structure]:
    """Batches on the device, an example that the network is known to take, and what of it can be pruned."""
    device = find_device(config.device, None if ranks is None or ranks.alone else ranks.local)
    check_repeatable(device, config.deterministic)
    batches = as_batches(data, config, device)
    example, targets = example_of(batches)
    structure = discover(model, example, filter_fn=filter_fn)
    check_targets(model, batches, config, example, targets)
    return batches, example, structure


def _placed(ranks: Ranks, config: Config, batches: Source) -> Place:
    """What this process owns, once all are known to have the same data."""
    ranks.same("data on all hosts", f"{batches.num_examples} examples in {batches.steps} batches")
    ranks.together(lambda: ranks.lines(config.particles, config.parallel))  # told once, before groups are made
    place = ranks.place(config.particles, config.parallel)
    if isinstance(batches, StreamBatches):
        share_reading(batches, place)
    return place


def share_reading(batches: StreamBatches, place: Place) -> None:
    """Let every process read and decode only what it owns of each batch."""
    batches.share(place.part(batches.batch_size), place.shards.payloads, first=place.first)
    place.batch = batches.batch_size


def _train(
    build: Callable[[Place], Trainer],
    place: Place,
    batches: Source,
    checkpoints: AnyCheckpoints | None,
    on_epoch: OnEpoch | None,
    on_step: OnStep | None,
    on_start: OnStep | None,
) -> Trainer:
    """Run to the end, from the newest checkpoint on; after a broken number roll back to it, if that is wanted."""
    live = notebook.Live() if notebook.in_notebook() else None

    def after_step(trainer: Trainer) -> None:
        if live is not None:
            live.step(trainer)
        if on_step is not None:
            on_step(trainer)
        if checkpoints is not None:
            last = trainer.step_index == trainer.total_steps
            checkpoints.after_step(trainer.step_index, trainer.epoch_ends, lambda: healthy_snapshot(trainer), last=last)

    trouble, lr_scale = "", 1.0
    for attempt in range(ROLLBACKS + 1):
        trainer = build(place)
        if checkpoints is not None and not attempt:
            checkpoints.begin()
        found = checkpoints.latest() if checkpoints is not None else None
        if found is not None:
            restore(trainer, found)
        if attempt:
            trainer.trouble, trainer.lr_scale = trouble, lr_scale
        if on_start is not None:
            on_start(trainer)
        try:
            trainer.run(batches, on_epoch=on_epoch, on_step=after_step)
            if checkpoints is not None:
                checkpoints.flush()
            return trainer if place.alone else _whole(build, trainer, batches)
        except NumericsError as error:
            if trainer.config.on_nan == "stop" or "in the data" in str(error) or attempt == ROLLBACKS:
                raise
            trouble, lr_scale = str(error), trainer.lr_scale / 2
        finally:
            if checkpoints is not None:
                checkpoints.settle()
    raise AssertionError("the last attempt returns or raises")


def _whole(build: Callable[[Place], Trainer], part: Trainer, batches: Source) -> Trainer:
    """The finished run of several processes as one process holds it."""
    whole = build(Place(part.config.particles))
    restore(whole, snapshot(part))
    whole.run(batches)  # nothing is left to train
    return whole


def healthy_snapshot(trainer: Trainer) -> State:
    """A snapshot, but never of a run in which a number broke."""
    trainer.check_health()
    tensors, values = snapshot(trainer)
    for name, value in tensors.items():
        # buffers may hold infinities on purpose (masks)
        if value.is_floating_point() and bool((value.isnan() if "/" in name else ~value.isfinite()).any()):
            raise trainer.broken(health.find(trainer) or f"NaN or infinity in {name}", trainer.step_index)
    return tensors, values


def collect(trainer: Trainer, structure: Structure, example: Tensor) -> Result:
    """Extract every particle of a finished run and count what it costs."""
    slabs = extract(trainer.particles, trainer.gating, trainer.belief.keep, example)
    belief = trainer.belief
    noise = belief.noise().cpu()
    dense = Size(structure.flops.dense, round(structure.params.dense))
    sizes, widths = [dense] * len(slabs), {}
    gating, keep = trainer.gating, belief.keep
    if gating is not None and keep is not None:
        sizes, widths = costs(gating, keep)
    empty = torch.zeros(len(slabs), 0, dtype=torch.bool)
    ordered = gating.in_order if gating is not None else lambda values: values
    return Result(
        config=trainer.config,
        slabs=slabs,
        posterior=posterior_of([slab.network for slab in slabs], noise, trainer.config),
        history=[record.as_dict() for record in trainer.history],
        dense=dense,
        sizes=sizes,
        gates={
            "logits": ordered(belief.logits).cpu(),
            "keep": (empty if keep is None else ordered(keep)).cpu(),
            "slab": belief.log_slab.exp().cpu(),
            "noise": noise,
        },
        widths=widths,
        whole=dict(structure.whole),
        info=environment(trainer.particles.device) | log_prior(trainer),
    )


def posterior_of(networks: Sequence[nn.Module], noise: Tensor, config: Config) -> Posterior:
    """Networks that were trained by `config`, and the noise (n,) of each, as a posterior."""
    return Posterior(networks, noise, config.task, head=config.noise == "input")


def costs(gating: ChannelGating | WeightGating, keep: Tensor) -> tuple[list[Size], dict[str, list[int]]]:
    """Decided gates (n, U) -> what each network costs, and kept and original channels (or weights) of each module."""
    z = keep.to(torch.get_default_dtype())
    pairs = zip(gating.flops.expected(z), gating.params.expected(z), strict=True)
    sizes = [Size(float(macs), round(float(params))) for macs, params in pairs]
    kept = gating.scales.module_sums(z).round().int().cpu().T.tolist()
    counts = zip(gating.scales.modules, gating.scales.lengths, kept, strict=True)
    return sizes, {name: [*each, total] for name, total, each in counts}


def log_prior(trainer: Trainer) -> dict[str, Any]:
    """What the prior says of each particle, and N, by which it counts in the mean log-posterior (Section 2)."""
    if trainer.gating is None:
        return {}
    with torch.no_grad():
        values = trainer.belief.log_prior(trainer.particles.rows)
    return {"log_prior": values.tolist(), "num_data": trainer.num_data}


def load(folder: str | Path, model: nn.Module) -> Result:
    """A saved run, given a fresh instance of the original network; reads JSON and safetensors only."""
    folder = Path(folder)
    run = artifacts.read_run(folder)
    try:
        config = Config.from_dict(run["config"])
    except ConfigError as error:
        raise ArtifactError(f"{folder / artifacts.RUN}: {error}") from None
    recipes, gated = run["recipes"], tuple(run["gated"])
    dense, sizes = Size(**run["dense"]), [Size(**size) for size in run["sizes"]]
    rest = {key: run[key] for key in ("history", "widths", "whole", "info")}
    if len(recipes) != len(sizes):
        raise ArtifactError(f"{folder / artifacts.RUN}: {len(recipes)} recipes but {len(sizes)} sizes")
    gates = artifacts.read_gates(folder, len(recipes), sum(value.numel() for value in model.state_dict().values()))
    noise = gates["noise"]
    slabs = []
    for i, recipe in enumerate(recipes):
        reference = copy.deepcopy(model).cpu().eval()
        artifacts.read_network(folder / f"reference-{i}.safetensors", reference)
        try:
            network = cut(reference, recipe)
        except StructureError as error:
            raise ArtifactError(f"{folder / artifacts.RUN}: {error}") from None
        artifacts.read_network(folder / f"particle-{i}.safetensors", network)
        slabs.append(Slab(network, reference, recipe, gated, gates["keep"][i].bool()))
    posterior = posterior_of([slab.network for slab in slabs], noise, config)
    return Result(config, slabs, posterior, dense=dense, sizes=sizes, gates=gates, **rest)


# ---- what a run needs before it can start


def as_batches(data: Data, config: Config, device: torch.device) -> Source:
    """Whatever the user gave as a source of batches on the device."""
    channels_last = device.type == "cuda"
    if isinstance(data, DataLoader):
        return LoaderBatches(data, config.seed, device, channels_last)
    if isinstance(data, str):
        data = load_data(data)
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
