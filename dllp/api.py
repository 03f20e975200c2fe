"""The verbs: prune a network, or train it dense with the same settings; and the Result of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dllp import notebook
from dllp.config import SPIKE_AND_SLAB, TRAINED_EPOCHS, Config
from dllp.data import ArrayData, Batches, Dataset, StreamBatches
from dllp.data import load as load_data
from dllp.devices import trees
from dllp.devices.device import environment, undisturbed
from dllp.devices.mesh import Place
from dllp.devices.ranks import Ranks
from dllp.errors import ConfigError, NumericsError, StructureError, check_callable
from dllp.method import likelihood
from dllp.posterior import Posterior, posterior_of
from dllp.prepare import (
    Data,
    Prepared,
    Source,
    as_float32,
    check_parts,
    evaluation_batches,
    has_learned,
    held_out,
    make_gating,
    make_teacher,
    prepare,
    settled,
)
from dllp.records import ExtractedParticle, Size
from dllp.runs import result as stored
from dllp.runs.checkpoints import Checkpoints, State
from dllp.runs.folder import DENSE_FILE, new_folder
from dllp.runs.tensors import write_network
from dllp.structure.groups import WEIGHTS_INSTEAD, FilterFn, Structure
from dllp.structure.latency import Profile
from dllp.structure.slicing import copied
from dllp.structure.trace import check_network
from dllp.training import health
from dllp.training.choose import choose
from dllp.training.extract import costs, extract
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.objective import LossFn, Metrics, Objective, Select
from dllp.training.particles import Particles
from dllp.training.snapshot import begin_snapshot, changing, restore, snapshot, unsound
from dllp.training.state import Groups, RunState
from dllp.training.teacher import Teacher
from dllp.training.trainer import OnEpoch, OnStep, train

if TYPE_CHECKING:  # rooms above
    from dllp.deploy.export import Exported
    from dllp.deploy.speed import Timed
    from dllp.evaluation.evaluate import Evaluation

ROLLBACKS = 3
"""How often a run may go back to its last checkpoint with half the learning rate."""


@dataclass(frozen=True)
class Result:
    """A pruned network and everything known about it.

    Attributes:
        config: The configuration of the run, every default filled in.
        particles: The extracted particles, M_p and M_0 of each.
        posterior: Predicts with all extracted particles.
        history: One record for each epoch.
        dense, sizes: Costs of the original network and of each extracted one.
        gates: Gate logits (n, U), decisions (n, U), slab precisions (n, modules) and noise 1/d^2 (n,).
        widths: Kept and original channels (or weights) of each group, for each particle.
        whole: Groups that were kept whole, and why.
        info: Versions and hardware of the run, and whatever a caller adds.
        shape: Of one input, without the batch.
        original: The network as it was handed over, where it had learned its task; a comparison.
    """

    config: Config
    particles: list[ExtractedParticle]
    posterior: Posterior
    history: list[dict[str, Any]]
    dense: Size
    sizes: list[Size]
    gates: dict[str, Tensor]
    widths: dict[str, list[int]]
    whole: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    original: nn.Module | None = None

    @property
    def slabs(self) -> list[ExtractedParticle]:
        """The name of `particles` in version 0.1.0."""
        return self.particles

    @property
    def model(self) -> nn.Module:
        """M_p, the pruned network: the slab part of the first particle."""
        return self.particles[0].network

    @property
    def reference(self) -> nn.Module:
        """M_0, the first particle in its full shape."""
        return self.particles[0].reference

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        sizes = [vars(size) for size in self.sizes]
        return notebook.summary(self.config, vars(self.dense), sizes, self.widths, self.history)

    def __repr__(self) -> str:
        """A few lines: the cost of each network, the last losses, and what can be done next."""
        sizes = [vars(size) for size in self.sizes]
        return notebook.lines(self.config, vars(self.dense), sizes, self.history)

    def evaluate(
        self, data: Data, *, corrupt: str | Iterable[str] = (), ood: str | Iterable[str] | Mapping[str, Any] = (),
        device: str = "auto",
    ) -> Evaluation:  # fmt: skip
        """Measure every network, and the ensemble, on labelled data.

        Args:
            data: As for :func:`prune`, with a length; of a data set by name its test split. Labels of tokens in a dict
                are not for counting: `validation` of :func:`prune` measures the network's own loss on them.
            corrupt: Corruptions of uint8 images, such as `gaussian-blur:1,2`, `sharpen` or `noise:0.1`.
            ood: Out-of-distribution inputs: `noise`, a data set's name or folder, or inputs by name.
            device: Where the networks run.
        """
        return _above("evaluate")(self, data, corrupt=corrupt, ood=ood, device=device)

    def export(self, path: str | Path, **options: Any) -> Exported:
        """Write the first particle as an ONNX or pt2 file, checked against PyTorch; options of `dllp.export.export`.

        A network that takes several inputs needs `example`, a batch of them by name or in order.
        """
        return _above("export")(self, path, **options)

    def speed(
        self, *, batches: Iterable[int] = (1, 64), seconds: float = 1.0, particle: int = 0,
        data: Dataset | None = None, example: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
    ) -> Timed:  # fmt: skip
        """Time the dense against the pruned network in PyTorch and onnxruntime, `seconds` for each setting.

        With `data`, of `dllp.data.load`, its training images calibrate int8 and its test images give the accuracy.
        A network that takes several inputs needs `example`, a batch of them by name or in order.
        """
        given = dict(batches=tuple(batches), seconds=seconds, particle=particle, data=data, example=example)
        return _above("speed")(self, **given)

    def report(self, path: str | Path, data: Data | None = None) -> Path:
        """Write one self-contained HTML page, with an evaluation on `data` where it is given. Returns its path."""
        return _above("show")(self, path, data)

    def save(
        self, folder: str | Path, *, overwrite: bool = False, model: str | None = None, data: str | None = None
    ) -> Path:
        """Write the run into a new or empty folder, whole or not at all. Returns it.

        Args:
            folder: Every command of `dllp` reads it, :func:`load` too.
            overwrite: Replace the run that it holds.
            model: `package.module:factory`, where a fresh instance of the original network can be made: commands then
                need no `--model`.
            data: Name or folder of the run's data, for commands that need it.
        """
        folder = Path(folder)
        with new_folder(folder, overwrite) as temporary:
            self.write_networks(temporary)
            if self.original is not None:
                write_network(temporary / DENSE_FILE, self.original)
            if model is not None:
                stored.write_settings(temporary, self.config, model, data)
            self.write_run(temporary)
        return folder

    def write_networks(self, folder: Path) -> None:
        """The extracted networks and the gates."""
        stored.write_networks(folder, self.particles, self.gates)

    def write_run(self, folder: Path) -> None:
        """run.json, the last file: where it is, a run is finished."""
        rest = {name: getattr(self, name) for name in ("widths", "whole", "history", "info")}
        stored.write_run(folder, self.config, self.particles, self.dense, self.sizes, **rest)


def _above(verb: str) -> Any:
    """A function of :mod:`dllp.verbs`, which brings together rooms that import this one: found when it is called."""
    return getattr(import_module("dllp.verbs"), verb)


@undisturbed()
def load(folder: str | Path, model: nn.Module, *, select: Select | None = None) -> Result:
    """A saved run, given a fresh instance of the original network; reads JSON and safetensors only.

    Args:
        folder: What :meth:`Result.save` or `dllp prune` has written.
        model: A network as the one that was pruned; it is left as it was.
        select: As for :func:`prune`, where the network's outputs needed it.
    """
    folder = Path(folder)
    check_network(model)
    found = stored.read(folder, model)
    networks = [particle.network for particle in found["particles"]]
    return Result(posterior=posterior_of(networks, found["gates"]["noise"], found["config"], select), **found)


@undisturbed()
def prune(
    model: nn.Module,
    data: Data,
    config: Config | None = None,
    *,
    loss: LossFn | None = None,
    select: Select | None = None,
    metrics: Metrics | None = None,
    steps: int | None = None,
    num_data: int | None = None,
    groups: Groups | None = None,
    filter_fn: FilterFn | None = None,
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    on_start: OnStep | None = None,
    checkpoints: Checkpoints | None = None,
    ranks: Ranks | None = None,
    teacher: nn.Module | str | None = None,
    validation: Data | float | None = None,
    profile: Profile | str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Prune a network by DLLP in one training run; `model` itself is left as it was.

    Args:
        model: Any network. Without `loss` it maps inputs to logits or predictions, or computes its own loss from a
            dict with `labels`, as those of Hugging Face do.
        data: A DataLoader or data set of PyTorch, tensors in a tuple (inputs, ..., labels) or a dict of the network's
            arguments, a list of batches or with `steps` anything that yields them, a split in memory or on disk, or
            the name or folder of a data set. The last entry of a tuple and `labels` of a dict are the labels.
        config: How; `dllp.Config(keep_flops=0.45)` for a budget. `options` are its fields, instead of it or beside it.
        loss: `loss(network, batch)` gives the scalar mean loss of a batch, moved to the device and otherwise as it was;
            or a dict with `loss` and, for a teacher and for metrics, `logits` and `labels`.
        select: `select(outputs)` finds the logits in what the network returns; by default a tensor, its `logits`, or
            the first of a tuple.
        metrics: `metrics(network, batch)` gives numbers by name, measured on `validation`.
        steps: Batches of one epoch, where the data has no length of its own or is to be counted otherwise.
        num_data: N, the number of observations: by default of labels that count, in examples, tokens or pixels.
        groups: `groups(name, parameter)` gives factors of `lr` and `weight_decay`: `{"weight_decay": 0}` for none.
        filter_fn: `filter_fn(module, name)` says what may be touched.
        on_epoch: Called with an :class:`EpochRecord` after each epoch.
        on_step: Called with the run's :class:`~dllp.training.state.RunState` after each step.
        on_start: Called with it before the first step and after a rollback: its history has the epochs that a
            checkpoint brought.
        checkpoints: Where the run writes its checkpoints; it goes on from the newest one that it finds there.
        ranks: The processes that share the run, from :func:`dllp.devices.ranks.joined`: all call this, with the same
            arguments, and all get the same result; `config.parallel` says what they share.
        teacher: A network with the same outputs that teaches in place of `model`; or the option, such as `given`.
        validation: Data to measure on at the end of each epoch, or the fraction (or number) of training examples to
            hold out for it; no step learns from it, and the last epoch stays the result. Without it a data set's own
            test set is looked at where the gates are decided and at the end only (`result.info["moments"]`).
        profile: Of the network, for `config.keep_latency`: a file of `dllp profile`, from any machine. Without it one
            is made here: one thread, batch 1, in onnxruntime if installed, or on CUDA where the run is.
        progress: Show how far the run is, on a terminal and in notebooks.
    """
    if isinstance(teacher, str):  # the option of the same name
        options, teacher = {**options, "teacher": teacher}, None
    chosen, ranks = _checked(config, checkpoints, options), ranks or Ranks()
    if chosen.prior != SPIKE_AND_SLAB and chosen.budget[1] is None and not chosen.sparsity:
        raise ConfigError(f"prior = {chosen.prior} closes no gate by itself: give a budget (keep_flops) or sparsity")
    if isinstance(data, str | os.PathLike):
        data = load_data(os.fsdecode(data))
    if isinstance(validation, int | float):
        data, validation = held_out(data, validation, chosen.seed)
    check_callable(loss=loss, select=select, metrics=metrics, groups=groups, filter_fn=filter_fn)
    channels, objective = chosen.granularity == "channel", Objective(chosen, loss, select)
    check_network(model)
    model = as_float32(model)
    found = ranks.together(
        lambda: prepare(model, data, chosen, filter_fn, ranks, channels=channels, objective=objective, steps=steps)
    )
    batches, structure = found.batches, found.structure
    if channels:
        check_groups(structure)
    full, learned = _settled(model, found, chosen, objective, teacher, ranks)
    clock = None
    if full.keep_latency is not None:
        clock = _above("Clock")(structure, model, found.example, profile, filter_fn, batches.device, ranks)
        structure = clock.structure
    place = _placed(ranks, full, batches, model, found.example)
    master = make_teacher(model, teacher, full, objective, found)
    validates = validation is not None
    if validation is None and isinstance(data, Dataset) and isinstance(data.test, ArrayData) and found.y is not None:
        validation = data.test
    measured = None if validation is None else evaluation_batches(validation, batches.device, found)

    def build(place: Place) -> RunState:
        particles = Particles.start(model, full, batches.device, place.own)
        gating = make_gating(model, structure, particles, full, filter_fn)
        state = _start(particles, gating, full, found, place, master, objective, num_data, groups)
        state.validation, state.validates, state.metrics = measured, validates, metrics
        return state

    state = _train(build, place, batches, checkpoints, on_epoch, on_step, on_start, progress)
    result = collect(state, structure, found.example, model if learned else None)
    result.info["data"] |= normalisation(batches)
    if clock is not None:
        result.info["latency"] = clock.outcome(full.keep_latency, result.gates["keep"])
    return result


