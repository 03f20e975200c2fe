"""Scales of channels against a naive computation: gammas where a norm reads a unit, filters elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dllp
from dllp.structure.groups import Structure, discover
from dllp.structure.slicing import Group, Slice
from dllp.training import gating
from dllp.training.gating import Scales, channel_scales
from dllp.training.particles import Particles
from tests.support import networks
from tests.support.particles import CASES, CPU, both_layouts, random_network, setting

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d)


class Split(nn.Module):
    """A norm reads half of the first convolution's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(4), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.conv(x).chunk(2, 1)
        return self.last(torch.cat([self.norm(left), right], 1)).mean((2, 3))


def naive_scale(model: nn.Module, structure: Structure, group: int, unit: int) -> float:
    """RMS of the gammas of a unit, or of its filters where no norm with gammas reads it; a buffer is no weight."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    gammas, weights = [], []
    for piece in structure.groups[group].slices:
        module = modules[piece.module]
        value = parameters.get(piece.name, torch.empty(0)) if piece.role == "write" else torch.empty(0)
        for k in (piece.unit == unit).nonzero().flatten().tolist() if value.numel() else ():
            if isinstance(module, NORMS):
                gammas += [value[k].item()] if piece.name.endswith("weight") else []
            elif value.dim() > 1:
                weights += value.select(piece.axis, k).flatten().tolist()
    values = gammas or weights
    return math.sqrt(sum(v * v for v in values) / len(values))


@both_layouts
@pytest.mark.parametrize("name", CASES)
def test_scales_equal_a_naive_computation(name: str, channels_last: bool) -> None:
    build, example = CASES[name]
    particles, structure = setting(build, example(), channels_last)
    scales = channel_scales(particles.networks[0], structure, particles.layout, CPU)
    found = scales.of(particles.rows).abs()
    assert found.shape == (2, structure.units) and scales.modules == tuple(g.name for g in structure.groups)
    assert scales.lengths == tuple(g.units for g in structure.groups)
    for row, model in zip(found, particles.networks, strict=True):
        wanted = [naive_scale(model, structure, g, u) for g, k in enumerate(scales.lengths) for u in range(k)]
        torch.testing.assert_close(row, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_units_that_no_norm_reads_have_their_filters() -> None:
    """The groups are made by hand: discovery pairs the channels of equal parts."""
    model = random_network(Split)
    half = torch.tensor([0, 1, 2, 3])
    every = torch.arange(8)
    pieces = (Slice("conv.weight", 0, every), Slice("norm.weight", 0, half), Slice("last.weight", 1, every, "read"))
    structure = replace(discover(model, networks.images()), groups=(Group("conv", 8, pieces),))
    particles = Particles([model])
    found = channel_scales(model, structure, particles.layout, CPU).of(particles.rows)[0]
    wanted = [naive_scale(model, structure, 0, unit) for unit in range(8)]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    assert found[0].item() == pytest.approx(abs(model.norm.weight[0].item()))


@pytest.mark.parametrize("name", CASES)
def test_every_coordinate_belongs_to_one_unit(name: str) -> None:
    build, example = CASES[name]
    particles, structure = setting(build, example(), n=1)
    scales = channel_scales(particles.networks[0], structure, particles.layout, CPU)
    real = torch.arange(scales.coordinates.shape[1]) < scales.count[:, None]
    assert bool((scales.count >= 1).all()) and bool((scales.coordinates[~real] == particles.layout.spare).all())
    used = scales.coordinates[real]
    assert len(used.unique()) == len(used) == int(scales.count.sum())
    assert bool(particles.layout.learnable(particles.networks[0])[used].all())


def test_a_weight_of_several_groups_counts_for_one_of_them() -> None:
    """Rows are heads by dims: half of the columns of each row are the head's, the others the dim's."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    heads, dims = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    found = discover(model, torch.randn(2, 6))
    groups = tuple(Group(name, 2, (Slice("0.weight", 0, unit),)) for name, unit in (("heads", heads), ("dims", dims)))
    particles = Particles([model])
    scales = channel_scales(model, replace(found, groups=groups), particles.layout, CPU)
    assert scales.count.tolist() == [6, 6, 6, 6]
    assert len(scales.coordinates.unique()) == 24
    weight = model[0].weight.detach()
    mine = (torch.arange(4)[:, None] + torch.arange(6)) % 2 == 0
    wanted = [
        weight[(units == u)[:, None] & part].square().mean().sqrt()
        for units, part in ((heads, mine), (dims, ~mine))
        for u in range(2)
    ]
    torch.testing.assert_close(scales.of(particles.rows)[0], torch.stack(wanted))


