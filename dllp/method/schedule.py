"""Schedules: pure callables of progress, the fraction of the run in [0, 1] that is done."""

from __future__ import annotations

import math

TAU_START, TAU_END = 1.0, 0.1
"""Temperature of the relaxed gates at the start of a run, and when they are decided."""


def _share(progress: float, begin: float, until: float) -> float:
    """Position of `progress` between `begin` and `until`, within [0, 1]; a step where they coincide."""
    if progress >= until:
        return 1.0
    return max(0.0, (progress - begin) / (until - begin)) if until > begin else 0.0


def learning_rate(progress: float, *, peak: float, end: float, warmup: float) -> float:
    """Linear rise from 0 to `peak` during the fraction `warmup` of the run, then half a cosine down to `end`."""
    if progress < warmup:
        return peak * max(0.0, progress) / warmup
    share = _share(progress, warmup, 1.0)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * share))


def temperature(progress: float, *, start: float, end: float, until: float) -> float:
    """Gate temperature from `start` to `end`, reached at `until` and kept.

    Linear in log tau: the gates' logits are divided by tau, so equal steps sharpen them by equal factors.
    """
    share = _share(progress, 0.0, until)
    return start ** (1 - share) * end**share


def budget_ramp(progress: float, *, target: float, begin: float, until: float) -> float:
    """Fraction of the dense cost to aim at: 1 until `begin`, linearly down to `target` at `until`, then `target`."""
    share = _share(progress, begin, until)
    return (1 - share) + share * target
