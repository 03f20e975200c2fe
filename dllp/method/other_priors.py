"""The priors behind older methods, equations 1 to 6: Laplace, Gaussian, polarization, Hoyer (Section 3.1).

Pure functions of (values, parameters), as the spike-and-slab prior's are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dllp.method import spike_and_slab
from dllp.method.spike_and_slab import HALF_LOG_2PI, log

POLARIZATION = 1.2
"""t of equation 6: at this value small and large factors part."""


def laplace_log_prob(w: Tensor, scale: Tensor | float) -> Tensor:
    """(...) -> (...): normalised log density of Laplace(0, scale), the prior behind l1 pruning (1-3)."""
    return -w.abs() / scale - log(scale) - math.log(2)


def laplace_score(w: Tensor, scale: Tensor | float) -> Tensor:
    """(...) -> (...): gradient of :func:`laplace_log_prob`; 0, a subgradient, at 0."""
    return -w.sign() / scale


def gaussian_log_prob(w: Tensor, std: Tensor | float) -> Tensor:
    """(...) -> (...): normalised log density of N(0, std^2), the prior behind l2 pruning (4)."""
    return -0.5 * (w / std) ** 2 - log(std) - HALF_LOG_2PI


def gaussian_score(w: Tensor, std: Tensor | float) -> Tensor:
    """(...) -> (...): gradient of :func:`gaussian_log_prob`."""
    return -w / (std * std)


def polarization_energy(gamma: Tensor, t: Tensor | float, a: Tensor | float) -> Tensor:
    """(C,) -> (): (t |gamma|_1 - |gamma - mean|_1) / a over the scaling factors, minus the log density of (6).

    The printed density (5) can go negative and (6) prints this term with the other sign; as an energy it rewards
    factors that split into two groups. Improper for t <= 2 (1 - 1/C).
    """
    return (t * gamma.abs().sum() - (gamma - gamma.mean()).abs().sum()) / a


def polarization_score(gamma: Tensor, t: Tensor | float, a: Tensor | float) -> Tensor:
    """(C,) -> (C,): minus the gradient of :func:`polarization_energy`, through the mean too."""
    side = (gamma - gamma.mean()).sign()
    return (side - side.mean() - t * gamma.sign()) / a


def hoyer_energy(w: Tensor, strength: Tensor | float) -> Tensor:
    """(...) -> (): strength * (sum |w|)^2 / sum w^2, between 1 and the number of weights; 0 where all are 0.

    It ignores the scale of w, so that exp(-energy) has no finite integral: improper.
    """
    return strength * w.abs().sum() ** 2 / _positive(w.square().sum())


def hoyer_score(w: Tensor, strength: Tensor | float) -> Tensor:
    """(...) -> (...): minus the gradient of :func:`hoyer_energy`, orthogonal to w."""
    ratio = w.abs().sum() / _positive(w.square().sum())
    return 2 * strength * ratio * (ratio * w - w.sign())


def _positive(total: Tensor) -> Tensor:
    """() -> (): away from 0, so that a vector of zeros gives 0 rather than NaN."""
    return total.clamp_min(torch.finfo(total.dtype).tiny)


@dataclass(frozen=True)
class Prior:
    """A prior as two pure functions of (values, its parameters).

    Args:
        name: Key in :data:`PRIORS`.
        log_prob: Log density; elementwise and normalised where that is the scope, a scalar up to a constant otherwise.
        score: Closed-form gradient of the summed `log_prob` in the values.
        scope: What the density is a product over: `element`s, the `module`s of a network, or nothing (`network`).
    """

    name: str
    log_prob: Callable[..., Tensor]
    score: Callable[..., Tensor]
    scope: Literal["element", "module", "network"] = "element"

    def unit_scores(self, values: Tensor, lengths: Sequence[int], *parameters: Tensor | float) -> Tensor:
        """(n, U) values in modules of `lengths` units -> (n, U): each network's scores under a prior of sizes."""
        sizes = values.abs()
        if self.scope == "element":
            return self.score(sizes, *parameters) * values.sign()
        parts = sizes.split(list(lengths), dim=1) if self.scope == "module" else [sizes]
        scores = [torch.stack([self.score(row, *parameters) for row in part]) for part in parts]
        return torch.cat(scores, dim=1) * values.sign()


PRIORS = {
    prior.name: prior
    for prior in (
        Prior("spike_and_slab", spike_and_slab.log_prob, spike_and_slab.score),  # logit, slab, spike
        Prior("laplace", laplace_log_prob, laplace_score),
        Prior("gaussian", gaussian_log_prob, gaussian_score),
        Prior("polarization", lambda *terms: -polarization_energy(*terms), polarization_score, "network"),
        Prior("hoyer", lambda *terms: -hoyer_energy(*terms), hoyer_score, "module"),
    )
}
