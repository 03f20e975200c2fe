"""Latency budgets: predictions, decisions and refusals against a runtime whose times are a known step function."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dllp
from dllp.cli.main import main
from dllp.deploy import profiles
from dllp.deploy.profiles import Clock, measure_profile, timer_of
from dllp.errors import ConfigError, DllpError, StructureError
from dllp.structure.groups import Structure, discover
from dllp.structure.latency import Latency, Profile, hard, latency, levels
from dllp.structure.select import select, select_measured
from tests.support.clock import OVERHEAD, STEP, StepTimer

SHAPE = (3, 8, 8)


class Net(nn.Module):
    """A residual block, a depthwise and a grouped convolution, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.outer = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 96, 1), nn.Conv2d(96, 64, 1)
        self.depthwise, self.wide = nn.Conv2d(64, 64, 3, groups=64), nn.Conv2d(64, 128, 1)
        self.grouped = nn.Conv2d(128, 32, 1, groups=2)
        self.linear = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = (x + self.outer(self.inner(x).relu())).relu()
        x = self.wide(self.depthwise(x)).relu()
        return self.linear(self.grouped(x).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def structure(model: nn.Module) -> Structure:
    return discover(model, torch.zeros(2, *SHAPE))


@pytest.fixture(scope="module")
def profile(model: nn.Module) -> Profile:
    return measure_profile(model, SHAPE, runtime="torch", timer=StepTimer(SHAPE))


@pytest.fixture(scope="module")
def cost(structure: Structure, profile: Profile) -> Latency:
    return latency(structure, profile)


def test_the_prediction_is_the_time_of_the_cut_network(
    model: nn.Module, structure: Structure, profile: Profile, cost: Latency
) -> None:
    assert profile.overhead == pytest.approx(OVERHEAD, rel=1e-6)
    timer, generator = StepTimer(SHAPE), torch.Generator().manual_seed(0)
    for _ in range(10):
        drawn = [each[int(torch.randint(len(each), (), generator=generator))] for each in levels(structure)]
        gates = hard(structure, dict(enumerate(drawn)))
        network = profiles.cut(model, profiles.recipe(model, structure.groups, gates.bool()))
        assert cost.expected(gates).item() == pytest.approx(timer.networks([network])[0], rel=1e-9)


def test_between_measured_widths_time_is_bilinear_and_its_gradient_is_right_where_it_is_convex(
    structure: Structure, cost: Latency
) -> None:
    inner = next(g for g, group in enumerate(structure.groups) if group.name == "inner")
    low, high = (cost.expected(hard(structure, {inner: count})) for count in levels(structure)[inner][2:4])
    theta = hard(structure, {inner: levels(structure)[inner][2]})
    here = structure.slices[inner]
    count = levels(structure)[inner][3]
    theta[here][levels(structure)[inner][2] : count] = 0.25
    assert cost.expected(theta).item() == pytest.approx((0.75 * low + 0.25 * high).item())
    torch.manual_seed(0)
    theta = torch.rand(2, structure.units, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(cost.expected, (theta,))
    assert cost.to("cpu", torch.float32).expected(theta).shape == (2,)


def test_where_time_is_flat_its_gradient_is_that_of_the_convex_envelope(structure: Structure, profile: Profile) -> None:
    inner = next(g for g, group in enumerate(structure.groups) if group.name == "inner")
    counts, here = levels(structure)[inner], structure.slices[inner]
    stairs = dict(zip(counts, (1.0, 3.0, 3.0, 3.0, 8.0, 9.0), strict=True))
    tables = [
        replace(t, seconds=[[1e-3 * (stairs[n] if t.layer == "inner" else 1) for n in t.outputs] for _ in t.inputs])
        for t in profile.tables
    ]
    cost = latency(structure, replace(profile, tables=tables))
    times = [cost.expected(hard(structure, {inner: count})).item() for count in counts]
    corners: list[tuple[int, float]] = []
    for count, time in zip(counts, times, strict=True):
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) > _slope(corners[-1], (count, time)):
            corners.pop()
        corners.append((count, time))
    assert [count for count, _ in corners] == [16, 64, 96]
    for count, after in pairwise(counts):
        theta = hard(structure, {inner: count})
        theta[here.start + count] = 0.5
        (found,) = torch.autograd.grad(cost.expected(theta.requires_grad_()), theta)
        (wanted,) = (_slope(a, b) for a, b in pairwise(corners) if a[0] <= count and after <= b[0])
        torch.testing.assert_close(found[here], torch.full_like(found[here], wanted))


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def test_soft_gates_below_the_first_width_save_nothing_more(structure: Structure, cost: Latency) -> None:
    first = torch.zeros(structure.units, dtype=torch.float64)
    for here, step in zip(structure.slices, cost.chunks, strict=True):
        first[here][:step] = 1  # the least that a decision leaves
    fewer = (first / 10).requires_grad_()
    time = cost.expected(fewer)
    assert time.item() == pytest.approx(cost.expected(first).item(), rel=1e-12)
    assert not torch.autograd.grad(time, fewer)[0].any()


def log_odds(structure: Structure, logits: Tensor, gates: Tensor) -> float:
    """Log-probability of a choice over that of each gate's likelier state, but for gates in branches that are gone."""
    total = 0.0
    for part, around in zip(structure.slices, structure.holders, strict=True):
        if all(gates[structure.slices[b].start] for b in around):
            kept = gates[part].bool()
            total += logits[part][kept].clamp_max(0).sum().item() - logits[part][~kept].clamp_min(0).sum().item()
    return total


def every_choice(structure: Structure, logits: Tensor) -> Tensor:
    """(choices, U): the likeliest units of each group, in all measured widths; those of a branch that is gone once."""
    order = [logits[part].argsort(descending=True) + part.start for part in structure.slices]
    counts = [
        [0, *found] if group.gone else found for group, found in zip(structure.groups, levels(structure), strict=True)
    ]
    rows = []
    for choice in product(*counts):
        gone = [any(choice[b] == 0 for b in around) for around in structure.holders]
        if all(count == found[0] for count, found, off in zip(choice, counts, gone, strict=True) if off):
            rows.append(torch.zeros(structure.units, dtype=torch.float64))
            for units, count, off in zip(order, choice, gone, strict=True):
                rows[-1][units[:count]] = float(not off)
    return torch.stack(rows)


@pytest.mark.parametrize("units", ["channels", "both"])
def test_a_decision_is_the_most_probable_one_that_fits(model: nn.Module, profile: Profile, units: str) -> None:
    structure = discover(model, torch.zeros(2, *SHAPE), units=units)
    cost, best = latency(structure, profile), 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        drawn = [2 * torch.randn(1, generator=generator) + 3 * torch.randn(g.units, generator=generator)
                 for g in structure.groups]  # fmt: skip
        logits = torch.cat(drawn).double()
        choices = every_choice(structure, logits)
        times, worth = cost.expected(choices), torch.tensor([log_odds(structure, logits, c) for c in choices])
        found = worth.where(times <= 0.4 * cost.dense, -torch.inf).argmax()
        kept = select(structure, logits, cost=cost, keep=times[found].item() / cost.dense)
        own = log_odds(structure, logits, kept)
        assert own >= worth[found] - 25  # one chunk is worth as much
        best += own >= worth[found] - 1e-9
    assert best >= 7


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.8])
def test_a_decision_meets_the_budget_and_ends_where_time_steps_up(
    structure: Structure, cost: Latency, keep: float
) -> None:
    logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(1))
    kept = select(structure, logits, cost=cost, keep=keep)
    time = cost.expected(kept.double()).item()
    assert (keep - 0.15) * cost.dense < time <= keep * cost.dense * (1 + 1e-9)
    for group, here in zip(structure.groups, structure.slices, strict=True):
        closed = (~kept[here]).nonzero().flatten() + here.start
        if len(closed):
            more = kept.clone()
            chunk = cost.chunks[structure.groups.index(group)]
            more[closed[logits[closed].argsort(descending=True)][:chunk]] = True
            assert cost.expected(more.double()).item() > time, group.name  # no unit is given up for nothing
    wide = next(here for g, here in zip(structure.groups, structure.slices, strict=True) if g.name == "first")
    assert int(kept[wide].sum()) % STEP == 0


