"""Predictions with gates drawn by their probabilities, in place of the decided ones.

A run's gates are probabilities until they are decided. Drawing them anew, z ~ Bernoulli(theta) or relaxed at a
temperature, and multiplying M_0 by them gives more members of the posterior: undecided gates show as uncertainty.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dllp.api import Result
from dllp.devices import trees
from dllp.devices.device import undisturbed
from dllp.errors import ConfigError, DataError, check_count
from dllp.method import gates
from dllp.posterior import Posterior, posterior_of
from dllp.prepare import positional
from dllp.structure.groups import discover_again
from dllp.structure.slicing import Fold, WeightFold, fold_in


@undisturbed()
def sample_gates(result: Result, example: Any, draws: int = 8, *, temperature: float = 0.0, seed: int = 0) -> Posterior:
    """A posterior of n * draws networks: M_0 of every particle with its gates drawn `draws` times.

    Args:
        result: A run with gates, of single weights or of channels.
        example: One batch of inputs (B, ...), with which the network is traced to find each channel gate's weights; of
            several a tuple, or a dict by name.
        draws: Networks for each particle.
        temperature: 0 draws gates of 0 and 1; above, soft gates as training has them.
        seed: Fixes the draws.
    """
    check_count(draws=draws)
    if "method" in result.info:
        raise ConfigError(f"the gates of {result.info['method']} were not learned: they have no probabilities")
    logits = result.gates["logits"].float().cpu()
    if not logits.shape[1]:
        raise ConfigError("the run has no gates to draw: it is dense")
    generator = torch.Generator().manual_seed(seed)
    networks = []
    for particle, row in zip(result.particles, logits, strict=True):
        fold = _fold(result, particle.reference, particle.gated, example)
        for _ in range(draws):
            z = gates.sample(row, temperature or 1.0, torch.rand(row.shape, generator=generator))
            z = z if temperature else z.round()  # open with probability theta at any temperature
            networks.append(copy.deepcopy(particle.reference).eval())
            fold_in(networks[-1], fold, z)
    noise = result.posterior.noise.repeat_interleave(draws)
    return posterior_of(networks, noise, result.config, result.posterior.select)


def _fold(result: Result, network: nn.Module, gated: tuple[str, ...], example: Any) -> Fold | WeightFold:
    """The fold that turns gates (U,) into effective weights."""
    units = result.gates["logits"].shape[1]
    if gated:
        fold = WeightFold({name: network.get_parameter(name).shape for name in gated})
        found = sum(fold.sizes)
    else:
        few = trees.apply(trees.part(trees.plain(example), slice(0, 2)), Tensor.cpu)
        inputs = positional(network, *trees.arguments(few))
        structure = discover_again(network, inputs, result.whole, result.config)
        found, fold = structure.units, Fold(network, structure.groups)
    if found != units:
        raise DataError(f"the run has {units} gates but the network {found}: a filter_fn chose what may be gated")
    return fold
