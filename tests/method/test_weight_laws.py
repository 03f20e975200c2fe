"""Shapes of weights against figures known in closed form, and fits against the laws that made the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from dllp.method import weight_laws

RANDOM = np.random.default_rng(0)
GAUSSIAN = RANDOM.normal(size=200_000)
LAPLACE = RANDOM.laplace(size=200_000)
CUT = GAUSSIAN[np.abs(GAUSSIAN) > np.quantile(np.abs(GAUSSIAN), 0.8)]
TWO_MODES = np.where(RANDOM.random(20_000) < 0.5, -3, 3) + RANDOM.normal(size=20_000)


def shape(weights: np.ndarray, reference: np.ndarray | None = None) -> weight_laws.Shape:
    found = weight_laws.describe(weights, reference)
    assert found is not None
    return found


def test_a_gaussian_is_lossless() -> None:
    found = shape(0.02 * GAUSSIAN, 7 * GAUSSIAN[:50_000])
    assert found.count == 200_000 and found.std == pytest.approx(0.02, rel=0.01)
    assert found.near_zero == pytest.approx(1, abs=0.02)
    assert found.kurtosis == pytest.approx(0, abs=0.04)
    assert found.ks < 0.005 and found.wasserstein is not None and found.wasserstein < 0.02
    assert found.dip_p > 0.05


def test_a_cut_gaussian_has_no_middle_and_two_modes() -> None:
    found = shape(CUT, GAUSSIAN)
    assert found.near_zero == 0 and found.dip_p == 0
    # two halves at +-m: kurtosis is near -2, and Phi leaves its quarters: KS is at least P(N < 0) - P(N < -cut) > 0.2
    assert found.kurtosis < -1.5 and found.ks > 0.2
    assert found.wasserstein is not None and found.wasserstein > 0.3
    # the law that the paper names (8) is far from such a tail, the generalised one near (Section 9)
    assert found.fits["pareto"].ks == pytest.approx(0.085, abs=0.005)
    assert found.fits["generalised_pareto"].ks == pytest.approx(0.009, abs=0.003)
    assert found.fits["generalised_pareto"].log_likelihood > found.fits["pareto"].log_likelihood


def test_laplace_is_peaked_by_what_its_density_says() -> None:
    found = shape(LAPLACE)
    inside = 1 - math.exp(-0.1 * math.sqrt(2))  # P(|w| < 0.1 s) with s = sqrt(2) b
    assert found.near_zero == pytest.approx(inside / 0.0797, abs=0.03)
    assert found.kurtosis == pytest.approx(3, abs=0.2)


def test_two_modes_are_found_and_their_absence_too() -> None:
    assert weight_laws.dip(TWO_MODES)[1] == 0
    statistic, p_value = weight_laws.dip(np.arange(1000) / 999)
    # evenly spaced points: the dip of a perfect uniform sample is 1 / 2n, the least there is
    assert statistic == pytest.approx(1 / 2000, rel=1e-6) and p_value == 1


def test_wasserstein_of_known_laws() -> None:
    # standardised two points at +-1 against N(0, 1): the mean of | |z| - 1 |, by quadrature
    points = np.tile([-1.0, 1.0], 5000)
    z = np.linspace(-8, 8, 400_001)
    expected = scipy.integrate.trapezoid(np.abs(np.abs(z) - 1) * scipy.stats.norm.pdf(z), z)
    assert weight_laws.wasserstein(points, GAUSSIAN) == pytest.approx(expected, abs=0.01)
    assert weight_laws.wasserstein(3 * GAUSSIAN, GAUSSIAN) == pytest.approx(0, abs=1e-12), "scale is no shape"


@pytest.mark.parametrize(
    "weights, alpha, power",
    [
        (GAUSSIAN, 0.5, 2.0),  # half-normal
        (LAPLACE, 1.0, 1.0),  # exponential
        (np.sqrt((RANDOM.normal(size=(50_000, 4)) ** 2).sum(1)), 2.0, 2.0),  # chi of four degrees: alpha = n / 2
    ],
)
def test_amoroso_finds_the_law_of_the_magnitudes(weights: np.ndarray, alpha: float, power: float) -> None:
    magnitudes = np.abs(weights)
    free, fixed = weight_laws.amoroso(magnitudes), weight_laws.amoroso(magnitudes, power=power)
    assert free.parameters["alpha"] == pytest.approx(alpha, rel=0.1)
    assert free.parameters["power"] == pytest.approx(power, rel=0.06)
    assert fixed.parameters["alpha"] == pytest.approx(alpha, rel=0.02)
    assert free.ks < 0.006 and free.log_likelihood >= fixed.log_likelihood - 1e-9
    law = scipy.stats.gengamma(fixed.parameters["alpha"], power, scale=fixed.parameters["scale"])
    assert fixed.log_likelihood == pytest.approx(float(law.logpdf(magnitudes).mean()), abs=1e-9)
    if power == 2:
        assert fixed.parameters["sigma"] == pytest.approx(1, rel=0.02), "scale = sqrt(2) sigma, equation 7"


@pytest.mark.parametrize("power", [0.1, 8.0])
def test_amoroso_finds_powers_far_from_two(power: float) -> None:
    """Weibull magnitudes have alpha = 1; powers are looked for from 0.05 to 20."""
    magnitudes = np.random.default_rng(0).weibull(power, size=20_000)
    found = weight_laws.amoroso(magnitudes)
    assert found.parameters["power"] == pytest.approx(power, rel=0.15)
    assert found.parameters["alpha"] == pytest.approx(1, rel=0.25)
    true = float(scipy.stats.weibull_min(power).logpdf(magnitudes).mean())
    assert found.log_likelihood >= true - 1e-9, "a maximum is not below the true law"


@pytest.mark.parametrize("spread", [1e-7, 1e-10, 1e-14])
def test_nearly_equal_magnitudes_have_a_law_too(spread: float) -> None:
    """What Jensen's inequality leaves of them is below rounding, and may come out as 0 or negative."""
    for seed in range(5):
        x = 1 + spread * np.random.default_rng(seed).random(2000)
        for fit in (weight_laws.amoroso(x), weight_laws.amoroso(x, power=2.0)):
            assert all(math.isfinite(value) for value in (*fit.parameters.values(), fit.log_likelihood, fit.ks))


