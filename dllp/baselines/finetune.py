"""Fine-tuning a cut network in widths that processors like: dead channels are added, and taken away afterwards.

On every device, so that a run that was stopped on one goes on on another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dllp.api import Result, train_dense
from dllp.baselines.hooks import Verb, hooked
from dllp.config import Config
from dllp.posterior import posterior_of
from dllp.prepare import Data
from dllp.structure.groups import Structure
from dllp.structure.padding import fill, padded, widened
from dllp.structure.slicing import Recipe, cut, kept_indices, recipe, restrict
from dllp.training.state import RunState

MULTIPLE = 8
"""Tensor cores and vector units of processors want it."""


def in_lanes(whole: nn.Module, structure: Structure, keep: Tensor) -> Verb:
    """Trains a network that was cut from `whole` to the units of `keep` (U,), and may have other weights since.

    Nobody listens to the dead channels, so that the network computes the same with them as without.
    """

    def run(model: nn.Module, data: Data, config: Config, **rest: Any) -> Result:
        wide, inner = _widen(whole, structure, keep)
        places = kept_indices(wide, inner)
        fill(wide, model, places)
        result = hooked(train_dense, lambda state: _hold(state, places))(wide, data, config, **rest)
        small = cut(result.model, inner)
        particles = [replace(result.particles[0], network=small, reference=small)]
        return replace(result, particles=particles, posterior=posterior_of([small], result.gates["noise"], config))

    return run


def _widen(whole: nn.Module, structure: Structure, keep: Tensor) -> tuple[nn.Module, Recipe]:
    """The cut network with dead channels, and what of it is alive."""
    wide, _ = padded(whole, structure, keep, MULTIPLE)
    units = widened(structure, keep, structure.steps(MULTIPLE))
    groups = restrict(structure.groups, units, recipe(whole, structure.groups, units))
    return wide, recipe(wide, groups, keep[units])


def _hold(state: RunState, places: dict[str, Tensor]) -> None:
    """Let only the living part move."""
    layout, moving = state.particles.layout, torch.zeros_like(state.learnable)
    for name, parameter in state.particles.networks[0].named_parameters():
        alive = torch.zeros(parameter.numel(), dtype=torch.bool)
        alive[places[name]] = True
        layout.segments[name].view(moving).copy_(alive.view(parameter.shape))
    state.moving = (moving & state.learnable).expand(len(state.particles), -1)
