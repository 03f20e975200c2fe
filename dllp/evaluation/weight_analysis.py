"""Distribution of a run's weights before pruning, of the kept and of the removed ones: by layer and pooled."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
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

    Args:
        result: A run.
        particle: Its index, from 0.
        dense: The network whose standardised weights are the reference; by default the particle's own M_0.
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
        return {name: _parts(before[name], after[name][mask], mask) for name, mask in masks.items()}
    kept = kept_indices(particle.reference, particle.recipe)
    masks = {
        # a weight that is computed from others is no parameter: its layer is kept whole
        name: np.isin(np.arange(len(values)), kept.get(f"{name}.weight", np.arange(len(values))))
        for name, values in before.items()
    }
    return {name: _parts(before[name], after[name], mask) for name, mask in masks.items()}


def _parts(before: Array, kept: Array, mask: NDArray[np.bool_]) -> dict[str, Array]:
    return {"before": before, "kept": kept, "removed": before[~mask]}


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
    """Layer -> part -> statistics -> the Pareto index k of each layer's kept weights beside h / std of equation 8.

    None where no layer has a fit.
    """
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


# ---- as text

COLUMNS = {
    "count": ("weights\n", ","), "std": ("std\n", "#.3g"), "near_zero": ("near\nzero", ".2f"),
    "kurtosis": ("excess\nkurt.", ".2f"), "ks": ("KS\n", ".3f"), "dip_p": ("dip\np", ".2f"),
    "wasserstein": ("W\n", ".3f"), "law": ("best\nlaw", ""), "law_ks": ("its\nKS", ".3f"),
}  # fmt: skip
"""Head and format of each; heads have two lines, so that the table fits 80 columns."""
LAWS = {"amoroso": "amoroso", "amoroso_2": "amoroso 2", "pareto": "pareto", "generalised_pareto": "GPD"}
WIDTH = 80


def text(report: Mapping[str, Any]) -> str:
    """The report's statistics as a table; all layers pooled come first, standardised. A name has its own line."""
    named = {WHOLE: report[WHOLE], **report["layers"]}
    rows = {name: [_row(part, shapes[part]) for part in PARTS if shapes[part]] for name, shapes in named.items()}
    tops = [["", *line] for line in zip(*(head.split("\n") for head, _ in COLUMNS.values()), strict=True)]
    columns = zip(*tops, *(row for found in rows.values() for row in found), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = [_aligned(top, widths) for top in tops]
    for name, found in rows.items():
        lines += [name, *(_aligned(row, widths) for row in found)] if found else []
    notes = (
        "near zero: weights within a tenth of a standard deviation, over what a Gaussian has there (1: as a Gaussian; "
        "0: cut away).",
        "KS: distance to the Gaussian of the same mean and deviation. dip p: below 0.05 there is more than one mode.",
        f"W: Wasserstein distance to the weights of {report['reference']}, standardised. best law: of the magnitudes, "
        "by likelihood, and its KS distance to them; GPD: generalised Pareto.",
        f"whole: layers standardised, then pooled. Parts of fewer than {weight_laws.FEWEST} weights, or of equal "
        "ones, have no row.",
    )
    return "\n".join(
        [
            *lines,
            "",
            *_moments_text(report.get("moments", ())),
            *_tail_text(tails(report["layers"])),
            *(textwrap.fill(note, WIDTH) for note in notes),
        ]
    )


def _moments_text(moments: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for moment in moments:
        accuracy = "" if moment["accuracy"] is None else f"accuracy {moment['accuracy']:.2%}, NLL {moment['nll']:.4f}"
        shape = ""
        if "ks" in moment:
            shape = f"near zero {moment['near_zero']:.2f}, KS {moment['ks']:.3f}, dip p {moment['dip_p']:.2f}"
        rows.append(f" {moment['name']:<6}  {'; '.join(filter(None, (shape, accuracy)))}")
    return ["kept weights before and after the gates were decided, and at the end:", *rows, ""] if rows else []


def _tail_text(tail: Mapping[str, Any] | None) -> list[str]:
    if tail is None:
        return []
    head = (
        f"Pareto tail of the kept weights, equation 8: k as fitted, then h / std of the layer's weights before pruning "
        f"with one h = {tail['h']:.3g} for all layers, which the paper predicts."
    )
    width = max(map(len, tail["layers"]))
    rows = [f" {name:<{width}}  {row['k']:8.3g}  {row['predicted']:8.3g}" for name, row in tail["layers"].items()]
    return [textwrap.fill(head, WIDTH), *rows, ""]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    cells = zip(row, ("part", *COLUMNS), widths, strict=True)
    aligned = (cell.ljust(width) if key in ("part", "law") else cell.rjust(width) for cell, key, width in cells)
    return f" {'  '.join(aligned)}".rstrip()


def _row(part: str, shape: Mapping[str, Any]) -> list[str]:
    fits = shape["fits"]
    best = max(fits, key=lambda law: fits[law]["log_likelihood"]) if fits else None
    values = {**shape, "law": best and LAWS[best], "law_ks": best and fits[best]["ks"]}
    return [part, *("–" if values[key] is None else format(values[key], form) for key, (_, form) in COLUMNS.items())]