def test_pareto_is_its_closed_form() -> None:
    x = np.array([1.0, 2.0, 4.0, 8.0])
    found = weight_laws.pareto(x)
    assert found.parameters["k"] == pytest.approx(4 / (math.log(2) * (1 + 2 + 3)))
    law = scipy.stats.pareto(found.parameters["k"], scale=1.0)
    assert found.log_likelihood == pytest.approx(float(law.logpdf(x).mean()))


def test_one_h_predicts_the_index_of_every_layer() -> None:
    sigmas = np.array([0.4, 0.1, 0.02])
    h, predicted = weight_laws.pareto_relation(0.3 / sigmas, sigmas)
    assert h == pytest.approx(0.3) and predicted == pytest.approx(0.3 / sigmas), "where the relation holds"
    random = np.random.default_rng(0)
    cut = [w[w > 0.05] for w in (np.abs(sigma * random.normal(size=200_000)) for sigma in sigmas)]
    fitted = np.array([weight_laws.pareto(w).parameters["k"] for w in cut])
    # E log(|z| / t) beyond t is the integral of P(|z| > u) / u over it: k depends on the threshold over sigma
    exact = []
    for t in 0.05 / sigmas:
        u = np.linspace(t, t + 12, 200_001)
        exact.append(float(scipy.stats.norm.sf(t) / scipy.integrate.trapezoid(scipy.stats.norm.sf(u) / u, u)))
    assert fitted == pytest.approx(exact, rel=0.02)
    h, predicted = weight_laws.pareto_relation(fitted, sigmas)
    assert np.log(predicted / fitted).mean() == pytest.approx(0, abs=1e-12)
    assert predicted[0] < 0.95 * fitted[0], "a Gaussian's tails do not follow 1 / sigma"


