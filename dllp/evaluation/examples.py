"""Predicted class, confidence and uncertainty of each test example: examples.safetensors of a run folder.

The report's diagrams and images need single examples; the metrics are means over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dllp.errors import ArtifactError
from dllp.evaluation.evaluate import DENSE, TOGETHER
from dllp.posterior import PredictedData, decompose
from dllp.runs.folder import EXAMPLES
from dllp.runs.tensors import read_tensors, write_tensors

MOST_BYTES = 2**30


@dataclass(frozen=True)
class Examples:
    """Predictions of B examples with classes; all tensors are (B,)."""

    labels: Tensor
    predicted: dict[str, Tensor]  # by the network's name: `dense`, `particle K`, `all particles`
    confidence: dict[str, Tensor]
    aleatoric: Tensor  # uncertainty of the ensemble, as the next
    epistemic: Tensor

    @property
    def together(self) -> str:
        """Name of the prediction that the uncertainty belongs to."""
        return TOGETHER if TOGETHER in self.predicted else "particle 1"

    def correct(self, name: str) -> Tensor:
        """(B,) bool: examples that a network classifies correctly."""
        return self.predicted[name] == self.labels

    def write(self, folder: Path) -> None:
        tensors = {"labels": self.labels, "aleatoric": self.aleatoric, "epistemic": self.epistemic}
        tensors |= {f"predicted/{name}": value for name, value in self.predicted.items()}
        tensors |= {f"confidence/{name}": value for name, value in self.confidence.items()}
        write_tensors(folder / EXAMPLES, tensors)


def collect(particles: PredictedData, dense: PredictedData | None = None) -> Examples:
    """Examples of a data set that the particles, and the dense network, have predicted."""
    found = decompose(particles.members)
    answers = {} if dense is None else {DENSE: dense.members[0]}
    answers |= {f"particle {i + 1}": member for i, member in enumerate(particles.members)}
    if len(particles.members) > 1:
        answers[TOGETHER] = found.mean
    best = {name: p.max(1) for name, p in answers.items()}
    return Examples(
        labels=particles.labels.to(torch.int32),
        predicted={name: top.indices.to(torch.int32) for name, top in best.items()},
        confidence={name: top.values.float() for name, top in best.items()},
        aleatoric=found.aleatoric.float(),
        epistemic=found.epistemic.float(),
    )


def read(folder: Path) -> Examples | None:
    """The examples of a run folder, checked; None where it has no such file."""
    path = folder / EXAMPLES
    if not path.exists():
        return None
    tensors = read_tensors(path, limit=MOST_BYTES)
    predicted, confidence = (
        {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}
        for kind in ("predicted/", "confidence/")
    )
    labels, aleatoric, epistemic = (tensors.get(name, torch.empty(0)) for name in ("labels", "aleatoric", "epistemic"))
    floats = [aleatoric, epistemic, *confidence.values()]
    fits = (
        labels.dim() == 1
        and len(labels) > 0
        and set(predicted) == set(confidence) >= {"particle 1"}
        and all(value.shape == labels.shape for value in (*predicted.values(), *floats))
        and all(value.dtype == torch.int32 for value in (labels, *predicted.values()))
        and all(value.dtype == torch.float32 and bool((value.isfinite() & (value >= 0)).all()) for value in floats)
        and all(bool((value <= 1 + 1e-4).all()) for value in confidence.values())
    )
    if not fits:
        raise ArtifactError(f"{path} does not hold labels, predictions and uncertainties of the same examples")
    return Examples(labels, predicted, confidence, aleatoric, epistemic)
