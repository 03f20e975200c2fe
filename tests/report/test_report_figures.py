"""What the report computes: each figure against a metric, a network or a definition."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dllp
from dllp.cli.parser import parse
from dllp.cli.report import command
from dllp.evaluation import metrics
from dllp.evaluation.examples import Examples
from dllp.report import compare, contents, trust, weights
from dllp.runs.settings import read, split
from dllp.zoo import build
from tests.support.commands import plots

pytest.importorskip("plotly", reason="needs plotly: pip install -e '.[report]'")


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_front_is_what_nobody_beats(pairs: list[tuple[int, int]]) -> None:
    points = [compare.Point(str(i), "", cost, quality) for i, (cost, quality) in enumerate(pairs)]
    best = {(p.cost, p.quality) for p in compare.front(points)}

    def beaten(p: compare.Point) -> bool:
        return any(q.cost <= p.cost and q.quality >= p.quality and q != p and
                   (q.cost, q.quality) != (p.cost, p.quality) for q in points)  # fmt: skip

    assert best == {(p.cost, p.quality) for p in points if not beaten(p)}


def test_diagrams_agree_with_the_metrics() -> None:
    """Confidence and answer of single examples are drawn like the whole probabilities that they come from."""
    p, y = (3 * torch.randn(300, 5)).softmax(1), torch.randint(5, (300,))
    confidence, predicted = p.max(1)
    found = Examples(y, {"particle 1": predicted}, {"particle 1": confidence}, confidence, 0 * confidence)
    run = SimpleNamespace(examples=found, pictures=[], missing={})
    section = trust.section(run)  # type: ignore[arg-type]
    assert section is not None
    reliability, risk = (plot.data[-1] for plot in section.plots[:2])
    bins = metrics.reliability(*metrics.confidence(p, y))
    np.testing.assert_allclose([reliability["x"], reliability["y"]], [bins["confidence"], bins["accuracy"]], rtol=1e-4)
    shares = [int(count) / len(y) for count in reliability["text"]]
    np.testing.assert_allclose(shares, bins["share"])
    assert np.mean(risk["y"]) == pytest.approx(metrics.aurc(p, y), abs=1e-4)
    assert risk["x"][-1] == 1 and risk["y"][-1] == pytest.approx(1 - metrics.accuracy(p, y), abs=1e-4)


def test_histograms_are_densities(run: Path) -> None:
    found = contents.read(run)
    layers = weights.split(run, found.recipes[0], found.gated)
    assert [layer.name for layer in layers] == ["conv1", "conv2", "conv3", "classifier"]
    network = build("small_cnn", num_classes=10, in_channels=1, image_size=8)
    pruned = dllp.load(run, network).model
    for layer in layers:
        kept = pruned.get_submodule(layer.name).weight
        np.testing.assert_allclose(np.sort(layer.slab), np.sort(kept.detach().flatten().numpy()), atol=1e-6)
        assert len(layer.slab) + len(layer.spike) == network.get_submodule(layer.name).weight.numel()  # type: ignore
    slab = next(trace for trace in weights.histogram(layers[1]) if trace["name"].startswith("slab"))
    assert sum(slab["y"]) * slab["width"] == pytest.approx(1, abs=0.01)


def test_gates_over_time_are_shares(report_page: str, run: Path) -> None:
    gates = plots(report_page)["gates"]
    assert [choice["name"] for choice in gates["choices"]] == ["all layers", *contents.read(run).widths]
    for choice in gates["choices"]:
        columns = np.asarray(choice["data"][0]["z"]).sum(0)
        np.testing.assert_allclose(columns, 100, atol=0.1)
    last = np.asarray(gates["choices"][0]["data"][0]["z"])[:, -1]
    assert last[1:-1].sum() == 0 and last[0] > 0 and last[-1] > 0  # discrete: open or closed


@pytest.mark.parametrize("changes", [{}, {"draw_gates": False, "dense": False, "gate_linear": True}])
def test_the_command_makes_the_same_run_again(run: Path, changes: dict[str, bool]) -> None:
    settings = read(run / "config.yaml") | changes
    args = parse(shlex.split(command(run, settings))[1:])
    assert args.command == "prune" and args.out == str(run)
    task, values = split(args.chosen)
    assert task == split(settings)[0]
    again = task.config(values).resolved().as_dict()
    assert again == {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items() if name in again}
