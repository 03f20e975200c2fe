"""Distribution of a run's weights before pruning, of the kept and of the removed ones: by layer and pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dllp.api import Result
from dllp.errors import ArtifactError, ConfigError
from dllp.method import weight_laws
from dllp.records import ExtractedParticle
from dllp.structure.slicing import kept_indices

Array = NDArray[np.float64]
PARTS = ("before", "kept", "removed")
WHOLE = "whole"
LIMIT = 4.0
"""Densities reach this many standard deviations of the weights before pruning, or of the kept ones: a spike at zero
makes the former small."""
KINDS = (nn.modules.conv._ConvNd, nn.Linear)


def analyze(result: Result, particle: int = 0, dense: nn.Module | None = None) -> dict[str, Any]:
    """The report of one particle, ready for JSON.

    The standardised weights of the `dense` network are the reference; by default those of the particle's own M_0.
    """
    if not 0 <= particle < len(result.particles):
        raise ConfigError(f"the run has no particle {particle + 1}: choose from 1 to {len(result.particles)}")
    chosen = result.particles[particle]
    parts = split(chosen)
    if not parts:
        raise ArtifactError("the run holds no convolution or linear weights: there is nothing to analyse")
    reference = weights(dense if dense is not None else chosen.reference)
    named = {"particle": particle + 1, "granularity": result.config.granularity, "weights": "M_0 before, M_p kept"}
    named |= {"reference": "M_0" if dense is None else "dense", "moments": _moments(result.info, particle)}
    return {**named, **study(parts, reference)}


def _moments(info: Mapping[str, Any], particle: int) -> list[dict[str, Any]]:
    """One particle's accuracy, negative log-likelihood and kept weights around the decision and at the end."""
    found = []
    for moment in info.get("moments", []):
        scores = {name: moment[name] and moment[name][particle] for name in ("accuracy", "nll")}
        found.append({"name": moment["name"], **scores, **(moment["shapes"][particle] or {})})
    return found


def weights(network: nn.Module) -> dict[str, Array]:
    """The weights (m,) of every convolution and linear module; those that several share count once."""
    names: dict[Tensor, str] = {}
    for name, module in network.named_modules():
        if isinstance(module, KINDS):
            names.setdefault(module.weight, name)
    return {name: weight.detach().double().cpu().numpy().ravel() for weight, name in names.items()}


def split(particle: ExtractedParticle) -> dict[str, dict[str, Array]]:
    """Layer -> its weights before pruning (M_0), those kept (in M_p) and those removed (in M_0)."""
    before, after = weights(particle.reference), weights(particle.network)
    if particle.gated:
        names = [name.removesuffix(".weight") for name in particle.gated]
        masks = {name: after[name] != 0 for name in names}
        return {
            n: {"before": before[n], "kept": after[n][mask], "removed": before[n][~mask]} for n, mask in masks.items()
        }
    kept = kept_indices(particle.reference, particle.recipe)
    masks = {}
    for name, values in before.items():
        # a weight that is computed is no parameter: the one of its shape that it is computed from is cut alike
        sources = [f"{name}.weight", *(key for key in kept if key.startswith(f"{name}.parametrizations.weight."))]
        found = (kept[key] for key in sources if key in kept and kept[key].numel() == len(after[name]))
        masks[name] = np.isin(np.arange(len(values)), next(found, np.arange(len(values))))
    return {n: {"before": before[n], "kept": after[n], "removed": before[n][~mask]} for n, mask in masks.items()}


def study(parts: Mapping[str, Mapping[str, Array]], reference: Mapping[str, Array]) -> dict[str, Any]:
    """Layer -> part -> (m,) weights, and the reference's -> statistics and densities, by layer and pooled."""
    pooled = {part: weight_laws.pooled([layer[part] for layer in parts.values()]) for part in PARTS}
    known = [reference[name] for name in parts if name in reference]
    everything = {**parts, WHOLE: pooled}
    references = {**reference, WHOLE: weight_laws.pooled(known)}
    shapes: dict[str, Any] = {}
    densities = {}
    for name, layer in everything.items():
        widths = [float(layer[part].std()) for part in ("before", "kept") if len(layer[part])]
        limit = LIMIT * (max(widths, default=0.0) or 1.0)
        found = {part: weight_laws.describe(layer[part], references.get(name)) for part in PARTS}
        shapes[name] = {part: None if shape is None else asdict(shape) for part, shape in found.items()}
        densities[name] = {"limit": limit} | {part: weight_laws.density(layer[part], limit) for part in PARTS}
    whole = shapes.pop(WHOLE)
    return {WHOLE: whole, "layers": shapes, "tail": tails(shapes), "densities": densities}


def tails(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The Pareto index k of each layer's kept weights beside h / std of equation 8; None where no layer has a fit."""
    found = {
        name: (parts["kept"]["fits"]["pareto"]["parameters"]["k"], parts["before"]["std"])
        for name, parts in layers.items()
        if parts["kept"] and "pareto" in parts["kept"]["fits"]
    }
    if not found:
        return None
    h, predicted = weight_laws.pareto_relation(*zip(*found.values(), strict=True))
    rows = zip(found.items(), predicted.tolist(), strict=True)
    return {"h": h, "layers": {name: {"k": k, "std": std, "predicted": value} for (name, (k, std)), value in rows}}
