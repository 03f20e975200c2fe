"""Statistics of batch norms after the decision: those of the decided networks on one batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dllp
from dllp import zoo
from dllp.training import step as steps
from dllp.training.forward import estimating
from dllp.training.state import RunState
from tests.support.short_runs import DIGITS

NORM = nn.BatchNorm2d


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), NORM(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 6, 3), NORM(6)).double()


def norms(model: nn.Module) -> list[NORM]:
    return [module for module in model.modules() if isinstance(module, NORM)]


@pytest.mark.parametrize("count", [1, 3])
def test_they_are_the_means_over_the_batches(count: int) -> None:
    model = network()
    batches = torch.randn(count, 20, 1, 8, 8, dtype=torch.float64).unbind()
    model(torch.randn(9, 1, 8, 8, dtype=torch.float64) + 3)
    alone = copy.deepcopy(model)
    for norm in norms(alone):
        norm.momentum = 1.0  # PyTorch's own words for "the last batch only"
    torch.manual_seed(1)
    seen = []
    for x in batches:
        alone(x)
        seen.append(copy.deepcopy([dict(norm.named_buffers()) for norm in norms(alone)]))
    torch.manual_seed(1)
    with estimating(model):
        for x in batches:
            model(x)
    for k, norm in enumerate(norms(model)):
        for name in ("running_mean", "running_var"):
            wanted = torch.stack([each[k][name] for each in seen]).mean(0)
            torch.testing.assert_close(getattr(norm, name), wanted)
        assert norm.momentum == 0.1 and norm.num_batches_tracked == 1


def test_a_backward_pass_goes_through() -> None:
    model = network()
    with estimating(model, steps=1):
        found = model(torch.randn(20, 1, 8, 8, dtype=torch.float64))
    found.square().sum().backward()
    assert norms(model)[0].num_batches_tracked == 1
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_norms_at_rest_stay_as_they_are() -> None:
    model = network()
    norms(model)[0].eval()
    before = copy.deepcopy(model.state_dict())
    with estimating(model):
        model(torch.randn(20, 1, 8, 8, dtype=torch.float64))
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert {"1.running_mean", "1.running_var"} <= same and not {"5.running_mean", "5.running_var"} & same


def decided(monkeypatch: pytest.MonkeyPatch, estimated: bool, **changes: Any) -> dllp.Result:
    if not estimated:
        monkeypatch.setattr(steps, "estimate_norms", lambda state, batches: None)
    torch.manual_seed(0)
    model = zoo.build("small_cnn", num_classes=10, in_channels=1, image_size=8)
    config = dllp.Config(epochs=6, keep_flops=0.2, batch_size=64, warmup=0, device="cpu", particles=2, **changes)
    return dllp.prune(model, DIGITS.train, config, validation=DIGITS.test, progress=False)


def weights(result: dllp.Result) -> dict[str, Tensor]:
    return {
        f"{k}.{name}": value for k, particle in enumerate(result.particles)
        for name, value in particle.network.named_parameters()
    }  # fmt: skip


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_they_are_worth_it_and_training_does_not_see_them(granularity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step after another has the same weights; the decided networks are better by what was measured of them."""
    found = decided(monkeypatch, True, granularity=granularity)
    stale = decided(monkeypatch, False, granularity=granularity)
    for (name, value), other in zip(weights(found).items(), weights(stale).values(), strict=True):
        assert torch.equal(value, other), name
    (_, after, _), (_, lagging, _) = found.info["moments"], stale.info["moments"]
    for ours, theirs in zip(after["accuracy"], lagging["accuracy"], strict=True):
        assert ours > theirs + (0.1 if granularity == "channel" else 0)


def test_a_decision_at_the_end_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 1 as printed decides after convergence: nothing comes that would mend the statistics."""
    found, stale = (decided(monkeypatch, estimated, discrete_at=1.0) for estimated in (True, False))
    for ours, theirs in zip(found.info["moments"][-1]["accuracy"], stale.info["moments"][-1]["accuracy"], strict=True):
        assert ours > theirs


def test_random_numbers_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Tensor] = []
    estimate = steps.estimate_norms

    def watched(state: RunState, batches: Any) -> None:
        states.append(torch.get_rng_state())
        estimate(state, batches)
        states.append(torch.get_rng_state())

    monkeypatch.setattr(steps, "estimate_norms", watched)
    model = nn.Sequential(*[nn.Conv2d(1, 8, 3), NORM(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(128, 3)])
    data = torch.randn(64, 1, 6, 6), torch.arange(64) % 3
    dllp.prune(model, data, keep_flops=0.5, epochs=2, batch_size=16, warmup=0, device="cpu", progress=False)
    assert len(states) == 4 and all(torch.equal(a, b) for a, b in zip(states[::2], states[1::2], strict=True))


def test_a_loss_may_take_gradients() -> None:
    """A penalty on the gradient of the inputs needs them, where norms are estimated as in a step."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        x, y = batch[0].clone().requires_grad_(), batch[1]
        found = nn.functional.cross_entropy(net(x), y)
        (slope,) = torch.autograd.grad(found, x, create_graph=True)
        return found + slope.square().sum()

    model = nn.Sequential(nn.Conv2d(1, 8, 3), NORM(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    data = [(torch.randn(16, 1, 6, 6), torch.arange(16) % 3) for _ in range(4)]
    result = dllp.prune(model, data, keep_flops=0.5, epochs=2, warmup=0, device="cpu", progress=False, loss=loss)
    assert result.sizes[0].macs <= 0.5 * result.dense.macs


@pytest.mark.parametrize("accumulate", [1, 4])
def test_batches_go_through_in_the_parts_of_a_step(accumulate: int) -> None:
    """A batch that fits into memory in parts only must not go through whole; without batch norms none goes at all."""
    seen: list[int] = []

    def loss(net: nn.Module, batch: Any) -> Tensor:
        if not torch.is_grad_enabled() or net.training:
            seen.append(len(batch[0]))
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    data = [(torch.randn(16, 1, 6, 6), torch.arange(16) % 3) for _ in range(4)]
    for norm, passes in ((NORM(8), 2), (nn.Identity(), 0)):
        seen.clear()
        model = nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
        options: dict[str, Any] = dict(keep_flops=0.5, epochs=2, particles=1, warmup=0, device="cpu", progress=False)
        dllp.prune(model, data, loss=loss, accumulate=accumulate, **options)
        found = [size for size in seen if size > 2]  # two examples are looked at before a run
        assert found == [16 // accumulate] * ((8 + passes) * accumulate)
