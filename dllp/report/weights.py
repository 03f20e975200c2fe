"""Slab and spike of each layer: the weights that were kept and those that were removed, with the slab's Gaussian."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllp.errors import ArtifactError
from dllp.method.weight_laws import near_zero_ratio
from dllp.report.channels import ROW
from dllp.report.contents import Run
from dllp.report.figures import (
    BLUE,
    GREY,
    ORANGE,
    VERMILION,
    Plot,
    Section,
    Trace,
    axis,
    distinct,
    line,
    names_axis,
    short,
)
from dllp.report.names import plain
from dllp.runs import artifacts

BINS = 60
FEWEST = 30
"""Weights below which a shape means nothing."""


@dataclass(frozen=True)
class Layer:
    """The weights of one layer: `slab` (m,) as they are in M_p, `spike` (k,) as they were in M_0."""

    name: str
    slab: np.ndarray
    spike: np.ndarray


def section(run: Run) -> Section | None:
    """Histograms of the first particle; None where nothing was removed."""
    layers = split(run.folder, run.recipes[0], run.gated) if run.widths else []
    layers = [layer for layer in layers if len(layer.slab) >= FEWEST]
    if not layers:
        return None
    choices = {plain(layer.name): histogram(layer) for layer in layers}
    names = distinct(layer.name for layer in layers)
    ratios = [near_zero_ratio(layer.slab) for layer in layers]
    return Section(
        "weights", "Weights",
        lead="A lossless cut leaves weights that look like those of a network that never was pruned: a Gaussian with "
        "its middle in place. Removing by magnitude leaves a hole at zero instead.",
        plots=(
            Plot(
                "histograms", "Slab and spike of a layer, particle 1",
                "Densities of the kept weights (slab) at the end of training, and of the removed ones (spike) as they "
                "stood when the gates were decided, each of area 1. The Gaussian has the slab's mean and σ; the ratio "
                "is the slab's mass near zero. "
                "The picture is scaled to the slab; a narrow spike rises beyond it.",
                next(iter(choices.values())),
                {"xaxis": axis("weight"), "yaxis": axis("density", rangemode="tozero"), "barmode": "overlay",
                 "bargap": 0},
                choices=choices, label="Layer",
            ),
            Plot(
                "near-zero", "Mass near zero of the kept weights",
                "Share of kept weights within a tenth of a standard deviation of zero, over what a Gaussian has there: "
                "1 is a Gaussian, 0 a tail that was cut off.",
                [{"type": "scatter", "mode": "markers", "y": names, "x": short(ratios), "name": "ratio",
                  "showlegend": False, "marker": {"color": BLUE, "size": 10},
                  "hovertemplate": "%{y}: %{x:.2f}<extra></extra>"}],
                {"xaxis": axis("near-zero ratio", rangemode="tozero"), "yaxis": names_axis(),
                 "shapes": [{"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper",
                             "line": {"color": GREY, "dash": "dash", "width": 1}}]},
                height=120 + ROW * max(len(names), 4),
            ),
        ),
    )  # fmt: skip


def histogram(layer: Layer) -> list[Trace]:
    """Both densities on the same bins, and the Gaussian with the slab's mean and standard deviation."""
    mean, std = float(layer.slab.mean(dtype=np.float64)), float(layer.slab.std(dtype=np.float64))
    reach = 4 * std if std > 0 else max(abs(mean), 1e-12)
    edges = np.linspace(mean - reach, mean + reach, BINS + 1)
    middle, width = (edges[1:] + edges[:-1]) / 2, float(edges[1] - edges[0])
    fit = np.exp(-0.5 * ((middle - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi)) if std > 0 else np.zeros(BINS)
    slab = _density(layer.slab, edges)
    top = 1.6 * max(float(slab.max()), float(fit.max()))
    total = len(layer.slab) + len(layer.spike)
    traces: list[Trace] = []
    for values, color, label in ((layer.spike, ORANGE, "spike"), (layer.slab, BLUE, "slab")):
        if len(values):
            y = np.minimum(_density(values, edges), top)
            traces.append({
                "type": "bar", "x": short(middle), "y": short(y), "width": float(f"{width:.5g}"), "opacity": 0.65,
                "name": f"{label} {100 * len(values) / total:.0f}%", "marker": {"color": color},
            })  # fmt: skip
    ratio = near_zero_ratio(layer.slab)
    return [*traces, line(f"Gaussian, σ {std:.3g}, ratio {ratio:.2f}", short(middle), fit, VERMILION)]


def _density(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.histogram(values, edges)[0] / (len(values) * (edges[1] - edges[0]))


def split(folder: Path, recipe: Mapping[str, Any], gated: Sequence[str]) -> list[Layer]:
    """Slab and spike of every layer that lost something, from the first particle's files: no network is needed."""
    whole, pruned = (artifacts.read_tensors(folder / f"{kind}-0.safetensors") for kind in ("reference", "particle"))
    path, reference = folder / "particle-0.safetensors", folder / "reference-0.safetensors"
    if gated:
        places = [(name, whole.get(name), pruned.get(name + "#index"), pruned.get(name + "#value")) for name in gated]
        return [_by_position(*place, path, reference) for place in places]
    layers = []
    for module, sides in recipe.items():
        weight, kept = whole.get(f"{module}.weight"), pruned.get(f"{module}.weight")
        if weight is not None and weight.dim() >= 2 and weight.is_floating_point():
            if kept is None or not kept.is_floating_point():
                raise ArtifactError(f"{path}: the weights of {module!r} are missing")
            keep = _kept(module, weight.shape, kept.numel(), sides, folder / artifacts.RUN)
            name = f"{module}.weight"
            layers.append(Layer(module, _finite(kept, name, path), _finite(weight[~keep], name, reference)))
    return [layer for layer in layers if len(layer.spike)]


def _kept(module: str, shape: torch.Size, count: int, sides: Any, path: Path) -> Tensor:
    """Which weights a recipe keeps, `count` of them; outputs come first, but in transposed convolutions inputs do."""
    index = {side: sides.get(side, []) if isinstance(sides, dict) else None for side in ("out", "in")}
    if not all(isinstance(part, list) and all(type(i) is int and i >= 0 for i in part) for part in index.values()):
        raise ArtifactError(f"{path}: the recipe of {module!r} is no list of channels")
    masks = []
    for order in (("out", "in"), ("in", "out")):
        keep = torch.ones(shape, dtype=torch.bool)
        for dim, side in enumerate(order):
            part = index[side]
            if part and max(part) < shape[dim]:  # the inputs of grouped convolutions are counted over all groups
                lost = torch.ones(shape[dim], dtype=torch.bool)
                lost[part] = False
                keep.transpose(0, dim)[lost] = False
        masks.append(keep)
    return next((keep for keep in masks if int(keep.sum()) == count), masks[0])


def _by_position(
    name: str, weight: Tensor | None, index: Tensor | None, kept: Tensor | None, path: Path, reference: Path
) -> Layer:
    if weight is None or index is None or kept is None or index.dtype != torch.int32 or index.dim() != 1:
        raise ArtifactError(f"{path}: the positions of {name!r} are missing")
    flat = weight.flatten().float()
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(flat):
        raise ArtifactError(f"{path}: the positions of {name!r} do not fit the network")
    keep = torch.zeros(len(flat), dtype=torch.bool)
    keep[index.long()] = True
    return Layer(name.removesuffix(".weight"), _finite(kept, name, path), _finite(flat[~keep], name, reference))


def _finite(values: Tensor, name: str, path: Path) -> np.ndarray:
    """Weights of a stranger's file as they are drawn, (m,) in float32."""
    flat = values.flatten().float()
    if not bool(flat.isfinite().all()):
        raise ArtifactError(f"{path}: {name!r} holds numbers that are not finite")
    return flat.numpy()
