"""Predictions of single test examples: made once, read back from a folder, refused when damaged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import dllp
from dllp.cli.main import main
from dllp.errors import ArtifactError
from dllp.evaluation import examples
from dllp.posterior import predict_data
from dllp.runs.folder import EXAMPLES
from dllp.runs.tensors import write_tensors


def test_examples_come_back(tmp_path: Path) -> None:
    y = torch.randint(5, (20,))
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 5))
    posterior = dllp.Posterior([network, network], torch.ones(2))
    data = dllp.data.from_pair(torch.randn(20, 4), y)
    found = examples.collect(predict_data(posterior, data))
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
    write_tensors(tmp_path / EXAMPLES, tensors)
    assert examples.read(tmp_path) is not None
    write_tensors(tmp_path / EXAMPLES, tensors | change)
    with pytest.raises(ArtifactError, match="same examples"):
        examples.read(tmp_path)


@pytest.mark.parametrize("method", [[], ["--method", "l1-filters", "--finetune-epochs", "1"]])
def test_a_run_predicts_its_test_set_once(tmp_path: Path, method: list[str]) -> None:
    """Dense and two particles, or dense, cut and fine-tuned: metrics and examples share the pass.

    DLLP's particles are also measured before the decision, and as they are sliced after it and at the end.
    """
    whole = dllp.data.load("digits").test.x.shape
    passes: Counter[nn.Module] = Counter()

    def count(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Conv2d) and args[0].shape == whole:  # the first layer's input is the network's
            passes[module] += 1

    words = ["--data", "digits", "--model", "small_cnn", "--epochs", "1", "--keep-flops", "0.5", "--device", "cpu"]
    words += [] if method else ["--particles", "2"]
    hook = register_module_forward_pre_hook(count)
    try:
        assert main(["prune", *words, *method, "--quiet", "--out", str(tmp_path / "run")]) == 0
    finally:
        hook.remove()
    moments = [] if method else [1, 1, 2, 2]
    assert list(passes.values()) == [*moments, 1, 1, 1] and examples.read(tmp_path / "run") is not None