def test_a_measured_time_that_differs_is_corrected(model: nn.Module, structure: Structure, profile: Profile) -> None:
    logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(2))
    timer = StepTimer(SHAPE, slower=1.2)
    clock = Clock(structure, model, torch.zeros(2, *SHAPE), profile, timer=timer)
    kept = select_measured(structure, logits, clock.latency, 0.5)
    found = clock.outcome(0.5, kept[None])
    assert found["measured"][0] == pytest.approx(1.2 * found["predicted"][0])
    assert abs(found["measured"][0] / 0.5 - 1) < 0.05 and "off" not in found["text"]
    plain = select(structure, logits, cost=clock.latency, keep=0.5)
    assert "+" in clock.outcome(0.5, plain[None])["text"]
    assert timer.measured <= 5


def test_a_budget_below_the_least_widths_says_the_least(structure: Structure, cost: Latency) -> None:
    least = cost.expected(hard(structure, dict(enumerate(cost.chunks)))).item() / cost.dense
    with pytest.raises(StructureError, match=f"take {least:.4f} of the dense network's time"):
        select(structure, torch.zeros(structure.units), cost=cost, keep=least * 0.99)
    select(structure, torch.zeros(structure.units), cost=cost, keep=least * 1.01)


def test_a_profile_is_the_same_after_a_round_trip(profile: Profile, tmp_path: Path) -> None:
    profile.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile


