"""Predictions of all particles together: identities, regression, and what they cost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dllp.posterior import Posterior, decompose


class Counted(nn.Module):
    """A linear network that counts its forward passes and the examples in them."""

    def __init__(self, inputs: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.calls = self.examples = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.examples += len(x)
        return self.linear(x)


@given(
    n=st.integers(1, 5), classes=st.integers(2, 6), sharpness=st.floats(0, 200), seed=st.integers(0, 10_000)
)  # fmt: skip
def test_variance_and_entropy_split_exactly(n: int, classes: int, sharpness: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(n, 7, classes, generator=generator, dtype=torch.float64)
    p = decompose(logits.softmax(-1))
    assert p.entropy is not None and p.expected_entropy is not None and p.mutual_information is not None
    # law of total variance: the variance of the label under the mean prediction
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(p.total, (p.mean * (1 - p.mean)).sum(-1), **close)
    torch.testing.assert_close(p.expected_entropy + p.mutual_information, p.entropy, **close)
    assert (p.epistemic >= 0).all() and (p.aleatoric >= 0).all()
    assert (p.mutual_information > -1e-9).all() and (p.entropy < math.log(classes) + 1e-9).all()
    assert torch.isfinite(p.entropy).all()
    if n == 1:
        assert p.epistemic.abs().max() == 0 and p.mutual_information.abs().max() < 1e-9


def test_hand_worked_disagreement() -> None:
    """Two sure particles that contradict each other: no noise, all ignorance."""
    p = decompose(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64))
    assert p.mutual_information is not None
    assert p.mean.tolist() == [[0.5, 0.5]]
    assert (float(p.aleatoric), float(p.epistemic), float(p.total)) == (0, 0.5, 0.5)
    assert float(p.mutual_information) == pytest.approx(math.log(2))


def test_n_forward_passes_and_no_more() -> None:
    networks = [Counted() for _ in range(3)]
    posterior = Posterior(networks, torch.ones(3))
    x = torch.randn(10, 4)
    prediction = posterior.predict(x)
    assert [net.calls for net in networks] == [1, 1, 1] and len(posterior) == 3
    batched = posterior.predict(x, batch_size=4)
    assert [net.calls for net in networks] == [4, 4, 4]  # 4 + 4 + 2 examples
    assert [net.examples for net in networks] == [20, 20, 20]
    torch.testing.assert_close(batched.members, prediction.members)


def test_classification_is_the_mean_of_softmaxes() -> None:
    networks = [Counted() for _ in range(2)]
    x = torch.randn(5, 4)
    prediction = Posterior(networks, torch.ones(2)).predict(x)
    expected = torch.stack([net.linear(x).softmax(1) for net in networks]).detach()
    torch.testing.assert_close(prediction.members, expected)
    torch.testing.assert_close(prediction.mean, expected.mean(0))
    assert not prediction.members.requires_grad


def test_regression_adds_noise_to_spread() -> None:
    networks = [Counted(4, 2) for _ in range(3)]
    noise = torch.tensor([0.1, 0.2, 0.6], dtype=torch.float64)
    x = torch.randn(6, 4)
    p = Posterior(networks, noise, "regression").to("cpu").predict(x)
    outputs = torch.stack([net.linear(x) for net in networks]).detach()
    torch.testing.assert_close(p.mean, outputs.mean(0))
    torch.testing.assert_close(p.aleatoric, torch.full((6, 2), 0.3))
    torch.testing.assert_close(p.epistemic, ((outputs - outputs.mean(0)) ** 2).mean(0))
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    assert p.entropy is None and p.expected_entropy is None and p.mutual_information is None


def test_a_mixture_of_gaussians_has_that_variance() -> None:
    """Law of total variance for the regression's predictive, by Monte Carlo."""
    networks = [Counted(1, 1) for _ in range(4)]
    posterior = Posterior(networks, torch.full((4,), 0.25), "regression")
    p = posterior.predict(torch.tensor([[2.0]]))
    draws = p.members[torch.randint(4, (200_000,)), 0, 0] + 0.5 * torch.randn(200_000)
    assert float(draws.var()) == pytest.approx(float(p.total), rel=0.02)
