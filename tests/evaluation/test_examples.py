"""Answers to single test examples: they come back from a folder, and damaged ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dllp
from dllp.errors import ArtifactError
from dllp.evaluation import examples
from dllp.runs import artifacts


def test_examples_come_back(tmp_path: Path) -> None:
    y = torch.randint(5, (20,))
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 5))
    posterior = dllp.Posterior([network, network], torch.ones(2))
    data = dllp.data.from_pair(torch.randn(20, 4), y)
    found = examples.collect(posterior, data)
    found.write(tmp_path)
    again = examples.read(tmp_path)
    assert again is not None and set(again.predicted) == {"particle 1", "particle 2", "all particles"}
    assert again.together == "all particles" and torch.equal(
        again.confidence["particle 1"], found.confidence["particle 1"]
    )
    assert float(again.epistemic.abs().max()) < 1e-6  # the same network twice disagrees with itself nowhere
    assert examples.read(tmp_path / "nothing") is None


@pytest.mark.parametrize("change", [
    {"labels": torch.zeros(3, dtype=torch.int32)}, {"aleatoric": torch.full((4,), torch.nan)},
    {"confidence/particle 1": torch.full((4,), 2.0)}, {"predicted/other": torch.zeros(4, dtype=torch.int32)},
    {"epistemic": torch.zeros(4, 1)}, {"labels": torch.zeros(4)}, {"labels": torch.tensor(3, dtype=torch.int32)},
])  # fmt: skip
def test_damaged_examples_are_refused(tmp_path: Path, change: dict[str, torch.Tensor]) -> None:
    whole = torch.zeros(4, dtype=torch.int32)
    tensors = {"labels": whole, "predicted/particle 1": whole, "confidence/particle 1": torch.ones(4)}
    tensors |= {"aleatoric": torch.zeros(4), "epistemic": torch.zeros(4)}
    artifacts.write_tensors(tmp_path / artifacts.EXAMPLES, tensors)
    assert examples.read(tmp_path) is not None
    artifacts.write_tensors(tmp_path / artifacts.EXAMPLES, tensors | change)
    with pytest.raises(ArtifactError, match="same examples"):
        examples.read(tmp_path)
