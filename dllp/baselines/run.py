"""One run of a method: train, prepare, score, cut, verify, repair, and fine-tune where that is wanted.

In fine-tuning removed weights stay zero, and cut networks train in widths of full speed: dead channels fill them up to
a multiple of 8 and are taken away afterwards; on every device, so that a run can be resumed on another one.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dllp.api import Result, train_dense
from dllp.baselines.protocol import Method, Scene, StepInfo
from dllp.config import Config
from dllp.data import from_pair
from dllp.devices.device import undisturbed
from dllp.errors import ConfigError
from dllp.posterior import posterior_of
from dllp.prepare import Data, make_gating, prepare
from dllp.records import Size
from dllp.structure.groups import FilterFn, Structure
from dllp.structure.padding import fill, padded, padding_steps, widened
from dllp.structure.slicing import Recipe, cut, kept_indices, recipe, restrict
from dllp.training.extract import costs, extract
from dllp.training.gating import WeightGating
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.trainer import OnStep

Verb = Callable[..., Result]
"""Something like :func:`dllp.api.train_dense`."""
Train = Callable[[Verb, str, nn.Module, Data, Config], Result]
"""Runs a verb as the named stage of a run."""
TRAINED, PREPARED, FINETUNED = "trained", "prepared", "finetuned"
FINETUNE_LR = 0.25
"""Peak of the fine-tuning's learning rate, as a share of the training's."""
IMAGES = 512
"""Training inputs that methods see which look at activations."""
MULTIPLE = 8
"""Tensor cores and vector units of processors want it."""


@dataclass(frozen=True)
class Pruned:
    """The result of a method: `before` fine-tuning, and `after` it where there was one."""

    before: Result
    after: Result | None

    @property
    def result(self) -> Result:
        """The last of both."""
        return self.after or self.before


@undisturbed()
def prune(
    method: Method,
    model: nn.Module,
    data: Data,
    config: Config,
    *,
    finetune_epochs: int = 0,
    finetune_lr: float = FINETUNE_LR,
    filter_fn: FilterFn | None = None,
    trained: Result | None = None,
    teacher: nn.Module | None = None,
    train: Train = lambda verb, stage, model, data, config: verb(model, data, config),
) -> Pruned:
    """Prune a network by `method`; the model itself is left as it was.

    Args:
        config: The dense network's recipe with a budget, `keep_flops` or `keep_params`. With `teacher` = `given` the
            whole network, trained as the method prescribes, teaches the fine-tuning; that training has no teacher.
        finetune_epochs: Epochs after the cut by the dense network's recipe, at `finetune_lr` times the learning rate:
            1 goes back to its peak (learning-rate rewinding).
        filter_fn: As for :func:`dllp.prune`.
        trained: A network trained by this recipe already, for a method that needs no training of its own.
        teacher: Teaches the fine-tuning in place of the whole network, such as the one that the method started from.
        train: Runs each of the trainings, for whoever keeps checkpoints of them.
    """
    if config.budget[1] is None or config.keep_latency is not None:
        raise ConfigError(f"{method.name} needs a budget: give keep_flops or keep_params, for example 0.45")
    method.refuse_priors(vars(config))
    if (config.granularity, method.granularity) == ("weight", "channel"):
        raise ConfigError(f"method {method.name} has granularity = channel: leave out granularity")
    if config.units not in (None, "channels"):
        raise ConfigError(f"method {method.name} scores channels, no branches: leave out units = {config.units}")
    if method.labelled and config.task != "classification":
        raise ConfigError(
            f"method {method.name} needs classes, and task = {config.task} has none: choose another method"
        )
    early = math.ceil(method.before_cut * finetune_epochs)
    if method.before_cut and finetune_epochs <= early:
        raise ConfigError(
            f"finetune_epochs = {finetune_epochs}: method {method.name} trains for a part of them before the cut, "
            "give 2 at least, for example 30"
        )
    decay = replace(config, granularity="channel").resolved().weight_decay  # the dense network's
    plain = replace(config, granularity=method.granularity, particles=1, weight_decay=decay).resolved()
    tuning = None
    if finetune_epochs:
        tuning = replace(plain, epochs=finetune_epochs - early, lr=finetune_lr * plain.lr, init="given", warmup=0.0)
    config = method.settings(replace(plain, teacher="off"))
    batches, example, structure, *_ = prepare(model, data, config, filter_fn, channels=config.granularity == "channel")

    def scene_of(particles: Particles) -> Scene:
        return Scene(particles, structure, make_gating(model, structure, particles, config, filter_fn), config)

    scene_of(Particles.start(model, config, torch.device("cpu")))  # a budget out of reach is an error before training
    if trained is None or method.trains:
        trained = train(regularised(method, scene_of), TRAINED, model, data, config)
    examples = partial(first_pairs, batches)
    inputs = torch.cat([x for x, _ in examples(IMAGES)])

    def trained_scene(network: nn.Module, around: nn.Module | None = None) -> Scene:
        whole = Particles([copy.deepcopy(network).to(batches.device)])
        return replace(scene_of(whole), inputs=inputs, examples=examples, around=around)

    scene = trained_scene(trained.model)
    if early and tuning is not None:
        around, loss = method.prepare(scene)
        pairs = from_pair(*data, integers=True) if isinstance(data, tuple) else data  # as they are without a loss
        recipe = replace(tuning, epochs=early, teacher="off")
        prepared = train(partial(train_dense, loss=loss), PREPARED, around, pairs, recipe)
        around = prepared.model.to(batches.device)
        scene = trained_scene(around.get_submodule("network"), around)
        trained = replace(trained, history=_joined(trained.history, prepared.history))
    before = _cut(method, scene, trained, example)
    if tuning is None:
        return Pruned(before, None)
    particle = before.particles[0]
    if particle.gated:
        verb = masked({name: particle.network.get_parameter(name).detach() != 0 for name in particle.gated})
    else:
        verb = widened_to_multiple(particle.reference, structure, before.gates["keep"][0])
    if tuning.teacher == "given":
        verb = partial(verb, teacher=trained.model if teacher is None else teacher)
    tuned = train(verb, FINETUNED, particle.network, data, tuning)
    after = replace(
        before,
        config=replace(before.config, teacher=tuning.teacher),
        particles=[replace(particle, network=tuned.model)],
        posterior=tuned.posterior,
        gates={**before.gates, "noise": tuned.gates["noise"]},
        history=_joined(before.history, tuned.history),
        info={**before.info, "finetune_epochs": finetune_epochs, "finetune_lr": finetune_lr},
    )
    return Pruned(before, after)


def first_pairs(batches: Any, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first training pairs, batch by batch, as many as there are of `count`."""
    for x, y in batches.epoch(0):
        if count <= 0:
            break
        yield x[:count].contiguous(), y[:count]
        count -= len(x)


