"""Log densities of weights: the spike-and-slab prior (equation 10) and the priors behind older methods (1-6).

Pure functions of (values, parameters). Root precisions and logits broadcast against the weights and may be
tensors or floats; nothing here reads a value back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dllp.config import SPIKE_AND_SLAB, Config
from dllp.errors import ConfigError

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def _log(value: Tensor | float) -> Tensor | float:
    """(...) -> (...): logarithm that keeps a float a float, so that no constant is copied to the device."""
    return value.log() if isinstance(value, Tensor) else math.log(value)


def _slab_logit(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): log odds that a weight belongs to the slab, never NaN."""
    largest = torch.finfo(w.dtype).max
    # Both clamps keep inf - inf and 0 * inf away for huge weights and for gates at exactly 0 or 1.
    energy = (0.5 * (spike * spike - slab * slab) * (w * w).clamp_max(largest)).clamp(-largest, largest)
    return logit + (_log(slab) - _log(spike)) + energy


def spike_and_slab_log_prob(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): log of theta N(w; 0, slab^-2) + (1 - theta) N(w; 0, spike^-2), theta = sigmoid(logit).

    Equation 10 with the exponents' missing minus signs; `slab` (lambda) and `spike` (epsilon) are root precisions.
    """
    square = w * w
    in_slab = logsigmoid(logit) + _log(slab) - 0.5 * slab * slab * square
    in_spike = logsigmoid(-logit) + _log(spike) - 0.5 * spike * spike * square
    return torch.logaddexp(in_slab, in_spike) - _HALF_LOG_2PI


def responsibility(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): probability r that each weight was drawn from the slab."""
    return _slab_logit(w, logit, slab, spike).sigmoid()


