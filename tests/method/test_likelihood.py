"""Equations 9 to 13 against scipy, autograd and hand-worked values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dllp.evaluation import metrics
from dllp.method import gates, likelihood


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


@given(d=st.floats(1e-3, 1e3), classes=st.integers(2, 7), seed=st.integers(0, 1000))
def test_equation_9_is_a_product_of_gaussians(d: float, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(5, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (5,), generator=generator)
    residual = likelihood.residuals(outputs, labels, "classification")
    value = likelihood.gaussian_log_likelihood(residual, torch.tensor(math.log(d), dtype=torch.float64))
    onehot, p = np.eye(classes)[labels.numpy()], outputs.softmax(1).numpy()
    expected = stats.norm.logpdf(onehot, loc=p, scale=1 / d).sum(1).mean()
    assert float(value) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_equation_9_for_a_regression() -> None:
    outputs, targets, log_d = numbers(8, 2), numbers(8, 2, scale=3.0), torch.tensor(0.7, dtype=torch.float64)
    value = likelihood.gaussian_log_likelihood(likelihood.residuals(outputs, targets, "regression"), log_d)
    expected = stats.norm.logpdf(targets.numpy(), loc=outputs.numpy(), scale=math.exp(-0.7)).sum(1).mean()
    assert float(value) == pytest.approx(expected, rel=1e-12)


@given(log_d=st.floats(-3, 3), seed=st.integers(0, 1000))
def test_noise_gradient_is_the_derivative(log_d: float, seed: int) -> None:
    residual = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    at = torch.tensor(log_d, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(likelihood.gaussian_log_likelihood(residual, at), at)
    torch.testing.assert_close(likelihood.noise_gradient(residual, at.detach()), expected, rtol=1e-9, atol=1e-9)


def test_the_fitted_noise_is_the_maximum_and_brier_over_classes() -> None:
    outputs, labels = numbers(40, 5, scale=2.0), torch.randint(5, (40,))
    residual = likelihood.residuals(outputs, labels, "classification")
    noise = residual.square().mean()
    log_d = -0.5 * noise.log()
    assert float(likelihood.noise_gradient(residual, log_d)) == pytest.approx(0, abs=1e-9)
    brier = float((F.one_hot(labels, 5) - outputs.softmax(1)).square().sum(1).mean())
    assert float(noise) == pytest.approx(brier / 5, rel=1e-12)
    assert float(noise) == pytest.approx(metrics.brier(outputs.softmax(1), labels) / 5, rel=1e-6)
    best = likelihood.gaussian_log_likelihood(residual, log_d)
    for step in (-0.1, 0.1):
        assert likelihood.gaussian_log_likelihood(residual, log_d + step) < best


def test_residuals_of_a_certain_answer_vanish_and_sum_to_zero() -> None:
    outputs, labels = 1000 * F.one_hot(torch.tensor([0, 2]), 3).double(), torch.tensor([0, 2])
    assert likelihood.residuals(outputs, labels, "classification").abs().max() == 0
    residual = likelihood.residuals(numbers(7, 3), torch.arange(7) % 3, "classification")
    torch.testing.assert_close(residual.sum(1), torch.zeros(7, dtype=torch.float64))


def test_task_loss_of_a_classification_is_cross_entropy() -> None:
    outputs, labels = numbers(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    by_hand = -torch.stack([outputs[i].softmax(0)[labels[i]].log() for i in range(6)]).mean()
    torch.testing.assert_close(likelihood.task_loss(outputs, labels, "classification"), by_hand)


@pytest.mark.parametrize("shape", [(6, 1), (6, 3)])
def test_task_loss_of_a_regression_averages_examples_and_outputs(shape: tuple[int, int]) -> None:
    outputs, targets = numbers(*shape), numbers(*shape)
    by_hand = sum(float((outputs[i] - targets[i]).square().sum()) for i in range(6)) / outputs.numel()
    assert float(likelihood.task_loss(outputs, targets, "regression")) == pytest.approx(by_hand, rel=1e-12)
    if shape[1] == 1:
        flat = likelihood.task_loss(outputs, targets[:, 0], "regression")
        assert float(flat) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_teacher_loss_is_least_where_both_agree_and_its_gradient_keeps_its_size(temperature: float) -> None:
    outputs, taught = numbers(5, 3).requires_grad_(), numbers(5, 3)
    soft = (taught / temperature).softmax(1)
    loss = likelihood.teacher_loss(outputs, soft, "classification", temperature)
    (gradient,) = torch.autograd.grad(loss, outputs)
    expected = temperature * ((outputs.detach() / temperature).softmax(1) - soft) / 5
    torch.testing.assert_close(gradient, expected)
    least = likelihood.teacher_loss(taught, soft, "classification", temperature)
    entropy = temperature**2 * float(torch.special.entr(soft).sum(1).mean())
    assert float(least) == pytest.approx(entropy, rel=1e-12) and float(loss.detach()) > float(least)


def test_teacher_loss_to_certain_predictions_is_the_task_loss() -> None:
    outputs, labels = numbers(5, 3), torch.tensor([0, 1, 2, 0, 1])
    sure = F.one_hot(labels, 3).double()
    hard = likelihood.task_loss(outputs, labels, "classification")
    torch.testing.assert_close(likelihood.teacher_loss(outputs, sure, "classification", 1.0), hard)
    squared = likelihood.teacher_loss(outputs, sure, "regression", 3.0)
    torch.testing.assert_close(squared, (outputs - sure).square().mean())


def test_budget_energy_pulls_towards_the_ramp_from_both_sides() -> None:
    fraction = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64, requires_grad=True)
    ramp, multiplier = torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.3, 0.0, -0.4], dtype=torch.float64)
    energy, gap = gates.budget_energy(fraction, ramp, multiplier, 10.0)
    torch.testing.assert_close(gap, torch.tensor([0.4, 0.0, -0.3], dtype=torch.float64))
    torch.testing.assert_close(energy, torch.tensor([0.27 + 1.6, 0.0, -0.08 + 0.9], dtype=torch.float64))
    (slope,) = torch.autograd.grad(energy.sum(), fraction)
    torch.testing.assert_close(slope, torch.tensor([0.3 + 8.0, 0.0, -0.4 - 6.0], dtype=torch.float64))


def test_undecided_counts_gates_between_5_and_95_percent() -> None:
    theta = torch.tensor([[0.0, 0.04, 0.06, 0.5], [0.94, 0.96, 1.0, 0.99]])
    assert gates.undecided(theta).tolist() == [0.5, 0.25]
