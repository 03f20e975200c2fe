"""What a run says about each example of its test data: answer, confidence and doubt; a file of the run folder.

Single numbers hide which examples they come from; the report's diagrams and images need them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dllp.data import ArrayData
from dllp.errors import ArtifactError
from dllp.evaluation.evaluate import DENSE, TOGETHER
from dllp.posterior import Posterior, decompose
from dllp.runs import artifacts

MOST_BYTES = 2**30


@dataclass(frozen=True)
class Examples:
    """Answers to B examples with classes.

    Attributes:
        labels: (B,) true classes.
        predicted, confidence: By the network's name (`dense`, `particle K`, `all particles`), (B,) each.
        aleatoric, epistemic: (B,) doubt of all particles: noise in the data, and ignorance of the networks.
    """

    labels: Tensor
    predicted: dict[str, Tensor]
    confidence: dict[str, Tensor]
    aleatoric: Tensor
    epistemic: Tensor

    @property
    def together(self) -> str:
        """Name of the answer that the doubt belongs to."""
        return TOGETHER if TOGETHER in self.predicted else "particle 1"

    def correct(self, name: str) -> Tensor:
        """(B,) bool: where a network is right."""
        return self.predicted[name] == self.labels

    def write(self, folder: Path) -> None:
        tensors = {"labels": self.labels, "aleatoric": self.aleatoric, "epistemic": self.epistemic}
        tensors |= {f"predicted/{name}": value for name, value in self.predicted.items()}
        tensors |= {f"confidence/{name}": value for name, value in self.confidence.items()}
        artifacts.write_tensors(folder / artifacts.EXAMPLES, tensors)


def collect(
    posterior: Posterior, data: ArrayData, dense: Posterior | None = None, device: torch.device | str = "cpu"
) -> Examples:
    """Ask every network about every example; the networks are back on the CPU when this returns."""
    members = _members(posterior, data, device)
    doubt = decompose(members)
    answers = {f"particle {i + 1}": member for i, member in enumerate(members)}
    if len(members) > 1:
        answers[TOGETHER] = doubt.mean
    if dense is not None:
        answers = {DENSE: _members(dense, data, device)[0], **answers}
    best = {name: p.max(1) for name, p in answers.items()}
    return Examples(
        labels=data.y.cpu().to(torch.int32),
        predicted={name: found.indices.to(torch.int32) for name, found in best.items()},
        confidence={name: found.values.float() for name, found in best.items()},
        aleatoric=doubt.aleatoric.float(),
        epistemic=doubt.epistemic.float(),
    )


def _members(posterior: Posterior, data: ArrayData, device: torch.device | str) -> Tensor:
    posterior.to(device)
    try:
        parts = [posterior.members(x) for x in data.parts()]
        return torch.cat(parts, 1)
    finally:
        posterior.to("cpu")


def read(folder: Path) -> Examples | None:
    """What :meth:`Examples.write` wrote, checked; None where the run has no such file."""
    path = folder / artifacts.EXAMPLES
    if not path.exists():
        return None
    tensors = artifacts.read_tensors(path, limit=MOST_BYTES)
    parts: dict[str, dict[str, Tensor]] = {"predicted": {}, "confidence": {}}
    for name, value in tensors.items():
        kind, _, network = name.partition("/")
        if kind in parts and network:
            parts[kind][network] = value
    single = [tensors.get(name) for name in ("labels", "aleatoric", "epistemic")]
    labels, aleatoric, epistemic = (torch.empty(0) if value is None else value for value in single)
    floats = [aleatoric, epistemic, *parts["confidence"].values()]
    fits = (
        labels.dim() == 1
        and len(labels) > 0
        and set(parts["predicted"]) == set(parts["confidence"]) >= {"particle 1"}
        and all(value.shape == labels.shape for value in (*parts["predicted"].values(), *floats))
        and all(value.dtype == torch.int32 for value in (labels, *parts["predicted"].values()))
        and all(value.dtype == torch.float32 and bool((value.isfinite() & (value >= 0)).all()) for value in floats)
        and all(bool((value <= 1 + 1e-4).all()) for value in parts["confidence"].values())
    )
    if not fits:
        raise ArtifactError(f"{path} does not hold labels, answers, confidences and doubts of the same examples")
    return Examples(labels, parts["predicted"], parts["confidence"], aleatoric, epistemic)
