"""Metrics from stored predictions, per particle and for the ensemble, on clean, corrupted and OOD data.

They are stored beside the runs when they are first computed, with a provenance of their own. Predictions that serve
nothing else, and take a hundred times the space, can be removed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllp.evaluation.evaluate import class_uncertainty, classified, separation
from dllp.method import efficiency
from paper.store import CLEAN, OUTSIDE, Store

Versions = dict[str, Tensor]
"""(n, B, C) probabilities by version of the data."""
Metrics = dict[str, dict[str, float]]
"""Metrics by version of the data."""


@dataclass(frozen=True)
class PredictionMetrics:
    """Metrics of each of a run's networks, and of their mean prediction."""

    particles: list[Metrics]
    ensemble: Metrics


def stored_metrics(store: Store, line: Mapping[str, Any]) -> PredictionMetrics:
    """Metrics of a finished run: read from the store, or computed from its probabilities and stored."""
    known = store.figures(line["digest"], line.get("date"))
    if known is None:
        found = from_probabilities(*probabilities(store, line["digest"]))
        named = {key: line.get(key) for key in ("digest", "seed", "date")}
        known = store.add_figures({**named, "alone": found.particles, "together": found.ensemble})
    return PredictionMetrics(known["alone"], known["together"])


def from_probabilities(versions: Versions, labels: Tensor) -> PredictionMetrics:
    """Metrics from probabilities and labels (B,)."""
    count = len(versions[CLEAN])
    particles = [_metrics({name: p[i : i + 1] for name, p in versions.items()}, labels) for i in range(count)]
    return PredictionMetrics(particles, _metrics(versions, labels) if count > 1 else particles[0])


def probabilities(store: Store, digest: str) -> tuple[Versions, Tensor]:
    """Stored predictions of a run on every version of the data, and the labels (B,)."""
    stored, labels = store.probabilities(digest)
    return {name: torch.from_numpy(p) for name, p in stored.items()}, torch.from_numpy(labels).long()


def _metrics(versions: Versions, labels: Tensor) -> Metrics:
    clean = versions[CLEAN]
    found = {}
    base = efficiency.estimate_components(clean, labels) if len(clean) > 1 else None
    for name, members in versions.items():
        if name.startswith(OUTSIDE):
            found[name] = separation(class_uncertainty(members), class_uncertainty(clean))
            continue
        found[name] = classified(members, labels)
        if base is not None:
            s2, a2, b2 = efficiency.variances(efficiency.estimate_components(members, labels), base)
            parts = {"s2": s2, "a2": a2, "b2": b2, "efficiency": efficiency.efficiency(s2, a2, b2, len(clean))}
            found[name] |= {key: float(value) for key, value in parts.items()}
    return found