def test_other_networks_versions_and_damaged_files_are_refused(
    model: nn.Module, structure: Structure, profile: Profile, tmp_path: Path
) -> None:
    example = torch.zeros(2, *SHAPE)
    other = discover(nn.Sequential(nn.Conv2d(3, 32, 1), nn.Conv2d(32, 4, 1)), example)
    with pytest.raises(ConfigError, match="of another network"):
        latency(other, profile)
    with pytest.raises(ConfigError, match=r"of torch 0\.1, here is torch"):
        Clock(structure, model, example, replace(profile, versions={"torch": "0.1"}))
    with pytest.raises(ConfigError, match="use onnxruntime, torch"):
        Clock(structure, model, example, replace(profile, runtime="tflite"))
    with pytest.raises(ConfigError, match="every layer once"):
        latency(structure, replace(profile, tables=profile.tables[1:]))
    profile.write(tmp_path / "profile.json")
    content = json.loads((tmp_path / "profile.json").read_text())
    content["tables"][0]["seconds"][0][0] = -1.0
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="damaged at layer first"):
        Profile.read(tmp_path / "profile.json")
    with pytest.raises(DllpError, match=r"nowhere\.json"):
        Profile.read(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="choose onnxruntime"):
        timer_of("tflite", SHAPE, 1, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        timer_of("torch", SHAPE, 0, 1)
    with pytest.raises(ConfigError, match="one input tensor"):
        Clock(structure, model, (example, example), profile)


@pytest.mark.parametrize(("epochs", "units"), [(0, "channels"), (2, "channels"), (0, None)])
def test_a_profile_of_another_machine_prunes_and_is_not_measured(
    model: nn.Module, profile: Profile, epochs: int, units: Any, tmp_path: Path
) -> None:
    path = tmp_path / "target.json"
    replace(profile, machine="a phone").write(path)
    x, y = torch.randn(32, *SHAPE), torch.arange(32) % 10
    options = dict(init="given", batch_size=16, device="cpu", progress=False)
    result = dllp.prune(model, (x, y), keep_latency=0.5, epochs=epochs, units=units, profile=path, **options)
    told = result.info["latency"]
    assert "measured" not in told and "another machine, a phone" in told["text"]
    assert 0.3 < told["predicted"][0] <= 0.5 + 1e-9
    networks = [result.reference, result.model]
    dense, small = StepTimer(SHAPE).networks(networks)
    # a branch that is gone takes its share of the overhead along, which is a constant here
    assert small / dense == pytest.approx(told["predicted"][0], rel=1e-6 if units else 0.1)
    assert result.config.units == (units or "both")
    assert "50% of the time" in repr(result)


@pytest.mark.parametrize("runtime", ["onnxruntime", "torch", pytest.param("torch-cuda", marks=pytest.mark.cuda)])
def test_runtimes_give_times_for_every_width(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "SECONDS", 0.01)
    monkeypatch.setattr(profiles, "RUNS", 2)
    monkeypatch.setattr(profiles, "FRACTIONS", (0.5,))
    small = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.Flatten(), nn.Linear(256, 4)
    )
    found = measure_profile(small, SHAPE, runtime=runtime, batch=2)
    assert found.dense > 0 and all(t > 0 for table in found.tables for row in table.seconds for t in row)
    structure = discover(small, torch.zeros(2, *SHAPE))
    assert latency(structure, found).expected(hard(structure, {})).item() == pytest.approx(found.dense)
    again = timer_of(runtime, SHAPE, 1, 2).networks([small, small])
    assert all(seconds > 0 for seconds in again)


def test_a_profile_on_cuda_needs_a_gpu(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        measure_profile(model, SHAPE, runtime="torch-cuda")


def test_the_command_line_makes_and_uses_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "SECONDS", 0.01)
    monkeypatch.setattr(profiles, "RUNS", 2)
    monkeypatch.setattr(profiles, "FRACTIONS", (0.5,))
    path = tmp_path / "p.json"
    shape = ["--model", "small_cnn", "--shape", "1", "8", "8"]
    assert main(["profile", *shape, "--runtime", "torch", "--out", str(path)]) == 0
    assert "ms dense" in capsys.readouterr().out
    replace(Profile.read(path), machine="a phone").write(path)
    run = ["prune", "--model", "small_cnn", "--data", "digits", "--epochs", "1", "--device", "cpu", "--no-dense"]
    run += ["--out", str(tmp_path / "run")]
    assert main([*run, "--keep-latency", "0.8", "--profile", str(path)]) == 0
    assert "another machine, a phone" in capsys.readouterr().out
    assert Profile.read(tmp_path / "run" / "profile.json").machine == "a phone"
    assert main([*run, "--overwrite", "--keep-flops", "0.5", "--profile", str(path)]) == 2
    assert "a profile is for a latency budget" in capsys.readouterr().err
    assert main([*run, "--overwrite", "--keep-latency", "0.8", "--model", "mlp", "--profile", str(path)]) == 2
    assert "of another network" in capsys.readouterr().err


def test_budgets_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="keep_flops and keep_latency are both given"):
        dllp.Config(keep_flops=0.5, keep_latency=0.5)
    with pytest.raises(ConfigError, match="granularity = channel"):
        dllp.Config(keep_latency=0.5, granularity="weight")
    with pytest.raises(ConfigError, match="profile's widths"):
        dllp.Config(keep_latency=0.5, round_to=8)
