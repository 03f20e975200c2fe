"""Calibration and uncertainty: reliability, risk against coverage, uncertain test images, and corrupted data."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from dllp.data import ArrayData
from dllp.evaluation import metrics
from dllp.evaluation.evaluate import CLEAN, DENSE, TOGETHER
from dllp.evaluation.examples import Examples
from dllp.report import figures
from dllp.report.contents import Picture, Run, Uncertainty
from dllp.report.figures import BLUE, DASHES, GREEN, GREY, MARKS, ORANGE, VERMILION, Plot, Section, Trace, axis, short
from dllp.report.page import html_text, note, percent, table

NETWORKS = {DENSE: ORANGE, "particle 1": BLUE, TOGETHER: GREEN}
"""The networks that are drawn: the dense one, the one that is shipped, and the ensemble."""
KINDS: tuple[Uncertainty, ...] = ("aleatoric", "epistemic")
POINTS = 300
HISTOGRAM = 40
CLASSES = 5  # classes that are named where two networks differ
SHOWN, LARGEST = 12, 160  # images of each kind, and the longer side of what is embedded
CORRUPTED = {
    "accuracy": ("Accuracy under corruption", ".0%"),
    "ece": ("Calibration error (ECE) under corruption", ".1%"),
    "rmse": ("Error (RMSE) under corruption", "~g"),
}


def section(run: Run) -> Section | None:
    """Diagrams from single test examples; None where the run has no such file."""
    found = run.examples
    if found is None:
        why = run.missing.get("examples", "")
        return Section("trust", "Trust", markup=note(why)) if why else None
    names = [name for name in NETWORKS if name in found.predicted]
    plots = [_reliability(found, names), _risk(found, names)]
    plots += [_uncertainty(found, kind) for kind in KINDS if float(getattr(found, kind).max()) > 0]
    images = "".join(_gallery(kind, [p for p in run.pictures if p.kind == kind]) for kind in KINDS)
    markup = _agreement(run, found) + (images or note(run.missing.get("images", "")))
    return Section("trust", "Trust", plots=tuple(plots), markup=markup)


def _agreement(run: Run, found: Examples) -> str:
    """A table of dense against shipped network: how often both agree, and where they differ most."""
    name = "particle 1"
    if DENSE not in found.predicted:
        return ""
    before, after = found.correct(DENSE), found.correct(name)
    same = found.predicted[DENSE] == found.predicted[name]
    cells = {
        "same answer": same, "both right": before & after, "only the dense one right": before & ~after,
        "only the pruned one right": ~before & after, "both wrong": ~before & ~after,
    }  # fmt: skip
    rows = [[text, str(int(each.sum())), percent(float(each.double().mean()), 2)] for text, each in cells.items()]
    data = run.info.get("data")
    classes = data.get("classes") if isinstance(data, dict) else None
    differing = found.labels[~same].bincount()
    most = [int(c) for c in differing.argsort(descending=True, stable=True)[:CLASSES] if int(differing[c])]
    named = [f"{classes[c] if classes and c < len(classes) else c} ({int(differing[c])})" for c in most]
    where = f" They differ most in: {', '.join(named)}." if named else ""
    taught = "teacher and student" if run.config.get("teacher") == "given" else "dense and pruned network"
    head = f"<h3>{html_text(taught.capitalize())}</h3>"
    return head + table(("of all examples", "number", "share"), rows) + note(f"Answers of {name} and dense.{where}")


def _reliability(found: Examples, names: list[str]) -> Plot:
    traces = [figures.line("perfect", [0, 1], [0, 1], GREY, "dot", hoverinfo="skip")]
    for i, name in enumerate(names):
        bins = metrics.reliability(found.confidence[name], found.correct(name))
        sizes = [round(6 + 14 * share**0.5, 1) for share in bins["share"]]
        traces.append(figures.line(
            name, short(bins["confidence"]), bins["accuracy"], NETWORKS[name], DASHES[i],
            text=[str(round(share * len(found.labels))) for share in bins["share"]],
            marker={"symbol": MARKS[i], "size": sizes},
            hovertemplate="confidence %{x:.3f}, accuracy %{y:.3f}, %{text} examples", mode="lines+markers",
        ))  # fmt: skip
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
        curve = metrics.risk_coverage(found.confidence[name], found.correct(name), POINTS)
        traces.append(figures.line(name, short(curve["coverage"]), curve["risk"], NETWORKS[name], DASHES[i]))
    return Plot(
        "risk", "Risk against coverage",
        "Error rate when only the most confident share of the examples is answered: a curve that starts low means that "
        "the errors are among the uncertain examples.",
        traces,
        {"xaxis": axis("coverage", tickformat=".0%"),
         "yaxis": axis("error rate", tickformat=".1%", rangemode="tozero")},
    )  # fmt: skip


def _uncertainty(found: Examples, kind: Uncertainty) -> Plot:
    values: Tensor = getattr(found, kind).double()
    right = found.correct(found.together)
    top = float(values.max())
    edges = torch.linspace(0, top, HISTOGRAM + 1, dtype=torch.float64)
    traces: list[Trace] = [
        {"type": "bar", "x": short(((edges[1:] + edges[:-1]) / 2).tolist()),
         "y": torch.histc(values[mask], HISTOGRAM, 0, top).int().tolist(), "name": f"{label} ({int(mask.sum())})",
         "marker": {"color": color}, "hovertemplate": "variance about %{x:.3f}: %{y} examples"}
        for mask, color, label in ((right, BLUE, "right"), (~right, VERMILION, "wrong"))
    ]  # fmt: skip
    title, text = {
        "aleatoric": ("Noise in the data", "Uncertainty that the particles share: the example itself is unclear, and "
                      "more training data would not help."),
        "epistemic": ("Disagreement of the particles", "Uncertainty from different answers of the particles, as far "
                      "from the training data."),
    }[kind]  # fmt: skip
    return Plot(
        kind, f"{title} ({kind})", f"{text} Counts on a logarithmic scale, answers of {found.together}.",
        traces,
        {"xaxis": axis(f"{kind} variance"), "yaxis": axis("examples", type="log"), "barmode": "stack", "bargap": 0.05},
    )  # fmt: skip


def pictures(found: Examples, data: ArrayData, classes: Sequence[str]) -> list[Picture]:
    """The test images with the most uncertainty of each kind; none where the inputs are no images."""
    if data.x.ndim != 4 or data.x.shape[1] not in (1, 3):
        return []

    def name(index: int) -> str:
        return classes[index] if 0 <= index < len(classes) else str(index)

    ensemble = found.together
    return [
        Picture(
            kind, _png(data.x[index].cpu()), index, name(int(found.labels[index])),
            name(int(found.predicted[ensemble][index])), float(found.confidence[ensemble][index]),
        )
        for kind in KINDS
        if float(getattr(found, kind).max()) > 0  # a single particle has no epistemic uncertainty
        for index in getattr(found, kind).argsort(descending=True)[:SHOWN].tolist()
    ]  # fmt: skip


def _png(image: Tensor) -> bytes:
    if image.dtype != torch.uint8:
        low, high = float(image.min()), float(image.max())
        image = ((image - low) / max(high - low, 1e-12) * 255).round().to(torch.uint8)
    picture = Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())
    picture.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _gallery(kind: Uncertainty, chosen: Sequence[Picture]) -> str:
    items = []
    for p in chosen:
        answer, truth = html_text(p.answer, 40), html_text(p.truth, 40)
        right = p.answer == p.truth
        said = f"{'✓' if right else '✗'} <bdi>{answer}</bdi> {100 * p.confidence:.0f}%"
        said += "" if right else f"<br>is <bdi>{truth}</bdi>"
        source = "data:image/png;base64," + base64.b64encode(p.png).decode()
        alt = f"test image {p.index}, class {truth}, answered {answer}"
        items.append(f'<li><img src="{source}" alt="{alt}" width="72" height="72"><span>{said}</span></li>')
    title = f"<h3>Test images with the most {kind} uncertainty</h3>"
    return f'{title}<ul class="gallery">{"".join(items)}</ul>' if items else ""


def robustness(run: Run) -> Section | None:
    """Accuracy and calibration under corruption; None where `dllp evaluate --corrupt` measured none."""
    versions = list(dict.fromkeys(row.data for row in run.rows))
    if versions == [CLEAN] or not versions:
        return None
    plots = []
    for metric, (title, form) in CORRUPTED.items():
        traces = [trace for network in NETWORKS for trace in _curves(run, network, metric, versions)]
        if traces:
            layout = {
                "xaxis": axis("", type="category", automargin=True, categoryarray=figures.distinct(versions)),
                "yaxis": axis(metric, tickformat=form),
                "legend": {"y": 1.02, "yref": "paper"},  # the names of corruptions need the room below
            }
            caption = "The first point is the clean test data; lines join the levels of one corruption."
            plots.append(Plot(f"corrupted-{metric}", title, caption, traces, layout))
    return Section("robustness", "Robustness", plots=tuple(plots))


def _curves(run: Run, network: str, metric: str, versions: list[str]) -> list[Trace]:
    """One network: a trace for each kind of corruption, which share a place in the legend."""
    found = {row.data: row.metrics[metric] for row in run.rows if row.name == network and metric in row.metrics}
    i, names = list(NETWORKS).index(network), dict(zip(versions, figures.distinct(versions), strict=True))
    kinds: dict[str, list[str]] = {}
    for version in found:
        kinds.setdefault(version.partition(":")[0], []).append(version)
    return [
        figures.line(
            network, [names[v] for v in part], [found[v] for v in part], NETWORKS[network], DASHES[i],
            showlegend=not k, legendgroup=network, marker={"symbol": MARKS[i], "size": 9}, mode="lines+markers",
        )
        for k, part in enumerate(kinds.values())
    ]  # fmt: skip
