"""Measurements around the decision and at the end: against the extracted networks, and against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dllp
from dllp import zoo

SIDE = 6


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, SIDE, SIDE, generator=generator), torch.arange(count) % 3


def run(granularity: str, **changes: Any) -> dllp.Result:
    torch.manual_seed(0)
    model = zoo.build("small_cnn", num_classes=3, in_channels=1, image_size=SIDE)
    options: dict[str, Any] = dict(keep_flops=0.4, epochs=4, batch_size=16, lr=0.05, warmup=0, device="cpu")
    config = dllp.Config(**options, granularity=granularity, **changes)
    return dllp.prune(model, pictures(64, 1), config, validation=pictures(50, 2))


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_the_end_is_that_of_the_extracted_networks(granularity: str) -> None:
    result = run(granularity)
    x, y = pictures(50, 2)
    before, after, end = result.info["moments"]
    assert [before["name"], after["name"], end["name"]] == ["before", "after", "end"]
    assert before["step"] == after["step"] == 8 and end["step"] == 16
    with torch.no_grad():
        probabilities = torch.stack([p.network(x).double().softmax(1) for p in result.particles])
    for k, p in enumerate(probabilities):
        assert end["accuracy"][k] == pytest.approx(float((p.argmax(1) == y).double().mean()))
        assert end["nll"][k] == pytest.approx(float(F.nll_loss(p.log(), y)), rel=1e-4)
    mean = probabilities.mean(0)
    assert end["ensemble"]["nll"] == pytest.approx(float(F.nll_loss(mean.log(), y)), rel=1e-4)
    assert end["ensemble"]["accuracy"] == pytest.approx(float((mean.argmax(1) == y).double().mean()))


def test_the_decision_about_single_weights_changes_nothing() -> None:
    result = run("weight")
    before, after, end = result.info["moments"]
    assert before["accuracy"] == after["accuracy"] and before["nll"] == pytest.approx(after["nll"], rel=0.02)
    for k, particle in enumerate(result.particles):
        kept = sum(int((particle.network.get_parameter(name) != 0).sum()) for name in particle.gated)
        assert after["shapes"][k]["kept"] == end["shapes"][k]["kept"] == kept
        assert before["shapes"][k]["kept"] == pytest.approx(kept, rel=1e-3)


def test_the_shape_of_kept_channels_is_that_of_their_weights() -> None:
    result = run("channel")
    for k, particle in enumerate(result.particles):
        sizes = [p.numel() for p in particle.network.parameters() if p.dim() > 1]
        assert result.info["moments"][-1]["shapes"][k]["kept"] == sum(sizes)


def test_without_data_only_the_shape_is_measured() -> None:
    model = zoo.build("small_cnn", num_classes=3, in_channels=1, image_size=SIDE)
    config = dllp.Config(keep_flops=0.4, epochs=2, batch_size=16, warmup=0, device="cpu")
    moments = dllp.prune(model, pictures(64, 1), config).info["moments"]
    assert [m["accuracy"] for m in moments] == [None] * 3 and all(m["shapes"][0]["kept"] > 0 for m in moments)


def test_a_regression_has_its_squared_error() -> None:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(64, 5, generator=generator), torch.randn(64, 2, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))
    config = dllp.Config(keep_flops=0.6, epochs=3, batch_size=16, task="regression", lr=0.01, device="cpu")
    result = dllp.prune(model, (x, y), config, validation=(x, y))
    with torch.no_grad():
        expected = [float(F.mse_loss(p.network(x), y)) for p in result.particles]
    assert result.info["moments"][-1]["nll"] == pytest.approx(expected, rel=1e-4)
