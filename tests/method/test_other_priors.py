"""Equations 1 to 6: older methods as other priors, in closed form and in the training objective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dllp
from dllp.cli.main import main
from dllp.config import Config
from dllp.errors import ConfigError
from dllp.method import other_priors
from dllp.prepare import make_gating
from dllp.structure.groups import discover
from dllp.training.gating import Scales
from dllp.training.latents import replaced_prior
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.trainer import train
from dllp.zoo import small_cnn
from tests.support.commands import one_line
from tests.support.oracles import normal

OTHERS = ("laplace", "gaussian", "polarization", "hoyer")
GRID = torch.linspace(-4, 4, 80_001, dtype=torch.float64)


def maximum(observed: float, log_prior: Tensor) -> float:
    """The MAP estimate of a weight with one observation of unit noise, on a grid."""
    return float(GRID[(other_priors.gaussian_log_prob(GRID - observed, 1.0) + log_prior).argmax()])


@pytest.mark.parametrize("observed", [-2.5, -0.3, 0.2, 0.9, 3.0])
def test_the_map_of_a_laplace_prior_is_l1_and_of_a_gaussian_l2(observed: float) -> None:
    b, std = 0.8, 0.5
    soft = math.copysign(max(abs(observed) - 1 / b, 0), observed)  # equation 3: minimise (w - y)^2 / 2 + |w| / b
    assert maximum(observed, other_priors.laplace_log_prob(GRID, b)) == pytest.approx(soft, abs=2e-4)
    ridge = observed / (1 + 1 / std**2)  # equation 4: minimise (w - y)^2 / 2 + w^2 / (2 std^2)
    assert maximum(observed, other_priors.gaussian_log_prob(GRID, std)) == pytest.approx(ridge, abs=2e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_a_configuration_chooses_the_width_of_each_prior(name: str) -> None:
    """prior_scale is b, the standard deviation or a, and 1 over the strength of Hoyer."""
    width, t, w = 0.4, 1.2, normal(30).abs()
    prior, parameters = replaced_prior(Config(prior=name, prior_scale=width))  # type: ignore[arg-type]
    l1, l2 = w.abs().sum(), w.square().sum()
    energy = {
        "laplace": l1 / width,
        "gaussian": l2 / (2 * width**2),
        "polarization": (t * l1 - (w - w.mean()).abs().sum()) / width,
        "hoyer": l1**2 / l2 / width,
    }[name]
    constant = {"laplace": 30 * math.log(2 * width), "gaussian": 30 * math.log(width * math.sqrt(2 * math.pi))}
    torch.testing.assert_close(prior.log_prob(w, *parameters).sum(), -energy - constant.get(name, 0.0))


@pytest.mark.parametrize("name, parameters", [("laplace", (0.3,)), ("polarization", (1.2, 0.4)), ("hoyer", (2.0,))])
def test_unit_scores_are_gradients_within_their_scope(name: str, parameters: tuple[float, ...]) -> None:
    prior, lengths = other_priors.PRIORS[name], (3, 5, 4)
    values = normal(2, 12).abs().requires_grad_()
    parts = values.split(list(lengths), dim=1) if prior.scope == "module" else [values]
    total = sum(prior.log_prob(row, *parameters).sum() for part in parts for row in part)
    (expected,) = torch.autograd.grad(total, values)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(prior.unit_scores(values.detach(), lengths, *parameters), expected)


def test_pulls_carry_a_scales_score_to_its_coordinates() -> None:
    at = torch.tensor([[0, 1, 2], [3, 9, 9], [4, 5, 9]])  # 9 pads
    unit = torch.tensor([2, 0, 0, 1, 0, 2])
    scales = Scales.of_pairs(unit, torch.tensor([4, 0, 1, 3, 2, 5]), ("a",), (3,), 9, torch.device("cpu"))
    assert torch.equal(scales.coordinates, at)
    rows = normal(2, 10)
    rows[:, 9] = 0
    rows[1, 3] = 0
    leaf = rows.clone().requires_grad_()
    rms = (leaf[:, at].square().sum(-1) / scales.count + 1e-30).sqrt()
    (expected,) = torch.autograd.grad(other_priors.laplace_log_prob(rms, 0.3).sum(), leaf)
    sizes = scales.of(rows)
    pull = scales.pulls(sizes, other_priors.laplace_score(sizes, 0.3))
    found = torch.zeros_like(rows)
    found[:, at] = -pull[..., None] * rows[:, at]
    torch.testing.assert_close(found, expected)


def after_one_step(**changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The row before and after one step with open gates, and where the gated weights are."""
    torch.manual_seed(0)
    config = Config(
        keep_params=0.5, granularity="weight", particles=1, epochs=10, open_until=0.5, ramp_until=0.6, discrete_at=0.9,
        warmup=0.0, **changes,
    ).resolved()  # fmt: skip
    model = small_cnn().double()
    x, y = normal(16, 1, 8, 8), torch.arange(16) % 10
    particles = Particles.start(model, config, torch.device("cpu"))
    gating = make_gating(model, discover(model, x), particles, config, None)
    state = RunState(particles, gating, config, num_data=16, steps_per_epoch=1)
    seen = [particles.rows.clone()]
    train(state, Repeated(x, y), on_step=lambda state: seen.append(state.particles.rows.clone()))
    return seen[0], seen[1], gating.scales.coordinates[:, 0]