def test_units_of_unlike_sizes_need_no_padding() -> None:
    """Neurons have hundreds of weights, a head tens of thousands: memory is that of the weights."""
    model = nn.Sequential(nn.Linear(40, 3), nn.ReLU(), nn.Linear(3, 500), nn.ReLU(), nn.Linear(500, 2))
    particles, structure = setting(lambda: model, torch.randn(2, 40), n=1)
    scales = channel_scales(model, structure, particles.layout, CPU)
    assert sorted(scales.parts) == [(3, 40), (500, 3)] and len(scales.at) == 3 * 40 + 500 * 3
    unit = torch.arange(503.0)[None]
    found = torch.zeros(particles.layout.size).index_copy(0, scales.at, scales.at_coordinates(unit)[0])
    of_first, of_second = (particles.layout.segments[f"{k}.weight"].view(found) for k in (0, 2))
    assert torch.equal(of_first, unit[0, :3, None].expand(3, 40))
    assert torch.equal(of_second, unit[0, 3:, None].expand(500, 3))


def test_sums_and_spread() -> None:
    scales = Scales.of_pairs(torch.arange(7), torch.arange(7), ("a", "b", "c"), (4, 1, 2), 7, CPU)
    values = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 2, 0, 3]])
    assert scales.module_sums(values).tolist() == [[10, 5, 13], [1, 2, 3]]
    assert scales.spread(torch.tensor([[1.0, 2, 3], [4, 5, 6]])).tolist() == [[1] * 4 + [2, 3, 3], [4] * 4 + [5, 6, 6]]
    # one is the other's transpose
    other = torch.tensor([[0.5, -1, 2], [1, 1, 4]])
    torch.testing.assert_close((scales.spread(other) * values).sum(), (other * scales.module_sums(values)).sum())


def test_long_runs_of_coordinates_are_copied_as_one() -> None:
    """Heads, neurons and scattered weights in one list: reading and adding are those of single numbers."""
    at = torch.cat([torch.arange(700, 1300), torch.arange(10, 600, 2), torch.arange(2000, 2300)])
    unit = torch.cat([torch.zeros(600), torch.arange(1, 6).repeat_interleave(59), torch.full((300,), 6)]).long()
    scales = Scales.of_pairs(unit, at, ("a",), (7,), 2999, torch.device("cpu"))
    assert sum(isinstance(piece, slice) for piece, _ in scales.pieces) == 2 and not torch.equal(scales.at, at)
    rows = torch.randn(2, 3000)
    assert torch.equal(scales.take(rows), rows[:, scales.at])
    values, added = torch.randn(2, len(at)), rows.clone()
    scales.add(added, values, -1.0)
    assert torch.equal(scales.take(added), scales.take(rows) - values)
    rest = torch.ones(3000, dtype=torch.bool)
    rest[at] = False
    assert torch.equal(added[:, rest], rows[:, rest])
    found = torch.zeros(1, 3000)
    scales.add(found, scales.at_coordinates(torch.arange(7.0)[None]))
    assert torch.equal(found[0, at], unit.float())
    factors = torch.randn(2, 7)
    assert torch.equal(scales.times(values.clone(), factors), values * scales.at_coordinates(factors))


@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_does_not_depend_on_how_coordinates_are_copied(optimizer: str, particles: int) -> None:
    """Runs of consecutive coordinates are shrunk in place, others in copies: the same numbers but for rounding."""
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    data, found = (torch.randn(64, 8), torch.arange(64) % 3), []
    for run in (1, 8, 10_000):
        with mock.patch.object(gating, "RUN", run):
            result = dllp.prune(
                model, data, progress=False, particles=particles, optimizer=optimizer, keep_flops=0.5, epochs=3,
                batch_size=16, round_to=1, open_until=0.0, ramp_until=0.5, discrete_at=1.0, init="given", device="cpu",
            )  # fmt: skip
        found.append(torch.cat([p.flatten() for net in result.particles for p in net.reference.parameters()]))
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=1e-5, atol=1e-7)  # a sum is rounded once or twice
