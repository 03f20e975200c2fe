"""Priors against autograd, quadrature and scipy; the two collapses of the spike-and-slab prior."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dllp.method import other_priors, spike_and_slab
from tests.support.oracles import normal

LOGITS = normal(50, seed=1) * 3
CASES: dict[str, tuple[Tensor | float, ...]] = {
    "spike_and_slab": (LOGITS, 2.0, 20.0),
    "laplace": (0.7,),
    "gaussian": (0.3,),
    "polarization": (1.2, 0.5),
    "hoyer": (0.4,),
}


@pytest.mark.parametrize("name", CASES)
def test_score_is_the_gradient_of_the_log_density(name: str) -> None:
    prior = other_priors.PRIORS[name]
    w = normal(50).requires_grad_()
    (expected,) = torch.autograd.grad(prior.log_prob(w, *CASES[name]).sum(), w)
    torch.testing.assert_close(prior.score(w.detach(), *CASES[name]), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_separable_means_elementwise(name: str) -> None:
    prior = other_priors.PRIORS[name]
    assert prior.name == name
    assert prior.log_prob(normal(50), *CASES[name]).shape == ((50,) if prior.scope == "element" else ())


@pytest.mark.parametrize("name, parameters", [("spike_and_slab", (torch.tensor(-1.0), 0.8, 30.0)), *CASES.items()])
def test_proper_densities_integrate_to_one(name: str, parameters: tuple[Tensor | float, ...]) -> None:
    prior = other_priors.PRIORS[name]
    if prior.scope != "element":  # improper
        return
    grid = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    parameters = tuple(p.flatten()[0].double() if isinstance(p, Tensor) else p for p in parameters)
    mass = torch.trapezoid(prior.log_prob(grid, *parameters).exp(), grid)
    assert float(mass) == pytest.approx(1, abs=1e-5)


def test_log_densities_agree_with_scipy() -> None:
    w = normal(20)
    for actual, reference in (
        (other_priors.laplace_log_prob(w, 0.7), scipy.stats.laplace.logpdf(w, scale=0.7)),
        (other_priors.gaussian_log_prob(w, 0.3), scipy.stats.norm.logpdf(w, scale=0.3)),
    ):
        torch.testing.assert_close(actual, torch.as_tensor(reference))
    theta = 0.3
    mixture = theta * scipy.stats.norm.pdf(w, scale=1 / 2) + (1 - theta) * scipy.stats.norm.pdf(w, scale=1 / 5)
    logit = torch.tensor(math.log(theta / (1 - theta)), dtype=w.dtype)
    torch.testing.assert_close(spike_and_slab.log_prob(w, logit, 2.0, 5.0).exp(), torch.as_tensor(mixture))


def test_a_tensor_of_precisions_equals_a_float() -> None:
    w = normal(50)
    slab, spike = torch.full((50,), 2.0, dtype=w.dtype), torch.tensor(20.0, dtype=w.dtype)
    for function in (
        spike_and_slab.log_prob,
        spike_and_slab.responsibility,
        spike_and_slab.score,
    ):
        torch.testing.assert_close(function(w, LOGITS, slab, spike), function(w, LOGITS, 2.0, 20.0))


def test_gradients_in_gate_and_slab_are_closed_forms() -> None:
    w, logit = normal(50), LOGITS.clone().requires_grad_()
    log_slab = torch.full((50,), math.log(2.0), dtype=w.dtype, requires_grad=True)
    log_prob = spike_and_slab.log_prob(w, logit, log_slab.exp(), 20.0)
    by_gate, by_slab = torch.autograd.grad(log_prob.sum(), (logit, log_slab))
    torch.testing.assert_close(spike_and_slab.gate_score(w, LOGITS, 2.0, 20.0), by_gate)
    torch.testing.assert_close(spike_and_slab.log_slab_score(w, LOGITS, 2.0, 20.0), by_slab)


def test_responsibility_is_bayes_rule_and_splits_the_precision() -> None:
    w, logit = normal(50) * 0.1, LOGITS
    slab = logit.sigmoid() * other_priors.gaussian_log_prob(w, 1 / 2.0).exp()
    spike = (-logit).sigmoid() * other_priors.gaussian_log_prob(w, 1 / 20.0).exp()
    r = spike_and_slab.responsibility(w, logit, 2.0, 20.0)
    torch.testing.assert_close(r, slab / (slab + spike))
    parts = spike_and_slab.precision_parts(w, logit, 2.0, 20.0)
    torch.testing.assert_close(parts[0], r * 4)
    torch.testing.assert_close(parts[1], (1 - r) * 400)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    w=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e10, 1e30, math.inf]),
    logit=st.sampled_from([-math.inf, -1e4, -3.0, 0.0, 3.0, 1e4, math.inf]),
    slab=st.sampled_from([1e-3, 20.0, 300.0]),
    spike=st.sampled_from([20.0, 300.0, 1e6]),
)
def test_responsibility_is_a_probability_at_extremes(
    dtype: torch.dtype, w: float, logit: float, slab: float, spike: float
) -> None:
    weight, gate = torch.tensor(w, dtype=dtype), torch.tensor(logit, dtype=dtype)
    r = float(spike_and_slab.responsibility(weight, gate, slab, spike))
    assert 0 <= r <= 1
    if math.isinf(logit):
        assert r == (logit > 0)
    assert bool(torch.stack(spike_and_slab.precision_parts(weight, gate, slab, spike)).isfinite().all())


@given(w=st.floats(-10, 10), logit=st.floats(-80, 80), ratio=st.floats(1.5, 1e4))
def test_log_density_is_finite_in_float32(w: float, logit: float, ratio: float) -> None:
    weight = torch.tensor(w, dtype=torch.float32, requires_grad=True)
    gate = torch.tensor(logit, dtype=torch.float32, requires_grad=True)
    value = spike_and_slab.log_prob(weight, gate, 20.0, 20.0 * ratio)
    gradients = torch.autograd.grad(value, (weight, gate))
    assert all(bool(x.isfinite()) for x in (value, *gradients))


@given(w=st.floats(-10, 10), pull=st.floats(0, 1e6))
def test_proximal_step_minimises_its_objective_and_keeps_the_sign(w: float, pull: float) -> None:
    start = torch.tensor(w, dtype=torch.float64)
    end = spike_and_slab.proximal_spike(start, pull)
    # First-order condition of min_v |v - w|^2 / 2 + pull v^2 / 2.
    assert float(end - start + pull * end) == pytest.approx(0, abs=1e-9)
    assert float(end * start) >= 0 and float(end.abs()) <= abs(w)


def test_proximal_pull_matches_the_same_pull_inside_momentum() -> None:
    lr, momentum, stiffness, steps = 1e-4, 0.9, 1.0, 3000
    inside, velocity = 1.0, 0.0
    outside = {scale: torch.tensor(1.0, dtype=torch.float64) for scale in (1.0, 1 / (1 - momentum))}
    for _ in range(steps):
        velocity = momentum * velocity - stiffness * inside
        inside = inside + lr * velocity
        outside = {scale: spike_and_slab.proximal_spike(w, lr * stiffness * scale) for scale, w in outside.items()}
    rates = {scale: math.log(float(w)) for scale, w in outside.items()}
    assert rates[1 / (1 - momentum)] == pytest.approx(math.log(inside), rel=0.02)
    assert rates[1.0] == pytest.approx(math.log(inside) / 10, rel=0.02)


def climb(steps: int, bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Joint ascent of weights and lambda before a scale-invariant likelihood: (log joint, log lambda) at the end."""
    wanted = torch.nn.functional.normalize(normal(64, seed=2), dim=0)
    w, log_slab = normal(64) / 20, torch.tensor(math.log(20.0), dtype=torch.float64)
    gate = torch.tensor(math.inf, dtype=torch.float64)  # all slab: the spike has no say

    def log_joint(weights: Tensor, slab: Tensor) -> Tensor:
        likelihood = 10 * (torch.nn.functional.normalize(weights, dim=0) @ wanted)
        return likelihood + other_priors.gaussian_log_prob(weights, 1 / slab).sum()

    for _ in range(steps):
        w.requires_grad_()
        (gradient,) = torch.autograd.grad(log_joint(w, log_slab.exp()), w)
        # Preconditioned by the prior's precision: a fixed step would turn unstable as lambda grows.
        w = (w + 0.1 * gradient / log_slab.exp() ** 2).detach()
        log_slab = log_slab + 0.1 * spike_and_slab.log_slab_score(w, gate, log_slab.exp(), 1.0).mean()
        if bounds is not None:
            log_slab = spike_and_slab.clamp_slab(log_slab, bounds)
    return float(log_joint(w, log_slab.exp())), float(log_slab)


