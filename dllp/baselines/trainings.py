"""The two trainings of a run: one with a method's regulariser, and the fine-tuning of what it has pruned.

The only file of this room that touches a run's state. Read of it: `particles`, `learnable`, `lr`, `progress`,
`epoch_ends`. Changed, before the first step: `penalty`, and by `hold` which weights move.

In fine-tuning removed weights stay zero, and cut networks train in widths of full speed: dead channels fill them up to
a multiple of 8 and are taken away afterwards; on every device, so that a run can be resumed on another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dllp.api import Result, train_dense
from dllp.baselines.protocol import Method, Scene, StepInfo
from dllp.config import Config
from dllp.posterior import posterior_of
from dllp.prepare import Data
from dllp.structure.groups import Structure
from dllp.structure.padding import fill, padded, widened
from dllp.structure.slicing import Recipe, cut, kept_indices, recipe, restrict
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.trainer import OnStep

MULTIPLE = 8
"""Tensor cores and vector units of processors want it."""
Verb = Callable[..., Result]
"""Something like :func:`dllp.api.train_dense`."""


def regularised(method: Method, scene_of: Callable[[Particles], Scene]) -> Verb:
    """`train_dense` with a method's penalty in the gradient and its `after_step` behind every step."""
    scene: list[Scene] = []

    def start(state: RunState) -> None:
        scene[:] = [scene_of(state.particles)]
        state.penalty = method.penalty(scene[0])

    def step(state: RunState) -> None:
        method.after_step(scene[0], StepInfo(state.lr, state.progress, state.epoch_ends))

    return _hooked(start, step)


def masked(masks: Callable[[nn.Module], Mapping[str, Tensor]]) -> Verb:
    """`train_dense` in which parameters move only where their mask is True; those without a mask move everywhere."""

    def start(state: RunState) -> None:
        particles, moving = state.particles, torch.ones_like(state.learnable)
        for name, mask in masks(particles.networks[0]).items():
            particles.layout.segments[name].view(moving).mul_(mask.to(moving.device))
        state.hold(moving)

    return _hooked(start)


def _hooked(start: OnStep, step: OnStep | None = None) -> Verb:
    """`train_dense` that calls `start` and `step` before the caller's own on_start and on_step."""

    def both(first: OnStep | None, second: OnStep | None) -> OnStep:
        def call(state: RunState) -> None:
            for each in (first, second):
                if each is not None:
                    each(state)

        return call

    def run(*args: Any, on_start: OnStep | None = None, on_step: OnStep | None = None, **rest: Any) -> Result:
        return train_dense(*args, on_start=both(start, on_start), on_step=both(step, on_step), **rest)

    return run


# ---- fine-tuning


def sparse(gated: tuple[str, ...]) -> Verb:
    """A training in which the zeros of the parameters named `gated` stay zero."""
    return masked(lambda network: {name: network.get_parameter(name).detach() != 0 for name in gated})


def widened_to_multiple(whole: nn.Module, structure: Structure, keep: Tensor) -> Verb:
    """A training of a network that was cut from `whole` to the units of `keep` (U,), and may have been mended since.

    Nothing reads the dead channels: the network computes the same with them as without.
    """

    def run(model: nn.Module, data: Data, config: Config, **rest: Any) -> Result:
        wide, inner = widen(whole, structure, keep)
        places = kept_indices(wide, inner)
        fill(wide, model, places)

        def alive(network: nn.Module) -> dict[str, Tensor]:
            masks = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in network.named_parameters()}
            for name, mask in masks.items():
                mask.view(-1)[places[name]] = True
            return masks

        result = masked(alive)(wide, data, config, **rest)
        small = cut(result.model, inner)
        particles = [replace(result.particles[0], network=small, reference=small)]
        return replace(result, particles=particles, posterior=posterior_of([small], result.gates["noise"], config))

    return run


def widen(whole: nn.Module, structure: Structure, keep: Tensor) -> tuple[nn.Module, Recipe]:
    """The cut network with dead channels, and the recipe of its living part."""
    more = widened(structure, keep, structure.steps(MULTIPLE))
    wide, _ = padded(whole, structure, keep, MULTIPLE)
    groups = restrict(structure.groups, more, recipe(whole, structure.groups, more))
    return wide, recipe(wide, groups, keep[more])
