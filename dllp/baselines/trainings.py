"""Fine-tuning of what a method has pruned: removed weights stay zero, cut networks train in widths of full speed.

Dead channels fill a cut network up to a multiple of 8 and are taken away afterwards; on every device, so that a run
that was stopped on one goes on on another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dllp.api import Result
from dllp.baselines.hooks import Verb, masked
from dllp.config import Config
from dllp.posterior import posterior_of
from dllp.prepare import Data
from dllp.structure.groups import Structure
from dllp.structure.padding import fill, padded, widened
from dllp.structure.slicing import Recipe, cut, kept_indices, recipe, restrict

MULTIPLE = 8
"""Tensor cores and vector units of processors want it."""


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