def test_collapse_of_weights_and_slab_needs_bounds() -> None:
    (early, slab_early), (late, slab_late) = climb(300, None), climb(600, None)
    assert late > early + 64 and slab_late > slab_early + 1, "unbounded: the density keeps rising"
    (early, slab_early), (late, slab_late) = climb(300, (1.0, 200.0)), climb(600, (1.0, 200.0))
    assert slab_late == pytest.approx(math.log(200)) == slab_early
    # The supremum is at w -> 0 with the direction fitted: 64 log N(0; 0, 200^-2) and the likelihood's best value, 10.
    supremum = 10 + 64 * (math.log(200) - 0.5 * math.log(2 * math.pi))
    assert supremum - 1 < early <= supremum and supremum - 1 < late <= supremum


@pytest.mark.parametrize("weights, nats", [(850_000, 4.6), (9_220_000, 50)])
def test_everything_in_the_spike_gains_what_the_formula_says(weights: int, nats: float) -> None:
    beta, num_data, slab, spike = 0.1, 50_000, 20.0, 300.0
    zeros = torch.zeros(1000, dtype=torch.float64)
    closed, opened = torch.full_like(zeros, -60), torch.full_like(zeros, 60)
    mean_gain = (
        spike_and_slab.log_prob(zeros, closed, slab, spike) - spike_and_slab.log_prob(zeros, opened, slab, spike)
    ).mean()
    gain = beta * weights * float(mean_gain) / num_data
    assert gain == pytest.approx(beta * weights * math.log(spike / slab) / num_data, rel=1e-12)
    assert gain == pytest.approx(nats, rel=0.01)
    assert gain > math.log(10), "more than the cross-entropy of guessing among ten classes: the collapse pays"


def test_polarization_prefers_two_groups() -> None:
    split, even = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.full((4,), 0.5)
    # Worked by hand: |g|_1 = 2 for both; distances to the mean add up to 2 and 0.
    assert float(other_priors.polarization_energy(split, 1.2, 0.5)) == pytest.approx((1.2 * 2 - 2) / 0.5)
    assert float(other_priors.polarization_energy(even, 1.2, 0.5)) == pytest.approx(1.2 * 2 / 0.5)


def test_hoyer_counts_the_weights_that_matter() -> None:
    w = torch.tensor([0.0, 3.0, 0.0, -3.0])
    assert float(other_priors.hoyer_energy(w, 1.0)) == pytest.approx(2)
    assert float(other_priors.hoyer_energy(100 * w, 1.0)) == pytest.approx(2)
    assert float(other_priors.hoyer_score(normal(9), 1.0) @ normal(9)) == pytest.approx(0, abs=1e-12)
    zeros = torch.zeros(4)
    assert float(other_priors.hoyer_energy(zeros, 1.0)) == 0 and torch.equal(
        other_priors.hoyer_score(zeros, 1.0), zeros
    )
