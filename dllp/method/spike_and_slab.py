"""The spike-and-slab prior of equation 10: log density, responsibility, scores, and the spike's proximal step.

Pure functions of (values, parameters). Root precisions and logits broadcast against the weights and may be
tensors or floats; nothing here reads a value back to the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def log(value: Tensor | float) -> Tensor | float:
    """(...) -> (...): logarithm that keeps a float a float, so that no constant is copied to the device."""
    return value.log() if isinstance(value, Tensor) else math.log(value)


def _slab_logit(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): log odds that a weight belongs to the slab, never NaN."""
    largest = torch.finfo(w.dtype).max
    # Both clamps keep inf - inf and 0 * inf away for huge weights and for gates at exactly 0 or 1.
    energy = (0.5 * (spike * spike - slab * slab) * (w * w).clamp_max(largest)).clamp(-largest, largest)
    return logit + (log(slab) - log(spike)) + energy


def log_prob(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): log of theta N(w; 0, slab^-2) + (1 - theta) N(w; 0, spike^-2), theta = sigmoid(logit).

    Equation 10 with the exponents' missing minus signs; `slab` (lambda) and `spike` (epsilon) are root precisions.
    """
    square = w * w
    in_slab = logsigmoid(logit) + log(slab) - 0.5 * slab * slab * square
    in_spike = logsigmoid(-logit) + log(spike) - 0.5 * spike * spike * square
    return torch.logaddexp(in_slab, in_spike) - HALF_LOG_2PI


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


def score(w: Tensor, logit: Tensor, slab: Tensor | float, spike: Tensor | float) -> Tensor:
    """(...) -> (...): closed-form gradient of :func:`log_prob` in the weight."""
    in_slab, in_spike = precision_parts(w, logit, slab, spike)
    return -(in_slab + in_spike) * w


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
