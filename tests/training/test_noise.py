"""Noise that depends on the input: equation 9 with d(x), learned, extracted, saved, exported."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import dllp
from dllp.cli.main import main
from dllp.data import ArrayData
from dllp.deploy.export import export
from dllp.evaluation import evaluate, metrics
from dllp.method import likelihood
from dllp.posterior import Posterior
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.step import prepare, step
from dllp.zoo import build

LOW, HIGH = 0.05, 0.5


def residuals() -> Tensor:
    return torch.randn(30, 4, dtype=torch.float64)


def test_equation_9_is_a_gaussian_for_each_input() -> None:
    r, log_d = residuals(), torch.randn(30, dtype=torch.float64)
    exact = Normal(torch.zeros(4), (-log_d).exp()[:, None]).log_prob(r).sum(1).mean()
    torch.testing.assert_close(likelihood.gaussian_log_likelihood(r, log_d), exact)
    constant = torch.full((30,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(
        likelihood.gaussian_log_likelihood(r, constant), likelihood.gaussian_log_likelihood(r, constant[0])
    )


def test_the_head_is_fitted_and_excuses_nothing() -> None:
    r = residuals().requires_grad_()
    best = -0.5 * r.detach().square().mean(1).log()
    log_d = best.clone().requires_grad_()
    likelihood.head_loss(r, log_d).backward()
    assert r.grad is None, "large residuals stay errors to be made smaller"
    torch.testing.assert_close(log_d.grad, torch.zeros(30, dtype=torch.float64))
    with torch.no_grad():
        least = likelihood.head_loss(r, best)
        assert all(likelihood.head_loss(r, best + step) > least for step in (-0.1, 0.1))


def test_the_last_output_is_softly_bounded() -> None:
    outputs = torch.tensor([[1.0, 2.0, 0.5], [3.0, 4.0, 1e6], [5.0, 6.0, -1e6]])
    predictions, log_d = likelihood.split_noise(outputs)
    assert torch.equal(predictions, outputs[:, :2])
    assert log_d.tolist() == pytest.approx([0.5, 8.0, -8.0], abs=1e-3)


def test_the_fitted_noise_is_where_equation_9_is_largest() -> None:
    r = residuals()
    values = likelihood.fitted(float(r.square().mean()), 4)
    log_d = torch.tensor(values["fitted_noise"], dtype=torch.float64).log() * -0.5
    assert values["log_likelihood"] == pytest.approx(float(likelihood.gaussian_log_likelihood(r, log_d)), rel=1e-12)
    assert likelihood.fitted(0.0, 4) == {"fitted_noise": 0.0}


class Constant(nn.Module):
    """Two outputs and log d, whatever the input."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.values.expand(len(x), -1) * x


def test_a_posterior_divides_predictions_and_noise() -> None:
    networks = [Constant([1.0, 2.0, 0.1]), Constant([3.0, 0.0, 0.2])]
    x = torch.tensor([[1.0], [2.0]])
    regression = Posterior(networks, torch.ones(2), "regression", head=True).predict(x)
    torch.testing.assert_close(regression.mean, torch.tensor([[2.0, 1.0], [4.0, 2.0]]))
    expected = torch.stack([(-2 * 8 * (x * s / 8).tanh()).exp()[:, 0] for s in (0.1, 0.2)]).mean(0)
    assert regression.noise is not None
    torch.testing.assert_close(regression.noise, expected)
    torch.testing.assert_close(regression.aleatoric, expected[:, None].expand(2, 2))
    classes = Posterior(networks, torch.ones(2), head=True).predict(x)
    assert classes.mean.shape == (2, 2) and classes.noise is not None
    torch.testing.assert_close(classes.noise, expected)
    torch.testing.assert_close(classes.total, (classes.mean * (1 - classes.mean)).sum(1))
    assert [network.calls for network in networks] == [2, 2], "one forward pass each, noise included"


def two_levels(n: int = 800) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 1) * 2 - 1
    return x, x + torch.where(x > 0, HIGH, LOW) * torch.randn(n, 1)


def test_it_does_not_weigh_the_residuals_it_is_fitted_to() -> None:
    """A classifier that is sure has a d(x) without end: one wrong answer would then outweigh all others."""
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    y = (x @ torch.randn(6, 3)).argmax(1)
    network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3 + 1))
    options = {"keep_flops": 0.5, "epochs": 30, "batch_size": 40, "lr": 0.01, "init": "fresh", "device": "cpu"}
    config = dllp.Config(noise="input", likelihood="gaussian", beta=1.0, **options)  # type: ignore[arg-type]
    answers = dllp.prune(network, (x, y), config).posterior.predict(x)
    assert float((answers.mean.argmax(1) == y).double().mean()) > 0.9


@pytest.fixture(scope="module")
def run() -> dllp.Result:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    config = dllp.Config(
        task="regression", noise="input", keep_flops=0.5, epochs=32, batch_size=50, init="fresh", lr=0.05, device="cpu"
    )
    return dllp.prune(network, two_levels(), config)


