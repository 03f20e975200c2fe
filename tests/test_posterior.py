"""Predictions of the ensemble: identities, regression, cost, and mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dllp.errors import DataError
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
    assert (p.mutual_information >= 0).all() and (p.entropy < math.log(classes) + 1e-9).all()
    assert torch.isfinite(p.entropy).all()
    if n == 1:
        assert p.epistemic.abs().max() == 0 and p.mutual_information.abs().max() < 1e-9


@given(
    n=st.integers(1, 7), classes=st.integers(2, 6), sharpness=st.floats(0, 50), seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_equal_members_have_nothing_to_tell_each_other(
    n: int, classes: int, sharpness: float, seed: int, dtype: torch.dtype
) -> None:
    """The mean of equal numbers is rounded too: what is left of it must not be negative, nor be lost from the sum."""
    logits = sharpness * torch.randn(20, classes, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    p = decompose(logits.softmax(-1).expand(n, -1, -1))
    assert p.entropy is not None and p.expected_entropy is not None and p.mutual_information is not None
    assert (p.mutual_information >= 0).all() and (p.mutual_information < 1e-5).all()
    assert torch.equal(p.expected_entropy + p.mutual_information, p.entropy)


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


def test_maps_of_a_regression_keep_their_shape() -> None:
    networks = [nn.Conv2d(1, 2, 1) for _ in range(3)]
    x = torch.randn(4, 1, 5, 6)
    p = Posterior(networks, torch.tensor([0.1, 0.2, 0.6]), "regression").predict(x)
    outputs = torch.stack([network(x) for network in networks]).detach()
    torch.testing.assert_close(p.members, outputs)
    torch.testing.assert_close(p.mean, outputs.mean(0))
    torch.testing.assert_close(p.aleatoric, torch.full((4, 2, 5, 6), 0.3))
    torch.testing.assert_close(p.epistemic, outputs.var(0, correction=0))


def test_inputs_in_another_precision_are_converted_as_in_training() -> None:
    posterior, x = Posterior([convolution()], torch.ones(1)), torch.randn(2, 3, 8, 8)
    assert torch.equal(posterior.predict(x.double()).mean, posterior.predict(x).mean)


def test_a_mixture_of_gaussians_has_that_variance() -> None:
    """Law of total variance for the regression's predictive, by Monte Carlo."""
    networks = [Counted(1, 1) for _ in range(4)]
    posterior = Posterior(networks, torch.full((4,), 0.25), "regression")
    p = posterior.predict(torch.tensor([[2.0]]))
    draws = p.members[torch.randint(4, (200_000,)), 0, 0] + 0.5 * torch.randn(200_000)
    assert float(draws.var()) == pytest.approx(float(p.total), rel=0.02)


# ---- what a user can do wrong


def convolution() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    return nn.Sequential(*layers).eval()


IMAGES = "its first layer is Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)) of torch.float32"


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["torch.uint8", IMAGES, "as for training"]),
        (torch.zeros(2, 1, 8, 8), ["(2, 1, 8, 8)", IMAGES]),
        (torch.zeros(2, 192), ["(2, 192)", IMAGES]),
        (torch.zeros(3, 8, 8), ["(3, 8, 8)", IMAGES]),
        ([[0.0]], ["type list", "torch.as_tensor"]),
    ],
)
def test_mistakes_are_one_line(x: Any, told: list[str]) -> None:
    posterior = Posterior([convolution(), convolution()], torch.ones(2))
    with pytest.raises(DataError) as caught:
        posterior.predict(x)
    for word in told:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_that_are_not_finite_are_named(value: float) -> None:
    networks = [Counted()]
    x = torch.zeros(9, 4)
    x[7, 2] = x[8, 0] = value
    with pytest.raises(DataError, match="first in example 7"):
        Posterior(networks, torch.ones(1)).predict(x, batch_size=4)
    assert networks[0].calls == 0


def test_a_batch_that_the_network_loses_is_told() -> None:
    """An image without a batch, whose channels are taken for one."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(0, 1))
    with pytest.raises(DataError, match=r"\(3, 8, 8\).*24 outputs for 3 inputs"):
        Posterior([network], torch.ones(1)).predict(torch.zeros(3, 8, 8))


class Failing(Counted):
    """A network with an error of its own."""

    def forward(self, x: Tensor) -> Tensor:
        raise self.error

    error: Exception


def test_errors_of_the_network_stay_what_they_are() -> None:
    network = Failing()
    for error in (torch.OutOfMemoryError("full"), KeyError("mine")):
        network.error = error
        with pytest.raises(type(error)) as caught:
            Posterior([network], torch.ones(1)).predict(torch.zeros(2, 4))
        assert caught.value is error
    network.error = RuntimeError("first line\nsecond line")
    with pytest.raises(DataError, match=r"\(first line\)") as told:
        Posterior([network], torch.ones(1)).predict(torch.zeros(2, 4))
    assert told.value.__cause__ is network.error


def test_integers_are_for_the_network_to_take() -> None:
    class Scaled(Counted):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float() / 255)

    x = torch.randint(256, (5, 4)).to(torch.uint8)
    assert Posterior([Scaled()], torch.ones(1)).predict(x).mean.shape == (5, 3)


def test_answers_are_those_of_evaluation_whatever_the_mode() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    posterior, x = Posterior([network], torch.ones(1)), torch.randn(20, 4)
    before, state = posterior.predict(x).mean, {k: v.clone() for k, v in network.state_dict().items()}
    network.train()
    network[2].eval()
    assert torch.equal(posterior.predict(x).mean, before)
    assert all(torch.equal(v, state[k]) for k, v in network.state_dict().items())
    assert network.training and network[1].training and not network[2].training, "left as it was"


def test_answers_that_are_no_numbers_are_told() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    with torch.no_grad():
        network[0].weight.fill_(1e3)
    x = torch.ones(5, 4)
    x[3] = 1e38
    with pytest.raises(DataError, match="network 1 answers example 3 with NaN"):
        Posterior([network], torch.ones(1)).predict(x)
