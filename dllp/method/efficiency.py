"""Estimation efficiency of a pruned network (Section 3.3, equations 16 and 17).

The observation model: y = f + noise of variance s2, where f is a Gaussian of mean `prior_mean` and variance a2, and
corrupted data add noise of variance b2. The paper calls s2, a2, b2 epsilon^2, alpha^2, beta^2, letters it also uses
for the spike, the Gaussian prior and the objective's weight. The formulas take floats or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllp.errors import ConfigError, DataError

Number = float | Tensor


def map_estimate(mean_observation: Number, prior_mean: Number, a2: Number, s2: Number) -> Number:
    """(...) -> (...): maximum a posteriori estimate (16) from the mean of the observations.

    As the appendix derives it: the log-likelihood is a mean, not a sum, over observations.
    """
    return (mean_observation * a2 + prior_mean * s2) / (s2 + a2)


def cramer_rao_bound(s2: Number) -> Number:
    """(...) -> (...): least variance of an unbiased estimator from one observation (17), the noise itself."""
    return s2


def estimator_variance(s2: Number, a2: Number, b2: Number, n: int = 1) -> Number:
    """(...) -> (...): variance s2 + a2/n + b2 of one observation around the mean of n independent particles.

    Averaging particles divides the model's share alone: all of them see the same data with the same noise.
    """
    return s2 + a2 / n + b2


def map_estimator_variance(s2: Number, a2: Number) -> Number:
    """(...) -> (...): variance a2^2 / (a2 + s2) of the estimator (16) itself from one observation.

    Not what the paper's efficiencies divide by. Shrinking to the prior mean makes it smaller even than the bound s2
    as long as a2 < 1.618 s2 (the golden ratio); beyond, the spread of f itself outweighs that.
    """
    return _over(a2 * a2, a2 + s2, 0.0)


def efficiency(s2: Number, a2: Number, b2: Number, n: int = 1) -> Number:
    """(...) -> (...) in (0, 1]: e = s2 / (s2 + a2/n + b2), the bound over the variance; 1 means fully efficient.

    Without any noise variance and bound are both 0: it is met, and e is 1 as for every s2 that is alone.
    """
    return _over(cramer_rao_bound(s2), estimator_variance(s2, a2, b2, n), 1.0)


def _over(part: Number, whole: Number, empty: float) -> Number:
    """part / whole, and `empty` where the whole is 0."""
    if isinstance(whole, Tensor):
        return torch.where(whole == 0, empty, part / whole)
    return part / whole if whole else empty


def four_cases(s2: Number, a2: Number, b2: Number, n: int = 1) -> dict[str, Number]:
    """(...) -> (...) for each name: the efficiencies of Section 3.3, with and without noise in model and data."""
    none = 0 * s2
    return {
        "noiseless": efficiency(s2, none, none, n),
        "model_noise": efficiency(s2, a2, none, n),
        "data_noise": efficiency(s2, none, b2, n),
        "model_and_data_noise": efficiency(s2, a2, b2, n),
    }


@dataclass(frozen=True)
class Components:
    """Variances estimated from a labelled data set, for one class or output, as scalar tensors.

    Args:
        s2: Observation noise, what would remain with infinitely many particles.
        a2: Model variance, the spread of one particle.
        residual: Noise around the mean prediction as observed, Brier/C = 1/d^2 with d fitted by maximum likelihood
            (equation 9): s2 + a2/n, or at most a2/n where s2 is 0.
    """

    s2: Tensor
    a2: Tensor
    residual: Tensor


def estimate_components(members: Tensor, targets: Tensor) -> Components:
    """(n, B, C), (B,) or (B, C) -> scalars: model variance and observation noise of n particles on B examples.

    Integer targets (B,) are classes and members their probabilities; floating-point ones belong to a regression.

    a2 is the variance over particles with n - 1 in the denominator, averaged over examples and classes. The residual
    is the squared distance of the mean prediction to the one-hot label, averaged the same way (Brier/C). That mean
    still carries a2/n, hence s2 = residual - a2/n, not below 0. Then s2 + a2 is the average of the members' own
    Brier/C wherever s2 > 0.
    """
    classification = not targets.is_floating_point()
    if members.dim() != 3 or targets.shape != members.shape[1 : 2 if classification else 3]:
        raise DataError(
            f"predictions {tuple(members.shape)} and targets {tuple(targets.shape)}: "
            "give (particles, examples, outputs) and (examples,), or (examples, outputs) for a regression"
        )
    n, _, outputs = members.shape
    if n < 2:
        raise ConfigError("the model variance of one particle cannot be estimated: use particles >= 2")
    wanted = torch.nn.functional.one_hot(targets.long(), outputs) if classification else targets
    residual = (wanted.to(members.dtype) - members.mean(0)).square().mean()
    a2 = members.var(0, correction=1).mean()
    return Components(s2=(residual - a2 / n).clamp_min(0), a2=a2, residual=residual)


def variances(here: Components, clean: Components) -> tuple[Number, Number, Number]:
    """s2, a2 and b2 of one version of the data: the observation noise is that of clean data, what it grows by is b2."""
    return clean.s2, here.a2, data_noise(here.s2, clean.s2)


def data_noise(noise_on_corrupted: Number, noise_on_clean: Number) -> Number:
    """(...) -> (...): b2, the noise that corrupted data add to clean data, not below 0.

    Both arguments are the residual (or s2) of the same network on the same examples.
    """
    difference = noise_on_corrupted - noise_on_clean
    return difference.clamp_min(0) if isinstance(difference, Tensor) else max(0.0, difference)
