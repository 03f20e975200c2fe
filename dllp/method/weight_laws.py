"""The distribution of weights, and what pruning leaves of it: Section 9, equations 7 and 8.

Pure functions of one-dimensional arrays. "Lossless" in numbers: a kept part that still looks like the Gaussian it came
from has a near-zero ratio of 1, no excess kurtosis, one mode, and a small distance to its Gaussian. Hard pruning by
magnitude has a ratio of 0 and two modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy  # which imports its parts where they are used: most commands never come here
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
WIDTH = 0.1
"""Half width of the bin around zero, in standard deviations."""
FEWEST = 30
"""Fewer weights than this are not described: every statistic would be noise."""
SAMPLE, DIP_SAMPLE = 100_000, 5_000
"""Weights that distances and fits look at, and the dip test, whose power grows with their number."""
HEAVIEST = 1e8
"""Largest shape / scale, in median excesses, at which a heavy tail is looked for: 2^shape - 1, a shape of 26."""
KS_POINTS = 10_000
"""Order statistics at which distribution functions are compared: between two of them lie 1e-4 of the weights."""


@dataclass(frozen=True)
class Fit:
    """A law fitted to magnitudes by maximum likelihood.

    Attributes:
        parameters: As :func:`amoroso`, :func:`pareto` and :func:`generalised_pareto` name them.
        log_likelihood: Mean over the weights, in nats: fits to the same weights can be compared.
        ks: Kolmogorov-Smirnov distance of the weights to the fitted law.
    """

    parameters: dict[str, float]
    log_likelihood: float
    ks: float


@dataclass(frozen=True)
class Shape:
    """Statistics of a set of weights, of :func:`describe`.

    Attributes:
        count, std: Of all weights.
        near_zero: Of :func:`near_zero_ratio`.
        kurtosis: Excess over the Gaussian's.
        ks: Distance to the Gaussian with the same mean and standard deviation.
        dip, dip_p: Of :func:`dip`.
        wasserstein: Distance to the reference's weights, both standardised; None without a reference.
        fits: `amoroso`, `amoroso_2` (power 2, equation 7), `pareto` (8) and `generalised_pareto` of the magnitudes.
    """

    count: int
    std: float
    near_zero: float
    kurtosis: float
    ks: float
    dip: float
    dip_p: float
    wasserstein: float | None
    fits: dict[str, Fit] = field(default_factory=dict)


def describe(weights: ArrayLike, reference: ArrayLike | None = None, *, fits: bool = True) -> Shape | None:
    """(m,) -> every statistic of a set of weights; None for fewer than 30, or for weights that are all the same.

    Distances and fits are taken on 100,000 of them, the dip on 5,000, drawn with a fixed seed.
    """
    w = _flat(weights)
    some = thinned(w, SAMPLE)
    if not _varied(some):
        return None
    statistic, p_value = dip(w)
    laws: dict[str, Callable[[Array], Fit]] = {
        "amoroso": amoroso,
        "amoroso_2": lambda x: amoroso(x, power=2.0),
        "pareto": pareto,
        "generalised_pareto": generalised_pareto,
    }
    magnitudes = np.abs(some)[some != 0]
    return Shape(
        count=len(w),
        std=float(w.std()),
        near_zero=near_zero_ratio(w),
        kurtosis=float(scipy.stats.kurtosis(w)),
        ks=gaussian_distance(some),
        dip=statistic,
        dip_p=p_value,
        wasserstein=None if reference is None or not _varied(_flat(reference)) else wasserstein(some, reference),
        fits={name: law(magnitudes) for name, law in laws.items()} if fits and np.ptp(magnitudes) > 0 else {},
    )


# ---- how far from a Gaussian


def near_zero_ratio(weights: ArrayLike) -> float:
    """(m,) -> P(|w| < 0.1 s) over what a Gaussian of the same s has there: 1 for a Gaussian, 0 for a cut tail."""
    w = _flat(weights)
    return float((np.abs(w) < WIDTH * w.std()).mean() / math.erf(WIDTH / math.sqrt(2)))


def gaussian_distance(weights: ArrayLike) -> float:
    """(m,) -> Kolmogorov-Smirnov distance to the Gaussian with the weights' own mean and standard deviation."""
    w = _flat(weights)
    return _ks(w, lambda x: scipy.special.ndtr((x - w.mean()) / w.std()))


