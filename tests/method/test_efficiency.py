"""Estimation efficiency: closed forms, a Monte Carlo check of each, and the estimates from predictions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllp.errors import ConfigError, DataError
from dllp.method import efficiency as eff
from tests.support.oracles import normal

S2, A2, B2 = 0.5, 0.3, 0.2
DRAWS = 1_000_000
variance = st.floats(1e-6, 1e3)


@pytest.mark.parametrize("a2, b2", [(0.0, 0.0), (A2, 0.0), (0.0, B2), (A2, B2)])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_variance_and_efficiency_by_monte_carlo(n: int, a2: float, b2: float) -> None:
    model = a2**0.5 * normal(n, DRAWS, seed=1).mean(0)
    draws = 1.7 + model + b2**0.5 * normal(DRAWS, seed=2) + S2**0.5 * normal(DRAWS, seed=3)
    observed = float(draws.var())
    assert observed == pytest.approx(eff.estimator_variance(S2, a2, b2, n), rel=0.01)
    assert S2 / observed == pytest.approx(eff.efficiency(S2, a2, b2, n), rel=0.01)


def test_map_estimate_by_monte_carlo_and_by_its_objective() -> None:
    prior_mean = 1.7
    f = prior_mean + A2**0.5 * normal(DRAWS, seed=1)
    y = f + S2**0.5 * normal(DRAWS, seed=2)
    estimate = eff.map_estimate(y, prior_mean, A2, S2)
    assert isinstance(estimate, torch.Tensor)
    assert float(estimate.var()) == pytest.approx(eff.map_estimator_variance(S2, A2), rel=0.01)
    assert float(estimate.mean()) == pytest.approx(prior_mean, rel=0.01)
    stationary = (y - estimate) / S2 - (estimate - prior_mean) / A2
    torch.testing.assert_close(stationary, torch.zeros_like(y), rtol=0, atol=1e-12)
    assert eff.map_estimator_variance(S2, A2) < eff.cramer_rao_bound(S2)


def test_bound_is_the_inverse_fisher_information() -> None:
    f = torch.tensor(0.4, dtype=torch.float64)
    y = f + S2**0.5 * normal(DRAWS)
    score = (y - f) / S2
    assert 1 / float(score.square().mean()) == pytest.approx(eff.cramer_rao_bound(S2), rel=0.01)


def test_the_four_cases_on_worked_values() -> None:
    assert eff.four_cases(0.5, 0.5, 1.0) == pytest.approx(
        {"noiseless": 1.0, "model_noise": 1 / 2, "data_noise": 1 / 3, "model_and_data_noise": 1 / 4}
    )
    assert eff.four_cases(0.5, 0.5, 1.0, n=2)["model_noise"] == pytest.approx(2 / 3)


@given(variance, variance, variance, st.integers(1, 100))
def test_more_noise_is_never_more_efficient(s2: float, a2: float, b2: float, n: int) -> None:
    cases = eff.four_cases(s2, a2, b2, n)
    assert cases["noiseless"] == 1
    assert 0 < cases["model_and_data_noise"] <= min(cases["model_noise"], cases["data_noise"]) <= 1
    assert eff.efficiency(s2, a2, b2, n + 1) >= eff.efficiency(s2, a2, b2, n)


def test_without_noise_of_the_observation() -> None:
    """Nothing is fully efficient beside a noise that the bound does not know; where there is none at all, it is met."""
    some = {"noiseless": 1, "model_noise": 0, "data_noise": 1, "model_and_data_noise": 0}
    assert eff.four_cases(0, 1, 0) == eff.four_cases(0.0, 1.0, 0.0, n=7) == some
    assert set(eff.four_cases(0, 0, 0).values()) == {1}
    zero, one = torch.zeros(2), torch.tensor([0.0, 1.0])
    assert {name: float(e[1]) for name, e in eff.four_cases(zero, one, zero).items()} == some  # pyright: ignore
    assert eff.four_cases(zero, one, zero)["model_noise"].tolist() == [1, 0]  # pyright: ignore
    for s2 in (1e-3, 1e-300):
        assert eff.efficiency(s2, 0.0, 0.0) == 1, "so that 1 is its limit"
    assert eff.map_estimator_variance(0.0, 0.0) == 0 == eff.map_estimator_variance(1.0, 0.0)
    assert eff.map_estimator_variance(zero, one).tolist() == [0, 1]  # pyright: ignore


def test_formulas_take_tensors() -> None:
    s2 = torch.tensor([0.5, 1.0])
    torch.testing.assert_close(eff.efficiency(s2, 0.5, 0.0), torch.tensor([1 / 2, 2 / 3]))
    torch.testing.assert_close(eff.data_noise(s2, 0.75), torch.tensor([0.0, 0.25]))


def test_components_recover_the_observation_model() -> None:
    # Members are the label's one-hot vector, moved by noise that all share (s2) and noise of their own (a2).
    n, examples, classes = 3, 100_000, 4
    labels = torch.arange(examples) % classes
    truth = torch.nn.functional.one_hot(labels, classes).double()
    shared = truth + S2**0.5 * normal(examples, classes, seed=1)
    members = shared + A2**0.5 * normal(n, examples, classes, seed=2)
    found = eff.estimate_components(members, labels)
    assert float(found.s2) == pytest.approx(S2, rel=0.01)
    assert float(found.a2) == pytest.approx(A2, rel=0.01)
    assert float(found.residual) == pytest.approx(eff.estimator_variance(S2, A2, 0.0, n), rel=0.01)


def test_components_on_worked_values_and_as_a_split_of_the_members_brier_score() -> None:
    members = torch.tensor([[[0.8, 0.2]], [[0.6, 0.4]]], dtype=torch.float64)
    labels = torch.tensor([0])
    found = eff.estimate_components(members, labels)
    # Mean (0.7, 0.3): Brier/C = (0.09 + 0.09) / 2; variance 0.1^2 * 2 / (2 - 1) for each class.
    assert float(found.residual) == pytest.approx(0.09)
    assert float(found.a2) == pytest.approx(0.02)
    assert float(found.s2) == pytest.approx(0.08)
    own = torch.tensor([0.2**2, 0.4**2]).mean()
    assert float(found.s2 + found.a2) == pytest.approx(float(own))


def test_components_do_not_go_negative() -> None:
    members = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    certain = eff.estimate_components(torch.cat([members, 1 - members], 1), torch.tensor([0, 1]))
    assert float(certain.s2) >= 0
    perfect = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    found = eff.estimate_components(perfect, torch.tensor([0]))
    assert (float(found.s2), float(found.a2), float(found.residual)) == (0, 0, 0)
    around = torch.tensor([[[1.0]], [[3.0]]])  # members that miss by one each, on either side
    found = eff.estimate_components(around, torch.tensor([[2.0]]))
    assert (float(found.s2), float(found.a2), float(found.residual)) == (0, 2, 0), "not 0 - 2 / 2"


def test_residual_is_the_maximum_likelihood_noise_of_equation_9() -> None:
    members = torch.softmax(normal(2, 50, 3), dim=-1)
    labels = torch.arange(50) % 3
    residual = float(eff.estimate_components(members, labels).residual)
    square = (torch.nn.functional.one_hot(labels, 3) - members.mean(0)).square().sum(-1)

    def log_likelihood(d: float) -> float:
        return float((3 * torch.tensor(d).log() - 0.5 * d**2 * square).mean())

    best = residual**-0.5
    assert log_likelihood(best) > max(log_likelihood(0.99 * best), log_likelihood(1.01 * best))


def test_components_of_a_regression() -> None:
    members = torch.tensor([[[1.0], [2.0]], [[3.0], [2.0]]], dtype=torch.float64)
    found = eff.estimate_components(members, torch.tensor([[0.0], [2.0]], dtype=torch.float64))
    # Means 2 and 2 against 0 and 2: residual (4 + 0)/2; variances 2 and 0 with n - 1.
    assert (float(found.residual), float(found.a2), float(found.s2)) == (2.0, 1.0, 1.5)
    with pytest.raises(DataError, match="regression"):
        eff.estimate_components(members, torch.zeros(2, 2))


@pytest.mark.parametrize(("a2", "below"), [(1.6, True), (1.64, False)])
def test_the_map_estimators_variance_meets_the_bound_at_the_golden_ratio(a2: float, below: bool) -> None:
    assert (eff.map_estimator_variance(1.0, a2) < eff.cramer_rao_bound(1.0)) == below


def test_data_noise_is_the_surplus_over_clean_data() -> None:
    assert eff.data_noise(0.5, 0.2) == pytest.approx(0.3)
    assert eff.data_noise(0.1, 0.2) == 0


def test_bad_arguments_are_refused() -> None:
    probabilities = torch.full((2, 5, 3), 1 / 3)
    with pytest.raises(ConfigError, match="particles >= 2"):
        eff.estimate_components(probabilities[:1], torch.zeros(5, dtype=torch.long))
    with pytest.raises(DataError, match="examples"):
        eff.estimate_components(probabilities, torch.zeros(4, dtype=torch.long))
    short = torch.tensor([0, 1, 2, 0, 1], dtype=torch.uint8)
    assert eff.estimate_components(probabilities, short) == eff.estimate_components(probabilities, short.long())