@given(xi=st.floats(-0.45, 8.0), sigma=st.floats(1e-7, 1e7), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_generalised_pareto_finds_its_law_and_beats_the_truth(xi: float, sigma: float, seed: int) -> None:
    true = scipy.stats.genpareto(xi, loc=sigma / 2, scale=sigma)
    x = np.asarray(true.rvs(4000, random_state=seed))
    found = weight_laws.generalised_pareto(x)
    assert found.parameters["shape"] == pytest.approx(xi, abs=0.06 * (2 + max(xi, 0)))
    assert found.log_likelihood >= float(true.logpdf(x).mean()) - 1e-3, "a maximum is not below the true law"
    law = scipy.stats.genpareto(found.parameters["shape"], loc=x.min(), scale=found.parameters["scale"])
    assert found.log_likelihood == pytest.approx(float(law.logpdf(x).mean()), rel=1e-6, abs=1e-6)


@given(small=st.floats(1e-15, 1.0), share=st.floats(0.0, 0.9), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_generalised_pareto_is_never_below_the_pareto_law_that_it_contains(
    small: float, share: float, seed: int
) -> None:
    """Also of a spike that is many orders of magnitude narrower than the slab."""
    random = np.random.default_rng(seed)
    x = np.abs(random.normal(size=2000)) * np.where(random.random(2000) < share, small, 1.0)
    contained = weight_laws.pareto(x).log_likelihood
    assert weight_laws.generalised_pareto(x).log_likelihood >= contained - 1e-6 * abs(contained)


@given(bend=st.floats(0.05, 0.9), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_generalised_pareto_stops_at_the_uniform_law(bend: float, seed: int) -> None:
    """Below shape -1 the density grows without bound towards its end, and the likelihood has no maximum."""
    x = 1 + np.random.default_rng(seed).random(1000) ** bend  # more of them, the nearer to the end
    found = weight_laws.generalised_pareto(x)
    assert -1 - 1e-6 <= found.parameters["shape"] < -0.5
    end = found.parameters["threshold"] - found.parameters["scale"] / found.parameters["shape"]
    assert end >= x.max() and math.isfinite(found.log_likelihood)


def test_standardised_weights_keep_their_zero() -> None:
    w = np.concatenate([np.zeros(10), 3 + 0.1 * GAUSSIAN[:100]])
    np.testing.assert_allclose(weight_laws.standardised(w) * w.std(), w)
    assert weight_laws.standardised(w).std() == pytest.approx(1)


def test_pooling_standardises_each_layer() -> None:
    layers = [GAUSSIAN[:50_000] * 0.001, GAUSSIAN[50_000:100_000] * 5]
    assert shape(np.concatenate(layers)).kurtosis > 2, "a mixture of scales looks peaked"
    assert shape(weight_laws.pooled(layers)).kurtosis == pytest.approx(0, abs=0.06)
    assert weight_laws.pooled([]).shape == (0,)


def test_density_integrates_to_what_lies_inside() -> None:
    values = weight_laws.density(GAUSSIAN, limit=1.0, bins=51)
    assert len(values) == 51
    assert sum(values) * 2 / 51 == pytest.approx(0.6827, abs=0.005)
    assert values[25] == pytest.approx(1 / math.sqrt(2 * math.pi), rel=0.05), "the middle bin holds zero"


def test_what_cannot_be_described_is_none() -> None:
    assert weight_laws.describe(np.zeros(100)) is None
    assert weight_laws.describe(np.full(576, 0.1)) is None, "whose standard deviation is rounding"
    assert np.array_equal(weight_laws.standardised(np.full(576, 0.1)), np.full(576, 0.1))
    assert weight_laws.describe(np.eye(1, 300_000, 1).ravel()) is None, "of those that are drawn none differs"
    assert weight_laws.describe(GAUSSIAN[:29]) is None


def test_samples_are_the_same_each_time() -> None:
    first, again = weight_laws.thinned(GAUSSIAN, 1000), weight_laws.thinned(GAUSSIAN, 1000)
    assert np.array_equal(first, again) and np.isin(first, GAUSSIAN).all()
    assert weight_laws.thinned(GAUSSIAN, 10**6) is not None and len(weight_laws.thinned(GAUSSIAN[:5], 10)) == 5


def test_near_zero_is_measured_at_zero_whatever_the_mean() -> None:
    """A Gaussian around m has little mass at zero: centred weights would hide a slab that has moved away."""
    for mean in (0.0, 1.0, -2.0):
        inside = scipy.stats.norm.cdf(0.1, mean) - scipy.stats.norm.cdf(-0.1, mean)
        weights = scipy.stats.norm.ppf((np.arange(200_000) + 0.5) / 200_000, mean)
        assert weight_laws.near_zero_ratio(weights) == pytest.approx(inside / 0.0797, rel=2e-3, abs=1e-3)