def precision_parts(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> tuple[Tensor, Tensor]:
    """(...) -> (...), (...): the slab's r lambda^2 and the spike's (1 - r) epsilon^2.

    Apart, because the spike's stiff part is taken by :func:`proximal_spike` and the slab's stays in the score.
    """
    odds = _slab_logit(w, logit, slab, spike)
    # 1 - r as a sigmoid of its own: near r = 1 a subtraction would leave rounding noise times epsilon^2.
    return odds.sigmoid() * (slab * slab), (-odds).sigmoid() * (spike * spike)


def precision(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): r lambda^2 + (1 - r) epsilon^2, the precision with which the prior pulls to zero."""
    in_slab, in_spike = precision_parts(w, logit, slab, spike)
    return in_slab + in_spike


def spike_and_slab_score(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): closed-form gradient of :func:`spike_and_slab_log_prob` in the weight."""
    return -precision(w, logit, slab, spike) * w


def gate_score(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): gradient of the log density in the gate logit, r - theta."""
    return responsibility(w, logit, slab, spike) - logit.sigmoid()


def log_slab_score(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): gradient of the log density in log lambda, r (1 - lambda^2 w^2), one value for each weight."""
    return responsibility(w, logit, slab, spike) * (1 - slab * slab * (w * w))


def proximal_spike(w: Tensor, pull: Tensor | float) -> Tensor:
    """(...) -> (...): weights after the implicit step w / (1 + pull) on the spike's quadratic.

    pull = lr * beta * (1 - r) * epsilon^2 / (n N) / (1 - momentum). An explicit step overshoots once pull exceeds 2;
    this one never changes a weight's sign. The step stands outside the momentum buffer, where a steady gradient is
    summed to 1 / (1 - momentum) times itself: without that factor the spike would pull ten times too weakly at 0.9.
    """
    return w / (1 + pull)


def clamp_slab(log_slab: Tensor, bounds: tuple[float, float]) -> Tensor:
    """(...) -> (...): log lambda within log `bounds`; without bounds joint MAP of weights and lambda diverges."""
    return log_slab.clamp(math.log(bounds[0]), math.log(bounds[1]))


def laplace_log_prob(w: Tensor, scale: Tensor | float) -> Tensor:
    """(...) -> (...): normalised log density of Laplace(0, scale), the prior behind l1 pruning (1-3)."""
    return -w.abs() / scale - _log(scale) - math.log(2)


def laplace_score(w: Tensor, scale: Tensor | float) -> Tensor:
    """(...) -> (...): gradient of :func:`laplace_log_prob`; 0, a subgradient, at 0."""
    return -w.sign() / scale


def gaussian_log_prob(w: Tensor, std: Tensor | float) -> Tensor:
    """(...) -> (...): normalised log density of N(0, std^2), the prior behind l2 pruning (4)."""
    return -0.5 * (w / std) ** 2 - _log(std) - _HALF_LOG_2PI


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
        log_prob: Log density; elementwise where `separable`, a scalar up to a constant otherwise.
        score: Closed-form gradient of the summed `log_prob` in the values.
        parameters: Names of the parameters, in order.
        proper: Whether `log_prob` is normalised.
        scope: What the density is a product over: `element`s, the `module`s of a network, or nothing (`network`).
    """

    name: str
    log_prob: Callable[..., Tensor]
    score: Callable[..., Tensor]
    parameters: tuple[str, ...]
    proper: bool
    scope: Literal["element", "module", "network"] = "element"

    @property
    def separable(self) -> bool:
        """Whether the density is a product over elements."""
        return self.scope == "element"

    def check(self, *parameters: float) -> None:
        """Raise unless there are as many parameters as the prior has, all finite and but for a logit positive."""
        if len(parameters) != len(self.parameters):
            raise ConfigError(f"prior {self.name} has {' and '.join(self.parameters)}: {len(parameters)} were given")
        for name, value in zip(self.parameters, parameters, strict=True):
            if name == "logit" and math.isfinite(value):
                continue
            if not 0 < value < math.inf:
                raise ConfigError(f"prior {self.name}: {name} = {value}: a positive number is needed")
        if not bool(
            self.score(torch.tensor([1.0, 2.0]), *(torch.tensor(float(p)) for p in parameters)).isfinite().all()
        ):
            given = ", ".join(f"{name} = {value:g}" for name, value in zip(self.parameters, parameters, strict=True))
            raise ConfigError(f"prior {self.name}: {given}: so strong a pull is no number that float32 can hold")

    def unit_scores(self, values: Tensor, lengths: Sequence[int], *parameters: Tensor | float) -> Tensor:
        """(n, U) values in modules of `lengths` units -> (n, U): each network's scores under a prior of sizes."""
        sizes = values.abs()
        if self.scope == "element":
            return self.score(sizes, *parameters) * values.sign()
        parts = sizes.split(list(lengths), dim=1) if self.scope == "module" else [sizes]
        scores = [torch.stack([self.score(row, *parameters) for row in part]) for part in parts]
        return torch.cat(scores, dim=1) * values.sign()


def _negated(energy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def log_prob(values: Tensor, *parameters: Tensor | float, **named: Tensor | float) -> Tensor:
        return -energy(values, *parameters, **named)

    return log_prob


PRIORS: Mapping[str, Prior] = MappingProxyType(
    {
        prior.name: prior
        for prior in (
            Prior(SPIKE_AND_SLAB, spike_and_slab_log_prob, spike_and_slab_score, ("logit", "slab", "spike"), True),
            Prior("laplace", laplace_log_prob, laplace_score, ("scale",), True),
            Prior("gaussian", gaussian_log_prob, gaussian_score, ("std",), True),
            Prior("polarization", _negated(polarization_energy), polarization_score, ("t", "a"), False, "network"),
            Prior("hoyer", _negated(hoyer_energy), hoyer_score, ("strength",), False, "module"),
        )
    }
)


def chosen(config: Config) -> tuple[Prior, tuple[float, ...]]:
    """The prior that replaces spike-and-slab in a run, and its parameters: Section 3.1 as one line of configuration."""
    prior, width = PRIORS[config.prior], config.prior_scale
    parameters = {"polarization": (config.polarization, width), "hoyer": (1 / width,)}.get(prior.name, (width,))
    prior.check(*parameters)
    return prior, parameters
