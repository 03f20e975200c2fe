"""Trainings that a method takes part in: something happens before the first step, or after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dllp.api import Result, train_dense
from dllp.training.state import RunState
from dllp.training.trainer import OnStep

Verb = Callable[..., Result]
"""Something like :func:`dllp.api.train_dense`."""


def hooked(verb: Verb, start: OnStep, step: OnStep | None = None) -> Verb:
    """A verb that calls `start` and `step` before the caller's own on_start and on_step."""

    def both(first: OnStep | None, second: OnStep | None) -> OnStep:
        def call(state: RunState) -> None:
            for each in (first, second):
                if each is not None:
                    each(state)

        return call

    def run(*args: Any, on_start: OnStep | None = None, on_step: OnStep | None = None, **rest: Any) -> Result:
        return verb(*args, on_start=both(start, on_start), on_step=both(step, on_step), **rest)

    return run


def holding(gated: tuple[str, ...]) -> Verb:
    """A training in which the zeros of single weights stay zero."""

    def start(state: RunState) -> None:
        particles = state.particles
        moving = state.learnable.clone()
        for name, parameter in particles.networks[0].named_parameters():
            if name in gated:
                particles.layout.segments[name].view(moving).mul_(parameter.detach() != 0)
        state.moving = moving.expand(len(particles), -1)

    return hooked(train_dense, start)