def test_a_regression_learns_where_its_data_are_noisy(run: dllp.Result) -> None:
    at = torch.tensor([[-0.7], [-0.4], [0.4], [0.7]])
    p = run.posterior.predict(at)
    assert p.noise is not None
    deviations = p.noise.sqrt()
    assert torch.allclose(p.mean, at, atol=0.15)
    assert float(deviations[:2].max()) < 0.2 and float(deviations[2:].min()) > 0.3, "one level would be 0.36"
    assert float(run.posterior.noise.mean()) == pytest.approx((LOW**2 + HIGH**2) / 2, rel=0.3), "the constant one too"
    x, y = two_levels()
    rows = evaluate.measure(run, ArrayData(x, y)).rows
    constant = metrics.gaussian_nll(run.posterior.members(x)[0], float(run.posterior.noise[0]), y)
    assert rows[0].metrics["nll"] < constant - 0.3, "it pays to know"


def test_it_comes_back_from_disk_and_goes_into_a_graph(run: dllp.Result, tmp_path: Path) -> None:
    folder = run.save(tmp_path / "run")
    network = nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    again, x = dllp.load(folder, network), two_levels()[0][:50]
    a, b = run.posterior.predict(x), again.posterior.predict(x)
    torch.testing.assert_close(a.total, b.total)
    torch.testing.assert_close(a.noise, b.noise)
    assert export(run, tmp_path / "one.pt2", (1,), format="pt2").outputs == ("output", "noise")
    graph = export(run, tmp_path / "all.pt2", (1,), format="pt2", particle=None)
    mean, aleatoric, epistemic = torch.export.load(graph.path).module()(x)
    torch.testing.assert_close(mean, a.mean)
    torch.testing.assert_close(aleatoric, a.aleatoric)
    torch.testing.assert_close(epistemic, a.epistemic, atol=1e-6, rtol=1e-4)


def test_the_command_gives_networks_one_output_more(tmp_path: Path) -> None:
    words = [
        "--noise",
        "input",
        "--epochs",
        "2",
        "--batch-size",
        "128",
        "--keep-flops",
        "0.5",
        "--teacher",
        "posterior",
        "--no-dense",
    ]
    out = str(tmp_path / "run")
    assert main(["prune", *words, "--likelihood", "gaussian", "--out", out, "--quiet"]) == 0
    assert main(["evaluate", out, "--json", str(tmp_path / "a.json")]) == 0
    again = json.loads((tmp_path / "a.json").read_text())
    assert again == json.loads((tmp_path / "run" / "evaluation.json").read_text())
    result = dllp.load(out, build("small_cnn", 11, 1))
    p = result.posterior.predict(dllp.data.load("digits").test.inputs(slice(0, 20)))
    assert p.mean.shape == (20, 10) and p.noise is not None and len(p.noise.unique()) == 20


def test_a_network_without_the_output_is_refused() -> None:
    config = dllp.Config(noise="input", epochs=1, keep_flops=0.5, device="cpu")
    with pytest.raises(dllp.DataError, match="one output more than there are classes"):
        dllp.prune(build("small_cnn", 10, 1), "digits", config)
    x, y = two_levels(20)
    network = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(dllp.DataError, match="besides that for log d"):
        dllp.prune(network, (x, y), dllp.Config(task="regression", noise="input", epochs=1, device="cpu"))


@pytest.mark.parametrize("scale", [0.01, 0.5, 30.0])
def test_constant_noise_begins_at_the_targets_or_at_one(scale: float) -> None:
    """At the mean square of large targets; what lies below 1 is near enough to begin there."""
    begun: list[Tensor] = []
    x, network = torch.randn(20, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    y = scale * torch.randn(20, 2)
    config = dllp.Config(task="regression", keep_flops=0.6, epochs=1, batch_size=20, lr=1e-6)
    dllp.prune(network, (x, y), config, on_start=lambda state: begun.append(state.latents.noise().clone()))
    expected = max(1.0, float(y.square().mean()))
    assert begun[0].tolist() == pytest.approx([expected] * len(begun[0]), rel=1e-5)


def test_every_output_of_a_regression_is_an_observation() -> None:
    """N times the score is the gradient of all numbers' Gaussian log densities, where one batch holds them all."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y, log_d = torch.randn(10, 4).double(), torch.randn(10, 3).double(), 0.4
    wanted = Normal(network(x), math.exp(-log_d)).log_prob(y).sum()
    gradients = torch.autograd.grad(wanted, list(network.parameters()))
    config = dllp.Config(task="regression", epochs=1, particles=1, device="cpu").resolved()
    state = RunState(Particles([network]), None, config, num_data=y.numel(), steps_per_epoch=1)
    state.latents.log_d.fill_(log_d)
    prepare(state, x, y)
    step(state, x, y)
    for (name, _), expected in zip(network.named_parameters(), gradients, strict=True):
        segment = state.particles.layout.segments[name]
        torch.testing.assert_close(y.numel() * segment.view(state.scores[0]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_constant_noise_finds_the_residuals_of_large_targets_too(scale: float, beta: float) -> None:
    """Whatever the Stein term weighs, and however far from 1 they lie."""
    torch.manual_seed(0)
    x = torch.randn(400, 4)
    y = scale * (x[:, :1] - x[:, 1:2] + 0.5 * torch.randn(400, 1))
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    config = dllp.Config(
        task="regression", keep_flops=0.6, epochs=60, batch_size=40, init="fresh", lr=0.01 if scale == 1 else 0.001,
        beta=beta,
    )  # fmt: skip
    result = dllp.prune(network, (x, y), config)
    errors = (result.posterior.members(x) - y).square().mean((1, 2))
    assert torch.allclose(result.gates["noise"].log(), errors.log(), atol=0.3)
