"""Relaxed gates against quadrature and their Bernoulli limit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import expit

from dllp.method import gates

DRAWS = 200_000


def noise(seed: int = 0) -> torch.Tensor:
    return torch.rand(DRAWS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tau", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("logit", [-2.0, 0.0, 3.0])
def test_mean_and_spread_agree_with_quadrature(logit: float, tau: float) -> None:
    z = gates.sample(torch.tensor(logit, dtype=torch.float64), tau, noise())

    def moment(order: int) -> float:
        def integrand(x: float) -> float:
            return float(expit((logit + x) / tau) ** order * expit(x) * expit(-x))

        return quad(integrand, -40, 40, points=[-logit], limit=500)[0]

    mean, std = moment(1), math.sqrt(moment(2) - moment(1) ** 2)
    error = 4 / math.sqrt(DRAWS)
    assert float(z.mean()) == pytest.approx(mean, abs=error * std)
    assert float(z.std()) == pytest.approx(std, abs=error)
    if tau == 1.0 and logit == 0.0:
        # sigmoid of a standard logistic is uniform: mean 1/2, variance 1/12.
        assert (mean, std**2) == pytest.approx((1 / 2, 1 / 12))


@pytest.mark.parametrize("logit", [-2.0, 0.0, 3.0])
def test_cold_gates_are_bernoulli(logit: float) -> None:
    theta = float(expit(logit))
    z = gates.sample(torch.tensor(logit, dtype=torch.float64), 1e-6, noise(1))
    spread = math.sqrt(theta * (1 - theta))
    assert float(((z < 1e-3) | (z > 1 - 1e-3)).double().mean()) > 0.9999
    assert float(z.mean()) == pytest.approx(theta, abs=4 * spread / math.sqrt(DRAWS))
    assert float(z.var()) == pytest.approx(theta * (1 - theta), abs=4 / math.sqrt(DRAWS))


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_more_than_half_open_has_the_gates_probability_at_every_temperature(tau: float) -> None:
    logit = torch.tensor(1.0, dtype=torch.float64)
    share = (gates.sample(logit, tau, noise(2)) > 0.5).double().mean()
    assert float(share) == pytest.approx(float(logit.sigmoid()), abs=2 / math.sqrt(DRAWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uniform", [0.0, 1e-45, 0.5, 1.0])
@pytest.mark.parametrize("logit", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("tau", [1.0, 0.1, 1e-3])
def test_value_and_gradient_are_finite_everywhere(tau: float, logit: float, uniform: float, dtype: torch.dtype) -> None:
    value = torch.tensor(logit, dtype=dtype, requires_grad=True)
    z = gates.sample(value, tau, torch.tensor(uniform, dtype=dtype))
    (gradient,) = torch.autograd.grad(z, value)
    assert 0 <= float(z.detach()) <= 1
    assert bool(gradient.isfinite()) and float(gradient) >= 0


@given(st.floats(-5, 5), st.floats(0.1, 2), st.floats(0.01, 0.99))
def test_gradient_is_the_sigmoids(logit: float, tau: float, uniform: float) -> None:
    value = torch.tensor(logit, dtype=torch.float64, requires_grad=True)
    z = gates.sample(value, tau, torch.tensor(uniform, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(z, value)
    assert float(gradient) == pytest.approx(float(z.detach() * (1 - z.detach())) / tau, rel=1e-9, abs=1e-300)


def test_uniform_noise_becomes_standard_logistic() -> None:
    draws = gates.to_logistic(noise(3))
    torch.testing.assert_close(draws, torch.logit(noise(3)))
    assert float(draws.mean()) == pytest.approx(0, abs=0.02)
    assert float(draws.var()) == pytest.approx(math.pi**2 / 3, rel=0.02)


@pytest.mark.parametrize("tau", [0.1, 0.7, 2.0])
def test_half_of_all_samples_lie_above_the_median(tau: float) -> None:
    logit = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
    middle = gates.median(logit, tau)
    assert torch.equal(middle, gates.relax(logit, tau, torch.zeros(3, dtype=torch.float64)))
    above = gates.sample(logit, tau, noise(5)[:, None].expand(-1, 3)) > middle
    torch.testing.assert_close(above.double().mean(0), torch.full_like(logit, 0.5), atol=0.01, rtol=0)


def test_temperature_may_be_a_tensor() -> None:
    uniform, logit = noise()[:9], torch.zeros(9, dtype=torch.float64)
    tau = torch.tensor(0.3, dtype=torch.float64)
    assert torch.equal(gates.sample(logit, tau, uniform), gates.sample(logit, 0.3, uniform))


def test_discretise_opens_gates_above_one_half() -> None:
    assert gates.discretise(torch.tensor([-1.0, 0.0, 1e-6, 4.0])).tolist() == [False, False, True, True]
