"""What was kept of each layer: its channels, and histograms of kept (slab) and removed (spike) weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllp.config import fits
from dllp.errors import ArtifactError
from dllp.method.weight_laws import near_zero_ratio
from dllp.report import figures
from dllp.report.contents import Run
from dllp.report.figures import BLUE, ORANGE, ROW, VERMILION, Plot, Section, Trace, axis, names_axis, short
from dllp.report.markup import definitions, folded, plain
from dllp.runs.names import RUN
from dllp.runs.tensors import read_tensors

BINS = 60
FEWEST = 30
"""Weights below which a shape means nothing."""


@dataclass(frozen=True)
class Layer:
    """The weights of one layer: `slab` (m,) as they are in M_p, `spike` (k,) as they were in M_0."""

    name: str
    slab: np.ndarray
    spike: np.ndarray


def channels(run: Run) -> Section | None:
    """Kept channels (or weights) of each group; None for a dense run."""
    if not run.widths:
        return None
    what = f"{run.config['granularity']}s"
    names, counts, n = figures.distinct(run.widths), list(run.widths.values()), len(run.recipes)
    mean = [100 * sum(c[:-1]) / n / c[-1] for c in counts]
    traces = [figures.bars("mean", names, mean, BLUE, hovertemplate="%{y}: %{x:.1f}%<extra></extra>")]
    for i in range(n if n > 1 else 0):
        symbol = figures.MARKS[i % len(figures.MARKS)] + ("-open" if i else "")
        traces.append(figures.marks(
            f"particle {i + 1}", [100 * c[i] / c[-1] for c in counts], names,
            {"symbol": symbol, "size": 9, "color": VERMILION}, text=[f"{c[i]} of {c[-1]}" for c in counts],
            hovertemplate="%{y}: %{text}<extra>%{fullData.name}</extra>",
        ))  # fmt: skip
    plot = Plot(
        "channels", f"{what.capitalize()} kept in each layer",
        f"Share of the {what} of each coupled group that is left, as a mean and for each particle; "
        "groups are called by their first layer.",
        traces,
        {"xaxis": axis(f"% of the {what}", range=[0, 101]), "yaxis": names_axis()},
        height=120 + ROW * max(len(names), 4),
    )  # fmt: skip
    whole = folded(f"Kept whole: {len(run.whole)}", definitions(run.whole)) if run.whole else ""
    return Section("channels-kept", f"{what.capitalize()} kept", markup=whole, plots=(plot,))


def histograms(run: Run) -> Section | None:
    """Weights of the first particle; None where nothing was removed."""
    layers = split(run.folder, run.recipes[0], run.gated) if run.widths else []
    layers = [layer for layer in layers if len(layer.slab) >= FEWEST]
    if not layers:
        return None
    choices = {plain(layer.name): histogram(layer) for layer in layers}
    names = figures.distinct(layer.name for layer in layers)
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
                [figures.marks("ratio", ratios, names, {"color": BLUE, "size": 10}, showlegend=False,
                               hovertemplate="%{y}: %{x:.2f}<extra></extra>")],
                {"xaxis": axis("near-zero ratio", rangemode="tozero"), "yaxis": names_axis(),
                 "shapes": [figures.upright(1, "dash")]},
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
    densities = {
        name: np.histogram(values, edges)[0] / (len(values) * width)
        for name, values in (("spike", layer.spike), ("slab", layer.slab))
        if len(values)
    }
    top = 1.6 * max(float(densities["slab"].max()), float(fit.max()))
    total = len(layer.slab) + len(layer.spike)
    traces: list[Trace] = [
        {"type": "bar", "x": short(middle), "y": short(np.minimum(density, top)), "width": float(f"{width:.5g}"),
         "opacity": 0.65, "name": f"{name} {100 * len(getattr(layer, name)) / total:.0f}%",
         "marker": {"color": BLUE if name == "slab" else ORANGE}}
        for name, density in densities.items()
    ]  # fmt: skip
    ratio = near_zero_ratio(layer.slab)
    return [*traces, figures.line(f"Gaussian, σ {std:.3g}, ratio {ratio:.2f}", short(middle), fit, VERMILION)]


def split(folder: Path, recipe: Mapping[str, Any], gated: Sequence[str]) -> list[Layer]:
    """Slab and spike of every layer that lost something, from the first particle's files: no network is needed."""
    path, reference = folder / "particle-0.safetensors", folder / "reference-0.safetensors"
    pruned, whole = read_tensors(path), read_tensors(reference)
    layers = []
    for name in gated or [f"{module}.weight" for module in recipe]:
        module, weight = name.removesuffix(".weight"), whole.get(name)
        if not gated and (weight is None or weight.dim() < 2):
            continue  # a norm, or a module without weights
        kept = pruned.get(f"{name}#value" if gated else name)
        if weight is None or kept is None:
            raise ArtifactError(f"{path}: the weights of {module!r} are missing")
        if gated:
            place, keep = path, _at_positions(weight.shape, pruned.get(f"{name}#index"))
        else:
            place, keep = folder / RUN, _by_recipe(weight.shape, recipe[module], kept.numel())
        if keep is None:
            raise ArtifactError(f"{place}: the kept positions of {module!r} do not fit the network")
        layers.append(Layer(module, _finite(kept, name, path), _finite(weight[~keep], name, reference)))
    return [layer for layer in layers if len(layer.spike)]


def _at_positions(shape: torch.Size, index: Tensor | None) -> Tensor | None:
    """Mask of the weights at flat positions; None where these do not fit."""
    keep = torch.zeros(shape, dtype=torch.bool)
    if index is None or index.dtype != torch.int32 or index.dim() != 1:
        return None
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < keep.numel():
        return None
    keep.view(-1)[index.long()] = True
    return keep


def _by_recipe(shape: torch.Size, sides: Any, count: int) -> Tensor | None:
    """Mask of the `count` weights that a recipe keeps; None where it lists no channels.

    Outputs come first, but in transposed convolutions inputs do.
    """
    if not fits(sides, dict[str, list[int]]) or any(i < 0 for part in sides.values() for i in part):
        return None
    masks = []
    for order in (("out", "in"), ("in", "out")):
        keep = torch.ones(shape, dtype=torch.bool)
        for dim, side in enumerate(order):
            part = sides.get(side)
            if part and max(part) < shape[dim]:  # the inputs of grouped convolutions are counted over all groups
                lost = torch.ones(shape[dim], dtype=torch.bool)
                lost[part] = False
                keep.transpose(0, dim)[lost] = False
        masks.append(keep)
    return next((keep for keep in masks if int(keep.sum()) == count), masks[0])


def _finite(values: Tensor, name: str, path: Path) -> np.ndarray:
    """(m,) float32; a weight that is NaN or infinite is an error."""
    flat = values.flatten().float()
    if not bool(flat.isfinite().all()):
        raise ArtifactError(f"{path}: {name!r} holds numbers that are not finite")
    return flat.numpy()