@dataclass
class Repeated:
    """One batch in each epoch, always the same."""

    x: Tensor
    y: Tensor
    steps: int = 1

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        yield from [(self.x, self.y)][start_step:]


@pytest.mark.parametrize("name", ["laplace", "gaussian"])
def test_a_step_follows_the_chosen_prior(name: str) -> None:
    wide, narrow = (after_one_step(prior=name, prior_scale=scale) for scale in (0.5, 0.05))
    before, at = wide[0], wide[2]
    w = before[:, at]
    step = (narrow[1] - wide[1])[:, at]
    # lr (1 + momentum) beta / N times the difference of both scores: the first step of Nesterov's momentum
    config = Config().resolved()
    factor = step_size(config) * (1 + config.momentum) * config.beta / 16
    score = other_priors.laplace_score if name == "laplace" else other_priors.gaussian_score
    torch.testing.assert_close(step, factor * (score(w, 0.05) - score(w, 0.5)), rtol=1e-6, atol=1e-12)
    others = torch.ones(before.shape[1], dtype=torch.bool)
    others[at] = False
    assert torch.equal(narrow[1][:, others], wide[1][:, others]), "the prior touches gated weights only"


def step_size(config: Config) -> float:
    """The learning rate of the first of ten steps without warm-up."""
    from dllp.method import schedule

    return schedule.learning_rate(0.1, peak=config.lr, end=config.lr_end, warmup=0.0)


@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize("name", OTHERS)
def test_every_prior_prunes_to_its_budget(name: str, granularity: str) -> None:
    data = (torch.randn(96, 1, 8, 8), torch.arange(96) % 10)
    config = Config(
        keep_flops=0.4, granularity=granularity, prior=name, particles=2, epochs=4, batch_size=32, lr_gates=0.2
    )  # pyright: ignore[reportArgumentType]
    result = dllp.prune(small_cnn(), data, config)
    for size in result.sizes:
        assert size.macs <= 0.4 * result.dense.macs
    plain = dllp.prune(small_cnn(), data, Config(**{**config.as_dict(), "prior": "spike_and_slab"}))
    assert not torch.equal(result.gates["logits"], plain.gates["logits"])
    assert torch.equal(result.gates["slab"], torch.full_like(result.gates["slab"], config.slab)), "it has no slab"


def test_invalid_parameters_are_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes in ({"prior_scale": 0.0}, {"prior_scale": -1.0}, {"prior": "cauchy"}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            Config(**changes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"closes no gate by itself: give a budget \(keep_flops\) or sparsity"):
        dllp.prune(
            small_cnn(), (torch.randn(8, 1, 8, 8), torch.arange(8)), Config(prior="laplace", granularity="weight")
        )
    assert main(["prune", "--prior", "laplace", "--prior-scale", "-1", "--out", str(tmp_path / "x")]) == 2
    one_line(capsys, "prior_scale = -1")
    assert main(["prune", "--prior", "cauchy", "--out", str(tmp_path / "x")]) == 2
    one_line(capsys, "prior", "laplace")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_a_prior_is_of_sizes(name: str) -> None:
    """A factor and its negative are drawn to 0 alike, and are as likely."""
    found: list[RunState] = []
    data = (torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    config = Config(keep_flops=0.5, epochs=1, batch_size=32, prior=name)  # type: ignore[arg-type]
    dllp.prune(small_cnn(), data, config, on_start=found.append)
    latents, rows = found[0].latents, found[0].particles.rows.clone()
    at = latents._gating.scales.coordinates[:, 0]
    rows[:, at] = torch.rand(len(rows), len(at)) + 0.1
    other = rows.clone()
    other[:, at[::3]] *= -1
    gates = torch.ones_like(latents.logits), torch.ones(())
    torch.testing.assert_close(
        *(latents.prior_pulls(latents._gating.scales.of(each), *gates, soft=True)[0] for each in (other, rows))
    )
    torch.testing.assert_close(latents.log_prior(other), latents.log_prior(rows))
