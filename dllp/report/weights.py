"""Kept channels of each layer, and histograms of kept (slab) and removed (spike) weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dllp.errors import ArtifactError
from dllp.files import typed
from dllp.method.weight_laws import near_zero_ratio
from dllp.records import Moment, Recipe
from dllp.report import figures
from dllp.report.contents import Run
from dllp.report.figures import BLUE, ORANGE, ROW, VERMILION, Plot, Section, Trace, axis, names_axis, plain, short
from dllp.report.page import definitions, folded, table
from dllp.runs.folder import RUN
from dllp.runs.tensors import INDEX, VALUE, check_finite, read_tensors

BINS = 60
FEWEST = 30  # weights below which a shape means nothing


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
        markup=_moments(run),
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


MOMENTS = {"before": "before the decision", "after": "after the decision", "end": "at the end"}


def _moments(run: Run) -> str:
    """Accuracy and shape of the kept weights around the decision, one row for each particle; empty for older runs."""
    heads = ("", "accuracy", "NLL", "near zero", "KS distance", "p of one mode")
    rows = []
    for moment in typed(list[Moment], run.info.get("moments", []), run.folder / RUN):
        for i, shape in enumerate(moment.shapes):
            each = [values[i] if values and i < len(values) else None for values in (moment.accuracy, moment.nll)]
            kept = [shape.get(name) if shape else None for name in ("near_zero", "ks", "dip_p")]
            numbers = ["–" if value is None else f"{value:.3f}" for value in (*each, *kept)]
            rows.append((f"{MOMENTS[moment.name]}, particle {i + 1}", *numbers))
    return table(heads, rows) if rows else ""


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


def split(folder: Path, recipe: Recipe, gated: Sequence[str]) -> list[Layer]:
    """Slab and spike of every layer that lost something, from the first particle's files: no network is needed."""
    path, reference = folder / "particle-0.safetensors", folder / "reference-0.safetensors"
    pruned, whole = read_tensors(path), read_tensors(reference)
    layers = []
    for name in gated or [f"{module}.weight" for module in recipe]:
        module = name.removesuffix(".weight")
        if not gated and (name not in whole or whole[name].dim() < 2):
            continue  # a norm, or a module without weights
        try:
            weight, kept = whole[name], pruned[name + VALUE if gated else name]
            if gated:
                keep = torch.zeros(weight.shape, dtype=torch.bool)
                keep.view(-1)[pruned[name + INDEX].long()] = True
            else:
                keep = _by_recipe(weight.shape, recipe[module], kept.numel())
        except (LookupError, RuntimeError):
            place = f"{folder / RUN} and {path.name}"
            raise ArtifactError(f"{place}: the kept weights of {module!r} do not fit the network") from None
        spike = weight[~keep]
        check_finite(path, name, kept, infinite=False)
        check_finite(reference, name, spike, infinite=False)
        layers.append(Layer(module, kept.flatten().float().numpy(), spike.float().numpy()))
    return [layer for layer in layers if len(layer.spike)]


def _by_recipe(shape: torch.Size, entries: Mapping[str, list[int]], count: int) -> Tensor:
    """Mask of the `count` weights that a recipe keeps. Outputs come first, but in transposed convolutions inputs do."""
    if any(i < 0 for part in entries.values() for i in part):
        raise IndexError
    masks = []
    for sides in (("out", "in"), ("in", "out")):
        keep = torch.ones(shape, dtype=torch.bool)
        for dim in range(len(shape)):
            part = entries.get(f"weight.{dim}", entries.get(sides[dim]) if dim < 2 else None)
            if part and max(part) < shape[dim]:  # the inputs of grouped convolutions are counted over all groups
                lost = torch.ones(shape[dim], dtype=torch.bool)
                lost[part] = False
                keep.transpose(0, dim)[lost] = False
        masks.append(keep)
    return next((keep for keep in masks if int(keep.sum()) == count), masks[0])