def dip(weights: ArrayLike) -> tuple[float, float]:
    """(m,) -> Hartigan's dip, the distance to the nearest law with one mode, and the p-value of having one."""
    from diptest import diptest

    found: Any = diptest(thinned(weights, DIP_SAMPLE))
    return float(found[0]), float(found[1])


def wasserstein(weights: ArrayLike, reference: ArrayLike) -> float:
    """(m,), (k,) -> Wasserstein distance of both, each standardised: what pruning did to the shape, not the scale."""
    first, second = (standardised(thinned(w, SAMPLE)) for w in (weights, reference))
    return float(scipy.stats.wasserstein_distance(first, second))


# ---- laws of the magnitudes


def amoroso(magnitudes: ArrayLike, power: float | None = None) -> Fit:
    """(m,) positive -> Amoroso(0, scale, alpha, power) by maximum likelihood, scipy's gengamma(alpha, power).

    Equation 7 has power 2 and scale sqrt(2) sigma: alpha = 1/2 is the half-normal law, n/2 the scaled chi of n degrees.
    Magnitudes of Laplace weights have alpha = power = 1. Without `power` it is fitted, too, between 0.05 and 20: beyond
    0.05 the law only comes nearer to a lognormal one.
    """
    x = _flat(magnitudes)
    if power is None:
        power = math.exp(_minimum(lambda t: -_gamma_fit(x, math.exp(t))[2], math.log(0.05), math.log(20.0)))
    alpha, scale, log_likelihood = _gamma_fit(x, power)
    named = {"alpha": alpha, "power": power, "scale": scale, "sigma": scale / math.sqrt(2)}
    return Fit(named, log_likelihood, _ks(x, lambda v: scipy.special.gammainc(alpha, (v / scale) ** power)))


def pareto(magnitudes: ArrayLike) -> Fit:
    """(m,) positive -> the Pareto law k D^k / x^(k + 1) of equation 8 beyond D, the least: k = m / sum log(x / D)."""
    x = _flat(magnitudes)
    threshold = float(x.min())
    k = 1 / float((np.log(x) - math.log(threshold)).mean())
    log_likelihood = math.log(k) - math.log(threshold) - (k + 1) / k
    return Fit({"k": k, "threshold": threshold}, log_likelihood, _ks(x, lambda v: 1 - (threshold / v) ** k))


def pareto_relation(indices: ArrayLike, sigmas: ArrayLike) -> tuple[float, Array]:
    """(L,), (L,) -> h of equation 8's k = h / sigma, one for all layers, and the (L,) indices k that it predicts.

    The paper leaves h open. Here it fits log k of all layers by least squares: the level is right by construction, and
    what is put to the test is that k goes with 1 / sigma, the deviation before pruning.
    """
    k, sigma = _flat(indices), _flat(sigmas)
    h = math.exp(float(np.log(k * sigma).mean()))
    return h, h / sigma


def generalised_pareto(magnitudes: ArrayLike) -> Fit:
    """(m,) positive -> the generalised Pareto law of what exceeds the least: shape 0 is exponential, below 0 it ends.

    The likelihood is maximised along t = shape / scale, where shape(t) = mean log(1 + t y) of the excess y; below shape
    -1 it has no maximum, so the search ends there. Heavy tails lie at t of any size: there it is along log t.
    """
    x = _flat(magnitudes)
    threshold = float(x.min())
    unit = float(np.median(x[x > threshold])) - threshold  # of the median excess: fits follow the scale of the weights
    y = (x - threshold) / unit
    mean, most = float(y.mean()), float(y.max())

    def shape(t: float) -> float:
        return float(np.log1p(t * y).mean())

    def scale(t: float) -> float:
        return shape(t) / t if abs(t) * mean > 1e-9 else mean

    def loss(t: float) -> float:
        return math.log(scale(t)) + shape(t) + 1

    lowest = -(1 - 1e-9) / most
    if shape(lowest) < -1:
        lowest = float(scipy.optimize.brentq(lambda t: shape(t) + 1, lowest, 0.0))
    light = _minimum(loss, lowest, 1.0)
    heavy = math.exp(_minimum(lambda t: loss(math.exp(t)), 0.0, math.log(HEAVIEST)))
    best = min(light, heavy, unit / threshold, key=loss)  # the last one is equation 8's, which this law contains
    xi, sigma = shape(best), scale(best)

    def cdf(v: Array) -> Array:
        y = (v - threshold) / unit
        return -np.expm1(-(np.log1p(best * y) / xi if abs(best) * mean > 1e-9 else y / sigma))

    named = {"shape": xi, "scale": sigma * unit, "threshold": threshold}
    return Fit(named, -(math.log(sigma) + math.log(unit) + xi + 1), _ks(x, cdf))


