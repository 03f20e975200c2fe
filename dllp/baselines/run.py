"""One run of a method: train, score, cut, verify, repair, and fine-tune where that is wanted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dllp.api import Result
from dllp.baselines.protocol import Method, Scene
from dllp.baselines.trainings import Verb, regularised, sparse, widened_to_multiple
from dllp.config import Config
from dllp.devices.device import undisturbed
from dllp.errors import ConfigError
from dllp.posterior import posterior_of
from dllp.prepare import Data, make_gating, prepare
from dllp.records import Size
from dllp.structure.groups import FilterFn
from dllp.training.extract import costs, extract
from dllp.training.gating import WeightGating
from dllp.training.particles import Particles

Train = Callable[[Verb, str, nn.Module, Data, Config], Result]
"""Runs a verb as the named stage of a run."""
TRAINED, FINETUNED = "trained", "finetuned"
FINETUNE_LR = 0.25
"""Peak of the fine-tuning's learning rate, as a share of the training's."""
IMAGES = 512
"""Training inputs that methods see which look at activations."""


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
    train: Train = lambda verb, stage, model, data, config: verb(model, data, config),
) -> Pruned:
    """Prune a network by `method`; the model itself is left as it was.

    Args:
        config: The dense network's recipe with a budget, `keep_flops` or `keep_params`.
        finetune_epochs: Epochs after the cut by the dense network's recipe, at `finetune_lr` times the learning rate.
        filter_fn: As for :func:`dllp.prune`.
        trained: A network trained by this recipe already, for a method that needs no training of its own.
        train: Runs each of the two trainings, for whoever keeps checkpoints of them.
    """
    if config.budget[1] is None:
        raise ConfigError(f"{method.name} needs a budget: give keep_flops or keep_params, for example 0.45")
    method.refuse_priors(vars(config))
    if (config.granularity, method.granularity) == ("weight", "channel"):
        raise ConfigError(f"method {method.name} has granularity = channel: leave out granularity")
    decay = replace(config, granularity="channel").resolved().weight_decay  # the dense network's
    recipe = replace(config, granularity=method.granularity, particles=1, weight_decay=decay).resolved()
    tuning = None
    if finetune_epochs:
        tuning = replace(recipe, epochs=finetune_epochs, lr=finetune_lr * recipe.lr, init="given", warmup=0.0)
    config = method.settings(recipe)
    batches, example, structure = prepare(model, data, config, filter_fn, channels=config.granularity == "channel")

    def scene_of(particles: Particles) -> Scene:
        return Scene(particles, structure, make_gating(model, structure, particles, config, filter_fn), config)

    scene_of(Particles.start(model, config, torch.device("cpu")))  # a budget out of reach is an error before training
    if trained is None or method.trains:
        trained = train(regularised(method, scene_of), TRAINED, model, data, config)
    whole = copy.deepcopy(trained.model).to(batches.device)
    scene = replace(scene_of(Particles([whole])), inputs=sample(batches))
    before = _cut(method, scene, _scores(method, scene), trained, example)
    if tuning is None:
        return Pruned(before, None)
    particle = before.particles[0]
    if particle.gated:
        verb = sparse(particle.gated)
    else:
        verb = widened_to_multiple(particle.reference, structure, before.gates["keep"][0])
    tuned = train(verb, FINETUNED, particle.network, data, tuning)
    after = replace(
        before,
        particles=[replace(particle, network=tuned.model)],
        posterior=tuned.posterior,
        gates={**before.gates, "noise": tuned.gates["noise"]},
        history=before.history + [{**r, "epoch": r["epoch"] + config.epochs} for r in tuned.history],
        info={**before.info, "finetune_epochs": finetune_epochs, "finetune_lr": finetune_lr},
    )
    return Pruned(before, after)


def _scores(method: Method, scene: Scene) -> Tensor:
    """(U,): the scores of a method, which may be a user's own."""
    scores, units = method.scores(scene), scene.gating.units
    if scores.shape != (units,) or scores.isnan().any():
        raise ConfigError(f"scores of method {method.name} must be {units} numbers, none of them NaN")
    return scores


def sample(batches: Any) -> Tensor:
    """(B, ...): the first training inputs."""
    parts, count = [], 0
    for x, _ in batches.epoch(0):
        parts.append(x.contiguous())
        count += len(x)
        if count >= IMAGES:
            break
    return torch.cat(parts)[:IMAGES]


def _cut(method: Method, scene: Scene, scores: Tensor, trained: Result, example: Tensor) -> Result:
    """Cut what the scores give up, verify that it equals the gated network, and let the method repair the rest."""
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
        info={**trained.info, "method": method.name, "hyperparameters": dict(vars(method))},
    )
