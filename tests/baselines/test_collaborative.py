"""CCP: its derivatives against autograd, its quadratic program against brute force and scipy."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import LinearConstraint, minimize
from torch import Tensor, nn

from dllp.baselines.collaborative import CollaborativePruning, onto, relaxed
from dllp.baselines.protocol import Scene
from dllp.zoo import small_cnn, small_resnet
from tests.support.oracles import normal
from tests.support.short_runs import scene_of


def labelled(model: nn.Module, x: Tensor, y: Tensor, **changes: object) -> Scene:
    """A scene with two batches of pairs, norms that have seen data."""
    with torch.no_grad():
        model.train()(x)
    halves = [(x[:5], y[:5]), (x[5:], y[5:])]
    return replace(scene_of(model, x, **changes), examples=lambda count: iter(halves))


def value(u: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return (b - 1) @ u + (b - 1) @ s @ (b - 1)


def test_terms_are_those_of_per_example_autograd() -> None:
    """t_ni = <dL_n/dw_i, w_i> by one backward for each example, s half the empirical Fisher matrix of the scales."""
    torch.manual_seed(0)
    model = nn.Sequential(  # an activation in place, a bias, a layer read twice
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(6 * 16, 5), nn.ReLU(inplace=True), nn.Linear(5, 3),
    ).double()  # fmt: skip
    x, y = normal(12, 1, 8, 8), torch.arange(12) % 3
    scene = labelled(model, x, y)
    found = CollaborativePruning().statistics(scene)
    assert [group.name for group in scene.structure.groups] == ["0", "3", "6"]
    model.eval()
    for name, statistics in zip(("0", "3", "6"), found, strict=True):
        assert statistics is not None
        weight = model.get_submodule(name).weight
        rows = []
        for n in range(12):
            loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
            (gradient,) = torch.autograd.grad(loss, [weight])  # type: ignore[list-item]
            rows.append((gradient * weight).flatten(1).sum(1).detach())  # type: ignore[operator]
        t = torch.stack(rows)
        u, s = statistics
        torch.testing.assert_close(u, t.mean(0))
        torch.testing.assert_close(s, torch.stack([torch.outer(row, row) for row in t]).mean(0) / 2)


def test_terms_at_inputs_are_the_gates_derivatives() -> None:
    """Derivatives of one example's loss by the gates that `Fold` multiplies, also of a unit with two readers."""
    torch.manual_seed(0)
    model, x, y = small_resnet().double(), normal(10, 3, 8, 8), torch.arange(10)
    scene = labelled(model, x, y)
    found = CollaborativePruning(inputs=1).statistics(scene)
    model.eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    rows = []
    for n in range(10):
        gates = torch.ones(scene.structure.units, dtype=torch.float64, requires_grad=True)
        gated = {**weights, **scene.gating.fold(weights, gates)}
        loss = F.cross_entropy(torch.func.functional_call(model, gated, (x[n : n + 1],)), y[n : n + 1])
        rows.append(torch.autograd.grad(loss, gates)[0])
    t = torch.stack(rows)
    for here, statistics in zip(scene.structure.slices, found, strict=True):
        assert statistics is not None
        torch.testing.assert_close(statistics[0], t[:, here].mean(0), rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(statistics[1], t[:, here].T @ t[:, here] / 20, rtol=1e-6, atol=1e-12)


def test_the_projection_is_the_nearest_point() -> None:
    point = torch.tensor([2.0, 0.4, 0.1, -3.0]).double()
    # by hand: 1 and 0 at the ends, 0.4 and 0.1 shifted by 0.25 each
    torch.testing.assert_close(onto(point, 2), torch.tensor([1.0, 0.65, 0.35, 0.0]).double())


@pytest.mark.parametrize("seed", range(4))
def test_the_relaxed_problem_is_solved(seed: int) -> None:
    t = normal(30, 7, seed=seed) * torch.logspace(0, -1.5, 7, dtype=torch.float64)
    u, s = t.mean(0), t.T @ t / 60
    found = relaxed(u, s, 3)
    oracle = minimize(
        lambda b: float(value(u, s, torch.from_numpy(b))), [3 / 7] * 7, bounds=[(0, 1)] * 7, method="SLSQP",
        jac=lambda b: (u + 2 * s @ (torch.from_numpy(b) - 1)).numpy(), constraints=LinearConstraint([[1.0] * 7], 3, 3),
        options={"ftol": 1e-14, "maxiter": 1000},
    )  # fmt: skip
    assert float(value(u, s, found)) == pytest.approx(oracle.fun, abs=1e-8)
    assert float(found.sum()) == pytest.approx(3) and bool(((found >= 0) & (found <= 1)).all())


def test_the_choice_is_the_best_of_all_subsets() -> None:
    """Two channels whose effects cancel go together; one of them alone would cost more than any other."""
    t = normal(400, 6) * torch.tensor([0.3, 2.0, 1.0, 0.6, 0.8, 1.2], dtype=torch.float64)
    t[:, 2] = -t[:, 1] + 0.1 * t[:, 2]
    t -= t.mean(0)
    u, s = t.mean(0), t.T @ t / 800
    best = min(
        combinations(range(6), 3),
        key=lambda kept: float(value(u, s, torch.zeros(6).double().index_fill(0, torch.tensor(kept), 1))),
    )
    assert relaxed(u, s, 3).argsort(descending=True)[:3].sort().values.tolist() == list(best) == [3, 4, 5]
    assert s.diagonal().argsort()[0] == 0 and s.diagonal().argmax() in (1, 2), "not what a ranking would keep"


def test_every_layer_keeps_the_same_share() -> None:
    torch.manual_seed(0)
    x, y = normal(10, 1, 8, 8), torch.arange(10)
    scene = labelled(small_cnn().double(), x, y)
    counts, method = scene.even(), CollaborativePruning()
    assert [round(32 * c / g.units) for c, g in zip(counts, scene.structure.groups, strict=True)] == [counts[0]] * 3
    assert float(scene.cost(scene.first(counts))) <= 0.4 < float(scene.cost(scene.first([c + 2 for c in counts])))
    scores = method.scores(scene)
    keep = scores > 1
    assert [int(keep[here].sum()) for here in scene.structure.slices] == counts
    assert bool(scene.select(scores)[keep].all()), "a choice within the budget stays, others fill the rest"
