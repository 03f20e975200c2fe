"""Gates drawn anew: what they give when nothing is open to chance, and how often they open when it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dllp
from dllp import Config, Result, sample_gates
from dllp.errors import ConfigError, DataError
from dllp.structure.groups import discover
from dllp.training.gating import WeightGating
from dllp.training.particles import Particles

CERTAIN = 40.0


def network() -> nn.Module:
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    body = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
    return nn.Sequential(*body, *end)


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 8, 8), torch.arange(n) % 3


@pytest.fixture(scope="module", params=["channel", "weight"])
def run(request: pytest.FixtureRequest) -> Result:
    torch.manual_seed(0)
    config = Config(keep_flops=0.5, granularity=request.param, epochs=2, batch_size=20, init="fresh", device="cpu")
    return dllp.prune(network(), data(), config)


def certain(result: Result, keep: Tensor) -> Result:
    """The run as if it had been sure of these decisions (n, U)."""
    logits = torch.where(keep.bool(), CERTAIN, -CERTAIN)
    return replace(result, gates=result.gates | {"logits": logits})


def test_certain_gates_give_the_extracted_networks(run: Result) -> None:
    x = data(9)[0]
    drawn = sample_gates(certain(run, run.gates["keep"]), x, 2)
    assert len(drawn) == 2 * len(run.posterior)
    expected = run.posterior.members(x).repeat_interleave(2, 0)
    torch.testing.assert_close(drawn.members(x), expected, atol=1e-5, rtol=1e-4)
    whole = sample_gates(certain(run, torch.ones_like(run.gates["keep"])), x, 1, temperature=0.5)
    references = torch.stack([particle.reference(x).softmax(1) for particle in run.particles]).detach()
    torch.testing.assert_close(whole.members(x), references, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("run", ["weight"], indirect=True)
def test_draws_follow_theta_and_the_seed(run: Result) -> None:
    theta = 0.3
    open_to_chance = replace(run, gates=run.gates | {"logits": torch.full_like(run.gates["logits"], theta).logit()})
    drawn = sample_gates(open_to_chance, data(2)[0], 20, seed=1)
    weights = torch.stack([net.get_parameter("3.weight") for net in drawn.networks])
    assert float((weights != 0).double().mean()) == pytest.approx(theta, abs=0.01)
    each = (weights != 0).double().mean((1, 2, 3, 4))
    assert float(each.std()) == pytest.approx((theta * (1 - theta) / weights[0].numel()) ** 0.5, rel=0.5), "independent"
    same, other = (sample_gates(open_to_chance, data(2)[0], 1, seed=s).networks[0] for s in (1, 2))
    assert torch.equal(same.get_parameter("3.weight"), weights[0])
    assert not torch.equal(other.get_parameter("3.weight"), weights[0])


def test_soft_gates_lie_between(run: Result) -> None:
    x = data(3)[0]
    undecided = replace(run, gates=run.gates | {"logits": torch.zeros_like(run.gates["logits"])})
    drawn = sample_gates(undecided, x, 1, temperature=1.0)
    name = "3.weight"
    share = (drawn.networks[0].get_parameter(name) / run.particles[0].reference.get_parameter(name)).detach()
    assert float(share.min()) > 0 and float(share.max()) < 1 and float(share.std()) > 0.1


def test_the_originals_stay_as_they_were(run: Result) -> None:
    before = [parameter.clone() for parameter in run.particles[0].reference.parameters()]
    sample_gates(run, data(2)[0], 1)
    assert all(torch.equal(a, b) for a, b in zip(before, run.particles[0].reference.parameters(), strict=True))


def test_gates_of_channels_last_weights_are_told_in_the_parameters_order() -> None:
    model = network()
    for last in (False, True):
        particles = Particles([model], channels_last=last)
        structure = discover(model, data(2)[0])
        gating = WeightGating(model, structure, particles.layout, torch.device("cpu"))
        values = torch.rand(1, gating.units)
        ones = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
        effective = gating.fold(ones, values[0])
        told = torch.cat([weight.contiguous().flatten() for weight in effective.values()])
        assert torch.equal(gating.in_order(values)[0], told)
    assert not torch.equal(told, values[0]), "the order did differ"


def test_mistakes(run: Result) -> None:
    x = data(2)[0]
    for call, kind, words in (
        (lambda: sample_gates(run, x, 0), ConfigError, "draws = 0: a whole number"),
        (lambda: sample_gates(run, x, True), ConfigError, "draws = True: a whole number"),
        (lambda: sample_gates(run, x, 1.5), ConfigError, "draws = 1.5"),  # type: ignore[arg-type]
        (lambda: sample_gates(replace(run, info={"method": "fpgm"}), x), ConfigError, "gates of fpgm were not learned"),
        (lambda: sample_gates(replace(run, gates=run.gates | {"logits": torch.zeros(2, 0)}), x), ConfigError, "dense"),
        (lambda: sample_gates(replace(run, gates=run.gates | {"logits": torch.zeros(2, 5)}), x), DataError, "5 gates"),
    ):
        with pytest.raises(kind, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
