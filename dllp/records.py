"""Plain data that every room may know: the record of an epoch, the size of a network, an extracted particle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from torch import Tensor, nn

Phase = Literal["open", "soft", "discrete"]
MomentName = Literal["before", "after", "end"]
Recipe = dict[str, dict[str, list[int]]]
"""Kept channels of each module, by side: what cuts a fresh instance of the network to the same shape."""
GATE_BINS = 10
"""Equal parts of [0, 1] in which gate probabilities are counted."""


@dataclass(frozen=True)
class EpochRecord:
    """Measurements of one epoch; lists have one entry for each particle.

    `gates` counts the gates of each module by their probability, in equal parts of [0, 1], all particles together;
    empty in most epochs of a long run.
    `discrepancy` is the kernelized Stein discrepancy of the particles over N.
    `validation_loss` (of a regression the mean squared error) and `validation_accuracy` are measured at the end of the
    epoch, on data that was handed over for it.
    """

    epoch: int
    phase: Phase
    loss: list[float]
    accuracy: list[float] | None
    lr: float
    temperature: float
    budget: float
    cost: list[float]
    multiplier: list[float]
    undecided: list[float]
    noise: list[float]
    seconds: float
    engine: str
    gates: list[list[int]] = field(default_factory=list)
    discrepancy: float | None = None
    validation_loss: list[float] | None = None
    validation_accuracy: list[float] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def best_epoch(history: Sequence[EpochRecord]) -> EpochRecord:
    """The epoch with the best validation, mean over the particles, of those after the decision where there are any."""
    known = [record for record in history if record.validation_loss]
    decided = [record for record in known if record.phase == "discrete"] or known
    return max(decided, key=lambda r: fmean(r.validation_accuracy or [-loss for loss in r.validation_loss or ()]))


@dataclass(frozen=True)
class Moment:
    """Measurements at one moment of a run; lists have one entry for each particle.

    Attributes:
        name: `before` and `after` the gates are decided, or the `end`.
        step: Steps taken until then.
        shapes: Of the kept weights: their number, near-zero ratio, KS distance to their Gaussian, p-value of one mode.
        accuracy, nll: On data that was handed over for it; of a regression `nll` is the mean squared error.
        ensemble: Accuracy and negative log-likelihood of the mean prediction.
        metrics: The user's own, means over the data.
    """

    name: MomentName
    step: int
    shapes: list[dict[str, float] | None]
    accuracy: list[float] | None = None
    nll: list[float] | None = None
    ensemble: dict[str, float] | None = None
    metrics: list[dict[str, float]] | None = None


@dataclass(frozen=True)
class Size:
    """Cost of a network: multiply-accumulates of one example and stored numbers, of non-zero weights only."""

    macs: float
    params: int


@dataclass(frozen=True)
class ExtractedParticle:
    """One particle of a finished run, as Algorithm 1 returns it.

    Attributes:
        network: M_p, a plain module of the original class with no gates, no hooks and nothing of this package.
        reference: M_0, the slab as trained to the end and the spike as it stood when the gates became discrete.
        recipe: Kept channels of each module; empty for single weights, which are exact zeros instead.
        gated: Names of the parameters that hold those zeros.
        keep: (U,) bool, the gates that stayed open.
    """

    network: nn.Module
    reference: nn.Module
    recipe: Recipe = field(default_factory=dict)
    gated: tuple[str, ...] = ()
    keep: Tensor | None = None