def _gamma_fit(x: Array, power: float) -> tuple[float, float, float]:
    """alpha, scale and mean log-likelihood at a given power: x^power is gamma distributed, its shape one equation."""
    logs = np.log(x)
    top = power * float(logs.max())
    log_mean = top + math.log(float(np.exp(power * logs - top).mean()))
    excess = max(log_mean - power * float(logs.mean()), 1e-12)  # log a - digamma(a), above 0 by Jensen
    root = scipy.optimize.brentq(lambda t: t - float(scipy.special.digamma(math.exp(t))) - excess, -25.0, 30.0)
    alpha = math.exp(root)
    scale = math.exp((log_mean - math.log(alpha)) / power)
    value = math.log(power / scale) - float(scipy.special.gammaln(alpha)) - alpha
    return alpha, scale, float(value + (alpha * power - 1) * (float(logs.mean()) - math.log(scale)))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum on an interval: the best of a grid, refined between its neighbours."""
    grid = np.linspace(low, high, 41)
    best = int(np.argmin([function(float(t)) for t in grid]))
    around = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 40)]))
    found: Any = scipy.optimize.minimize_scalar(function, bounds=around, method="bounded", options={"xatol": 1e-6})
    return float(found.x)


# ---- plots


def density(weights: ArrayLike, limit: float, bins: int = 101) -> list[float]:
    """(m,) -> counts over (m times the bin's width) in `bins` equal bins of [-limit, limit]; the middle one holds 0.

    As in the paper's Figure 5; weights beyond the limit count in m, so that the rest is comparable.
    """
    w = _flat(weights)
    counts, edges = np.histogram(w, bins=bins, range=(-limit, limit))
    return (counts / (max(len(w), 1) * (edges[1] - edges[0]))).tolist()


# ---- sets of weights


def standardised(weights: ArrayLike) -> Array:
    """(m,) -> (m,): in units of the standard deviation; the mean stays, because zero is where pruning cuts."""
    w = _flat(weights)
    return w / w.std() if len(w) and np.ptp(w) > 0 else w


def pooled(layers: Iterable[ArrayLike]) -> Array:
    """Several (m,) -> (sum,): layers of one network together, each standardised: a mixture of scales is no shape."""
    return np.concatenate([np.zeros(0), *(standardised(layer) for layer in layers)])


def thinned(weights: ArrayLike, count: int) -> Array:
    """(m,) -> at most `count` of them, drawn without replacement, the same ones each time."""
    w = _flat(weights)
    return w if len(w) <= count else np.random.default_rng(0).choice(w, count, replace=False, shuffle=False)


def _flat(weights: ArrayLike) -> Array:
    return np.asarray(weights, dtype=np.float64).ravel()


def _varied(weights: Array) -> bool:
    """True for weights that can be described: enough of them, and not all the same."""
    return len(weights) >= FEWEST and bool(np.ptp(weights) > 0)


def _ks(values: Array, cdf: Callable[[Array], Array]) -> float:
    """Largest distance between the empirical and a continuous distribution function, to 1e-4 for many values."""
    n = len(values)
    at = np.unique(np.linspace(0, n - 1, min(n, KS_POINTS)).astype(int))
    expected = cdf(np.sort(values)[at])
    return float(max(((at + 1) / n - expected).max(), (expected - at / n).max()))
