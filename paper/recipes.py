"""One training recipe for each network, for every row of every table: dense, pruned and thin alike."""

from __future__ import annotations

from typing import Any

from dllp.config import Config

SHARED: dict[str, Any] = dict(init="fresh", batch_size=512, epochs=60, lr_end=0.001, beta=0.1)
CHANNEL: dict[str, Any] = dict(open_until=0.15, ramp_until=0.3, discrete_at=0.35, lr_gates=0.05)
WEIGHT: dict[str, Any] = dict(
    open_until=0.15, ramp_until=0.4, discrete_at=0.5, lr_gates=0.02, weight_decay=1e-3, slab_bounds=(1.0, 30.0)
)
PEAK_LR = {"resnet20": 0.4, "resnet50": 0.2, "resnet56": 0.4, "vgg11_bn": 0.2, "vgg16_bn": 0.2}

_STRENGTHS = {
    "deephoyer": "strength=1e-05",
    "magnitude-l1": "strength=3e-05",
    "polarization": "strength=0.0003",
    "slimming": "strength=1e-05",
    "sss": "strength=1e-06",
}
TUNED = {
    "resnet56": _STRENGTHS,
    "vgg16_bn": {
        "deephoyer": "strength=1e-05,least=0.3",
        "magnitude-l1": "strength=1e-05",
        "polarization": "strength=3e-05,least=0.2",
        "slimming": "strength=1e-05,least=0.2",
        "sss": "strength=1e-06,least=0.3",
    },
}
"""Hyperparameters of other methods by network, chosen on held-out images (results/tuning)."""


def tuned(method: str, network: str) -> str:
    """The name of a method with the hyperparameters that were chosen for it, where any were."""
    chosen = TUNED.get(network, {}).get(method)
    return f"{method}:{chosen}" if chosen else method


def recipe(network: str, granularity: str, **changes: Any) -> Config:
    """The documented default for `network`, with whatever a job changes."""
    own = CHANNEL if granularity == "channel" else WEIGHT
    values = {**SHARED, "lr": PEAK_LR.get(network, 0.1), "granularity": granularity, **own, **changes}
    return Config(**values)


def short(granularity: str, **changes: Any) -> Config:
    """The short preset, for a network that a recipe above has trained."""
    shared = {name: SHARED[name] for name in ("batch_size", "beta")}
    return Config.short(**{**shared, "granularity": granularity, **changes})