@undisturbed()
def train_dense(
    model: nn.Module,
    data: Data,
    config: Config | None = None,
    *,
    loss: LossFn | None = None,
    select: Select | None = None,
    steps: int | None = None,
    num_data: int | None = None,
    groups: Groups | None = None,
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    on_start: OnStep | None = None,
    checkpoints: Checkpoints | None = None,
    ranks: Ranks | None = None,
    teacher: nn.Module | str | None = None,
    validation: Data | float | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Train the unpruned network with the same settings, without gates, prior and Stein term: the baseline.

    The arguments are those of :func:`prune`.
    """
    if isinstance(teacher, str):  # the option of the same name
        options, teacher = {**options, "teacher": teacher}, None
    chosen, ranks = _checked(config, checkpoints, options), ranks or Ranks()
    if isinstance(validation, int | float):
        data, validation = held_out(data, validation, chosen.seed)
    check_callable(loss=loss, select=select, groups=groups)
    objective = Objective(chosen, loss, select)
    check_network(model)
    model = as_float32(model)
    found = ranks.together(
        lambda: prepare(model, data, chosen, None, ranks, channels=False, objective=objective, steps=steps)
    )
    batches = found.batches
    full, _ = _settled(model, found, chosen, objective, teacher, ranks)
    place = _placed(ranks, full, batches, model, found.example)
    master = make_teacher(model, teacher, full, objective, found)
    measured = None if validation is None else evaluation_batches(validation, batches.device, found)

    def build(place: Place) -> RunState:
        particles = Particles.start(model, full, batches.device, place.own)
        state = _start(particles, None, full, found, place, master, objective, num_data, groups)
        state.validation, state.validates = measured, measured is not None
        return state

    trained = _train(build, place, batches, checkpoints, on_epoch, on_step, on_start, progress)
    result = collect(trained, found.structure, found.example)
    result.info["data"] |= normalisation(batches)
    return result


def _checked(config: Config | None, checkpoints: object, options: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a new run."""
    if isinstance(checkpoints, str | Path):
        raise ConfigError(f"checkpoints = {str(checkpoints)!r}: give dllp.checkpoints.Checkpoints(folder)")
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config is a {type(config).__name__}: give a dllp.Config, such as Config(keep_flops=0.45)")
    config = replace(config, **options) if config is not None and options else config or Config(**(options or {}))
    if config.epochs == 0 and config.particles > 1:  # others are jittered, and training would have to mend that
        config = replace(config, particles=1)
    config.check_new()
    return config


def new_config(config: Config | None, steps: int, options: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a loop of one's own, whose data and start are not known: the long schedule's defaults.

    Who lets the given network teach knows that it is trained.
    """
    chosen = _checked(config, None, options)
    return chosen.resolved(trained=chosen.teacher == "given", steps=-(-steps // (chosen.epochs or TRAINED_EPOCHS)))


def settle(model: nn.Module, data: Data, config: Config, loss: LossFn | None = None) -> Config:
    """The configuration that :func:`prune` would work with: every default filled in, by the network and the data."""
    config = _checked(config, None)
    channels, objective = config.granularity == "channel", Objective(config, loss)
    found = prepare(model, data, replace(config, device="cpu"), None, channels=channels, objective=objective)
    return settled(found.batches, config, found.structure, has_learned(model, found.batches, config, objective))


def _settled(
    model: nn.Module, found: Prepared, config: Config, objective: Objective, teacher: nn.Module | None, ranks: Ranks
) -> tuple[Config, bool]:
    """The configuration with every default filled in, and whether the network knows its task; all processes agree."""
    if teacher is not None and config.teacher is None:
        config = replace(config, teacher="given")
    learned = ranks.world.broadcast_object(ranks.together(lambda: has_learned(model, found.batches, config, objective)))
    return settled(found.batches, config, found.structure, learned), learned


def check_groups(structure: Structure) -> None:
    """Raise where no group of channels can be pruned, with the first reasons."""
    if not structure.groups:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(structure.whole.items())[:3])
        raise StructureError(f"the network has no channels that can be pruned ({reasons}): {WEIGHTS_INSTEAD}")


def _placed(ranks: Ranks, config: Config, batches: Source, model: nn.Module, example: Any) -> Place:
    """This process's share of the run, once all are known to have the same data, and batches that can be shared."""
    ranks.same("data on all hosts", f"{batches.num_examples} examples in {batches.steps} batches")
    ranks.together(lambda: ranks.lines(config.particles, config.parallel))  # errors come before groups are made
    place = ranks.place(config.particles, config.parallel)
    ranks.together(lambda: check_parts(model, batches, config, example, place))
    if isinstance(batches, StreamBatches):
        share_reading(batches, place)
    return place


def share_reading(batches: StreamBatches, place: Place) -> None:
    """Let every process read and decode only what it owns of each batch."""
    batches.share(place.part(batches.batch_size), place.shards.all_gather_object, first=place.first)
    place.batch = batches.batch_size


def _start(
    particles: Particles, gating: ChannelGating | WeightGating | None, config: Config, found: Prepared, place: Place,
    teacher: Teacher | None, objective: Objective, num_data: int | None, groups: Groups | None,
) -> RunState:  # fmt: skip
    """A run before its first step; of a regression whose targets are large the noise begins at their mean square.

    From 1 Adam would take thousands of steps up there: it remembers the size of its first gradients. To what is below 1
    its way is short.
    """
    batches, targets, each = found.batches, None, 1.0
    if config.task != "classification" or found.y is None or found.y.dim() > 1:  # others have one label an example
        x, y = next(iter(batches.epoch(0)))
        targets = objective.labels(x, y)
        each = observations(targets, config, trees.count(x)) / trees.count(x)
    num_data = max(1, round(batches.num_examples * each)) if num_data is None else num_data
    state = RunState(
        particles, gating, config, num_data=num_data, steps_per_epoch=batches.steps, place=place, teacher=teacher,
        objective=objective, groups=groups, gaussian=objective.residuals,
    )  # fmt: skip
    if targets is not None and objective.residuals and config.task == "regression":
        state.latents.log_d.fill_(-0.5 * math.log(max(1.0, float(targets.double().square().mean()))))
    return state


def observations(targets: Tensor | None, config: Config, examples: int) -> int:
    """Labels of a batch that count: one for each example, token or pixel, or the numbers of a regression."""
    if targets is None or (config.task == "classification" and (targets.is_floating_point() or targets.dim() == 1)):
        return examples
    return targets.numel() if config.task != "classification" else int(likelihood.observed(targets))


def _train(
    build: Callable[[Place], RunState],
    place: Place,
    batches: Source,
    checkpoints: Checkpoints | None,
    on_epoch: OnEpoch | None,
    on_step: OnStep | None,
    on_start: OnStep | None,
    progress: bool,
) -> RunState:
    """Run to the end, from the newest checkpoint on; after a broken number roll back to it, if that is wanted."""
    live = notebook.display() if progress and place.first else None

    def after_step(state: RunState) -> None:
        if live is not None:
            last = state.history[-1] if state.history else None
            live.step(state.step_index, state.total_steps, state.config, last)
        if on_step is not None:
            on_step(state)
        if checkpoints is not None:
            last = state.step_index == state.total_steps
            checkpoints.after_step(state.step_index, state.epoch_ends, lambda: healthy_snapshot(state), last=last)

    trouble, lr_scale = "", 1.0
    for attempt in range(ROLLBACKS + 1):
        state = build(place)
        if checkpoints is not None and not attempt:
            checkpoints.begin()
        found = checkpoints.latest() if checkpoints is not None else None
        if found is not None:
            restore(state, found)
        if attempt:
            state.trouble, state.lr_scale = trouble, lr_scale
        if on_start is not None:
            on_start(state)
        try:
            if not state.config.epochs and state.latents.keep is None:
                choose(state, batches)
            train(state, batches, on_epoch=on_epoch, on_step=after_step)
            if checkpoints is not None:
                checkpoints.flush()
            return state if place.alone else _whole(build, state, batches)
        except NumericsError as error:
            if state.config.on_nan == "stop" or error.in_data or attempt == ROLLBACKS:
                raise
            trouble, lr_scale = str(error), state.lr_scale / 2
        finally:
            if checkpoints is not None:
                checkpoints.settle()
    raise AssertionError("the last attempt returns or raises")


def _whole(build: Callable[[Place], RunState], part: RunState, batches: Source) -> RunState:
    """The finished run of several processes as one process holds it."""
    whole = build(Place(part.config.particles))
    restore(whole, snapshot(part))
    train(whole, batches)  # nothing is left to train
    return whole


def healthy_snapshot(state: RunState) -> Callable[[], State]:
    """A snapshot that is under way, but never of a run in which a number broke."""
    health.check(state)
    found = changing(state)
    trouble = next(filter(None, state.place.everyone.all_gather_object(unsound(found))), "")
    if trouble:
        raise health.broken(state, health.find(state) or trouble, state.step_index)
    return begin_snapshot(state, found)


def collect(state: RunState, structure: Structure, example: Any, original: nn.Module | None = None) -> Result:
    """Extract every particle of a finished run and count what it costs."""
    spike = state.latents.spike if state.config.prior == SPIKE_AND_SLAB else None
    extracted = extract(state.particles, state.gating, state.latents.keep, example, spike)
    shape = tuple(example.shape[1:]) if isinstance(example, Tensor) else ()  # of the one input
    latents = state.latents
    noise = latents.noise().cpu()
    dense = Size(structure.flops.dense, round(structure.params.dense))
    sizes, widths = [dense] * len(extracted), {}
    gating, keep = state.gating, latents.keep
    if gating is not None and keep is not None:
        sizes, widths = costs(gating, keep)
    empty = torch.zeros(len(extracted), 0, dtype=torch.bool)
    ordered = gating.in_order if gating is not None else lambda values: values
    return Result(
        config=state.config,
        particles=extracted,
        posterior=posterior_of([p.network for p in extracted], noise, state.config, state.objective.select),
        history=[record.as_dict() for record in state.history],
        dense=dense,
        sizes=sizes,
        gates={
            "logits": ordered(latents.logits).cpu(),
            "keep": (empty if keep is None else ordered(keep)).cpu(),
            "slab": latents.log_slab.exp().cpu(),
            "noise": noise,
        },
        widths=widths,
        whole=dict(structure.whole if gating is None else gating.whole),
        info=environment(state.particles.device) | _log_prior(state) | {
            "moments": [asdict(m) for m in state.moments],
            "data": {"shape": list(shape)},
        },
        shape=shape,
        original=None if original is None else copied(original).cpu().eval(),
    )  # fmt: skip


def normalisation(batches: Source) -> dict[str, Any]:
    """How inputs in memory or on disk were normalised, for an export that takes raw images; of loaders nothing."""
    if not isinstance(batches, (Batches, StreamBatches)):
        return {}
    mean, std = (None if values is None else list(values) for values in (batches.data.mean, batches.data.std))
    return {"dtype": str(batches.data.dtype).removeprefix("torch."), "mean": mean, "std": std}


def _log_prior(state: RunState) -> dict[str, Any]:
    """Log-prior of each particle, and N, by which it counts in the mean log-posterior (Section 2)."""
    if state.gating is None:
        return {}
    with torch.no_grad():
        values = state.latents.log_prior(state.particles.rows)
    return {"log_prior": values.tolist(), "num_data": state.num_data}