def _joined(first: list[dict[str, Any]], then: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of two trainings, their epochs counted on."""
    return first + [{**record, "epoch": record["epoch"] + len(first)} for record in then]


def _cut(method: Method, scene: Scene, trained: Result, example: Tensor) -> Result:
    """Cut what the scores give up, verify that it equals the gated network, and let the method repair the rest."""
    began = time.perf_counter()
    scores, units = method.scores(scene), scene.gating.units
    if scores.shape != (units,) or scores.isnan().any():  # a method may be a user's own
        raise ConfigError(f"scores of method {method.name} must be {units} numbers, none of them NaN")
    keep = scene.select(scores)[None].to(scene.particles.device)
    particle = extract(scene.particles, scene.gating, keep, example)[0]
    if not isinstance(scene.gating, WeightGating):
        method.repair(particle.network.to(scene.particles.device), particle.recipe, scene)
        particle.network.cpu()
    sizes, widths = costs(scene.gating, keep)
    noise = trained.gates["noise"]
    return replace(
        trained,
        config=scene.config,
        particles=[particle],
        posterior=posterior_of([particle.network], noise, scene.config),
        dense=Size(scene.structure.flops.dense, round(scene.structure.params.dense)),
        sizes=sizes,
        gates={
            "logits": scores[None].float().cpu(),
            "keep": keep.cpu(),
            "slab": torch.ones(1, len(scene.gating.scales.modules)),
            "noise": noise,
        },
        widths=widths,
        whole=dict(scene.gating.whole),
        info={
            **trained.info,
            "method": method.name,
            "hyperparameters": dict(vars(method)),
            "choice_seconds": time.perf_counter() - began,  # minutes where an agent searches, or layers are fitted
        },
    )


# ---- the two trainings


def regularised(method: Method, scene_of: Callable[[Particles], Scene]) -> Verb:
    """`train_dense` with a method's penalty in the gradient and its `after_step` behind every step."""
    scene: list[Scene] = []

    def start(state: RunState) -> None:
        scene[:] = [scene_of(state.particles)]
        state.penalty = method.penalty(scene[0])

    def step(state: RunState) -> None:
        method.after_step(scene[0], StepInfo(state.lr, state.progress, state.epoch_ends))

    return hooked(start, step)


def masked(masks: Mapping[str, Tensor]) -> Verb:
    """`train_dense` in which parameters move only where their mask is True; those without a mask move everywhere."""

    def start(state: RunState) -> None:
        moving = torch.ones_like(state.learnable)
        for name, mask in masks.items():
            state.particles.layout.segments[name].view(moving).mul_(mask.to(moving.device))
        state.hold(moving)

    return hooked(start)


def hooked(start: OnStep | None = None, step: OnStep | None = None) -> Verb:
    """`train_dense` that calls `start` and `step` before the caller's own on_start and on_step."""

    def chain(*calls: OnStep | None) -> OnStep:
        def call(state: RunState) -> None:
            for each in calls:
                if each is not None:
                    each(state)

        return call

    def run(*args: Any, on_start: OnStep | None = None, on_step: OnStep | None = None, **rest: Any) -> Result:
        return train_dense(*args, on_start=chain(start, on_start), on_step=chain(step, on_step), **rest)

    return run


def widened_to_multiple(whole: nn.Module, structure: Structure, keep: Tensor) -> Verb:
    """A training of a network that was cut from `whole` to the units of `keep` (U,), and may have been mended since.

    Nothing reads the dead channels: the network computes the same with them as without.
    """

    def run(model: nn.Module, data: Data, config: Config, **rest: Any) -> Result:
        wide, inner = widen(whole, structure, keep)
        places = kept_indices(wide, inner)
        fill(wide, model, places)
        alive = {name: torch.zeros(weight.shape, dtype=torch.bool) for name, weight in wide.named_parameters()}
        for name, mask in alive.items():
            mask.view(-1)[places[name]] = True
        result = masked(alive)(wide, data, config, **rest)
        small = cut(result.model, inner)
        particles = [replace(result.particles[0], network=small, reference=small)]
        return replace(result, particles=particles, posterior=posterior_of([small], result.gates["noise"], config))

    return run


def widen(whole: nn.Module, structure: Structure, keep: Tensor) -> tuple[nn.Module, Recipe]:
    """The cut network with dead channels, and the recipe of its living part."""
    more = widened(structure, keep, padding_steps(structure, MULTIPLE))
    wide, _ = padded(whole, structure, keep, MULTIPLE)
    groups = restrict(structure.groups, more)
    return wide, recipe(wide, groups, keep[more])
