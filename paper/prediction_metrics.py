"""What a run's predictions are worth: figures of each network and of all together, on every version of the data.

They are written beside the runs when they are first computed. Predictions that serve nothing else, and take a hundred
times the space, can go then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllp.errors import ArtifactError
from dllp.evaluation.evaluate import classified, separated
from dllp.method import efficiency
from paper.splits import CLEAN
from paper.store import OUTSIDE, Store

Versions = dict[str, Tensor]
"""(n, B, C) probabilities by version of the data."""
Figures = dict[str, dict[str, float]]
"""Figures by version of the data."""


@dataclass(frozen=True)
class Judged:
    """Figures of each of a run's networks, and of their mean prediction."""

    alone: list[Figures]
    together: Figures


def judged(store: Store, line: Mapping[str, Any]) -> Judged:
    """Figures of a finished run, as they were written down or from its probabilities; then they are written down."""
    known = store.figures(line["digest"], line.get("date"))
    if known is None:
        found = judge(*probabilities(store, line["digest"]))
        named = {key: line.get(key) for key in ("digest", "seed", "date")}
        known = store.add_figures({**named, "alone": found.alone, "together": found.together})
    alone, together = known.get("alone"), known.get("together")
    if not isinstance(alone, list) or not alone or not all(_is_figures(value) for value in (*alone, together)):
        raise ArtifactError(f"{store.judged}: the figures of {line['digest']} are damaged: remove the line")
    return Judged(alone, together)  # type: ignore[arg-type]


def judge(versions: Versions, labels: Tensor) -> Judged:
    """Figures from probabilities and labels (B,)."""
    count = len(versions[CLEAN])
    alone = [_figures({name: p[i : i + 1] for name, p in versions.items()}, labels) for i in range(count)]
    return Judged(alone, _figures(versions, labels) if count > 1 else alone[0])


def probabilities(store: Store, digest: str) -> tuple[Versions, Tensor]:
    """What a run predicted on every version of the data, and the labels (B,)."""
    stored, labels = store.probabilities(digest)
    return {name: torch.from_numpy(p) for name, p in stored.items()}, torch.from_numpy(labels).long()


def _figures(versions: Versions, labels: Tensor) -> Figures:
    clean = versions[CLEAN]
    figures = {}
    base = efficiency.estimate_components(clean, labels) if len(clean) > 1 else None
    for name, members in versions.items():
        if name.startswith(OUTSIDE):
            figures[name] = separated(members, clean)
            continue
        figures[name] = classified(members, labels)
        if base is not None:
            s2, a2, b2 = efficiency.variances(efficiency.estimate_components(members, labels), base)
            parts = {"s2": s2, "a2": a2, "b2": b2, "efficiency": efficiency.efficiency(s2, a2, b2, len(clean))}
            figures[name] |= {key: float(value) for key, value in parts.items()}
    return figures


def _is_figures(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(version, dict) and all(isinstance(v, (int, float, type(None))) for v in version.values())
        for version in value.values()
    )
