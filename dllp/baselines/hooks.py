"""Trainings that a method takes part in: the only file of this room that touches a run's state.

Read of it: `particles`, `learnable`, `lr`, `progress`, `epoch_ends`. Changed, before the first step: `penalty`, and by
`hold` which weights move. A method itself sees a :class:`~dllp.baselines.protocol.Scene` and a :class:`StepInfo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dllp.api import Result, train_dense
from dllp.baselines.protocol import Method, Scene, StepInfo
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.trainer import OnStep

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
