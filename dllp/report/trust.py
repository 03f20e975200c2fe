"""Whether the networks can be trusted: reliability, risk against coverage, and doubt with the images behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from dllp.evaluation.evaluate import DENSE, TOGETHER
from dllp.evaluation.examples import Examples
from dllp.evaluation.metrics import BINS
from dllp.report import gallery
from dllp.report.contents import Run
from dllp.report.figures import (
    BLUE,
    DASHES,
    GREEN,
    GREY,
    MARKS,
    ORANGE,
    VERMILION,
    Plot,
    Section,
    Trace,
    axis,
    line,
    short,
)
from dllp.report.markup import note
from dllp.report.names import plot_text

NETWORKS = {DENSE: ORANGE, "particle 1": BLUE, TOGETHER: GREEN}
"""Those that are drawn: the dense one, the one that is shipped, and all together."""
POINTS = 300
HISTOGRAM = 40


def section(run: Run) -> Section | None:
    """Diagrams from single test examples; None where the run has no such file."""
    found = run.examples
    if found is None:
        why = run.missing.get("examples", "")
        return Section("trust", "Trust", markup=note(why)) if why else None
    names = [name for name in NETWORKS if name in found.predicted]
    plots = [_reliability(found, names), _risk(found, names), _doubt(found, "aleatoric", "Noise in the data")]
    if float(found.epistemic.max()) > 0:
        plots.append(_doubt(found, "epistemic", "Ignorance of the networks"))
    return Section("trust", "Trust", plots=tuple(plots), markup=_images(run))


def reliability(confidence: Tensor, correct: Tensor, bins: int = BINS) -> tuple[Tensor, Tensor, Tensor]:
    """(B,), (B,) -> mean confidence, accuracy and count of every bin of equal width that is not empty."""
    place = (confidence.double() * bins).ceil().clamp(1, bins).long() - 1
    count = torch.bincount(place, minlength=bins)
    sums = [torch.zeros(bins, dtype=torch.float64).index_add_(0, place, v.double()) for v in (confidence, correct)]
    some = count > 0
    return sums[0][some] / count[some], sums[1][some] / count[some], count[some]


def risk_coverage(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """(B,), (B,) -> coverage k/B and error rate of the k most confident; equal confidences share their errors."""
    _, group = confidence.unique(return_inverse=True)
    count = torch.bincount(group)
    shared = torch.zeros(len(count), dtype=torch.float64).index_add_(0, group, (~correct).double()) / count
    k = torch.arange(1, len(correct) + 1)
    return k / len(k), shared[group[confidence.argsort(descending=True)]].cumsum(0) / k


def _reliability(found: Examples, names: list[str]) -> Plot:
    traces = [line("perfect", [0, 1], [0, 1], GREY, "dot", hoverinfo="skip")]
    for i, name in enumerate(names):
        confidence, accuracy, count = reliability(found.confidence[name], found.correct(name))
        traces.append(line(name, short(confidence.tolist()), accuracy.tolist(), NETWORKS[name], DASHES[i]) | {
            "mode": "lines+markers", "text": [str(n) for n in count.tolist()],
            "marker": {"symbol": MARKS[i], "size": [round(6 + 14 * (n / len(found.labels)) ** 0.5, 1)
                                                    for n in count.tolist()]},
            "hovertemplate": "confidence %{x:.3f}, accuracy %{y:.3f}, %{text} examples",
        })  # fmt: skip
    return Plot(
        "reliability", "Reliability diagram",
        "Accuracy of the answers with about the same confidence. Below the diagonal a network is overconfident, above "
        "it underconfident; large marks stand for many examples.",
        traces,
        {"xaxis": axis("confidence", range=[0, 1.03]), "yaxis": axis("accuracy", range=[0, 1.03])},
    )  # fmt: skip


def _risk(found: Examples, names: list[str]) -> Plot:
    traces = []
    for i, name in enumerate(names):
        coverage, risk = risk_coverage(found.confidence[name], found.correct(name))
        some = torch.linspace(0, len(risk) - 1, min(len(risk), POINTS)).round().long()
        traces.append(line(name, short(coverage[some].tolist()), risk[some].tolist(), NETWORKS[name], DASHES[i]))
    return Plot(
        "risk", "Risk against coverage",
        "Error rate when only the most confident share of the examples is answered: a curve that starts low means that "
        "doubt points at the errors.",
        traces,
        {"xaxis": axis("coverage", tickformat=".0%"),
         "yaxis": axis("error rate", tickformat=".1%", rangemode="tozero")},
    )  # fmt: skip


def _doubt(found: Examples, kind: gallery.Doubt, title: str) -> Plot:
    values: Tensor = getattr(found, kind).double()
    right = found.correct(found.together)
    top = max(float(values.max()), 1e-6)
    edges = torch.linspace(0, top, HISTOGRAM + 1, dtype=torch.float64)
    middle = short(((edges[1:] + edges[:-1]) / 2).tolist())
    traces: list[Trace] = []
    for mask, color, label in ((right, BLUE, "right"), (~right, VERMILION, "wrong")):
        counts = torch.histc(values[mask], HISTOGRAM, 0, top)
        traces.append({
            "type": "bar", "x": middle, "y": counts.int().tolist(), "name": plot_text(f"{label} ({int(mask.sum())})"),
            "marker": {"color": color}, "hovertemplate": "doubt about %{x:.3f}: %{y} examples",
        })  # fmt: skip
    text = {
        "aleatoric": "Doubt that the particles share: the example itself is unclear, and more of them would not help.",
        "epistemic": "Doubt from disagreement: the particles answer differently, as far from the training data.",
    }[kind]
    return Plot(
        kind, f"{title} ({kind})", f"{text} Counts on a logarithmic scale, answers of {found.together}.",
        traces,
        {"xaxis": axis(f"{kind} variance"), "yaxis": axis("examples", type="log"), "barmode": "stack", "bargap": 0.05},
    )  # fmt: skip


def _images(run: Run) -> str:
    parts = []
    kinds: dict[gallery.Doubt, str] = {"aleatoric": "most noise", "epistemic": "most ignorance"}
    for kind, words in kinds.items():
        images = gallery.markup(run.pictures, kind)
        if images:
            parts.append(f"<h3>Test images with {words} ({kind})</h3>{images}")
    return "".join(parts) or note(run.missing.get("images", ""))
