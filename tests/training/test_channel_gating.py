"""Gates of channels: budgets that are met, consumers' weights, and padded networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dllp.errors import StructureError
from dllp.structure.groups import Structure, discover
from dllp.structure.slicing import cut
from dllp.training.gating import ChannelGating
from dllp.training.particles import Layout, Particles
from tests.support import networks
from tests.support.particles import CASES, CPU, both_layouts, random_keep, random_network, setting


@pytest.fixture(scope="module")
def wide() -> tuple[Particles, Structure]:
    torch.manual_seed(0)
    return setting(lambda: networks.resnet((16, 32, 64), 3), networks.images())


@pytest.mark.parametrize("budget", ["flops", "params"])
@pytest.mark.parametrize("keep", [0.2, 0.45, 0.9, 1.0])
def test_channels_meet_the_budget(wide: tuple[Particles, Structure], budget: str, keep: float) -> None:
    particles, structure = wide
    model = particles.networks[0]
    gating = ChannelGating(model, structure, particles.layout, CPU)
    logits = torch.randn(gating.units)
    kept = gating.select(logits, budget, keep)  # type: ignore[arg-type]
    cost = getattr(gating, budget)
    assert keep - 0.005 <= cost.expected(kept.double()).item() / cost.dense <= keep + 1e-9
    small = cut(model, gating.recipe(model, kept))
    count = sum(p.numel() for p in small.parameters())
    assert gating.params.expected(kept.double()).item() == pytest.approx(count, rel=1e-12)


def test_channels_in_round_numbers_and_out_of_reach(wide: tuple[Particles, Structure]) -> None:
    particles, structure = wide
    gating = ChannelGating(particles.networks[0], structure, particles.layout, CPU, round_to=8)
    kept = gating.select(torch.randn(gating.units), "flops", 0.4)
    assert all(int(kept[part].sum()) % 8 == 0 for part in structure.slices)
    with pytest.raises(StructureError, match="cannot be reached"):
        gating.select(torch.randn(gating.units), "flops", 0.01)


@both_layouts
def test_channel_gates_multiply_the_consumers(channels_last: bool) -> None:
    particles, structure = setting(networks.chain, networks.images(), channels_last)
    model = particles.networks[1]
    gating = ChannelGating(model, structure, particles.layout, CPU)
    gates = torch.rand(gating.units)
    weights = gating.fold(dict(model.named_parameters()), gates)
    assert set(weights) == {"features.2.0.weight", "fc.weight"}
    assert torch.equal(weights["features.2.0.weight"], model.features[2][0].weight * gates[:8].view(1, 8, 1, 1))
    assert torch.equal(weights["fc.weight"], model.fc.weight * gates[8:])


@both_layouts
@pytest.mark.parametrize("name", CASES)
def test_padded_networks_equal_the_gated_one(name: str, channels_last: bool) -> None:
    build, example = CASES[name]
    models = [random_network(build).double().eval() for _ in range(2)]
    x = example().double() if example().is_floating_point() else example()
    structure = discover(models[0], x)
    particles = Particles(models, channels_last=channels_last)
    gating = ChannelGating(models[0], structure, particles.layout, CPU)
    logits = torch.randn(2, gating.units)
    keep = torch.stack([random_keep(structure.groups, seed) for seed in (1, 2)])
    padded = [gating.padded(k, row, 4) for k, row in zip(keep, logits, strict=True)]
    particles.slice([gating.recipe(model, pad) for model, pad in zip(models, padded, strict=True)])
    for model, part, pad, kept, row in zip(models, particles.sliced, padded, keep, logits, strict=True):
        for where in structure.slices:
            inside, extra = kept[where], (pad & ~kept)[where]
            total = int(pad[where].sum())
            assert not (inside & ~pad[where]).any() and (total % 4 == 0 or total == len(inside))
            assert int(extra.sum()) < 4
            out = ~pad[where]  # what pads is likelier than what stays out
            assert not (extra.any() and out.any()) or row[where][extra].min() >= row[where][out].max()
        fold, gates = gating.closed(part.network, pad, kept)
        weights = fold(dict(part.network.named_parameters()), gates)
        found = functional_call(part.network, weights, (x,))
        gating.fold.prepare(model)
        wanted = functional_call(model, gating.fold(dict(model.named_parameters()), kept.double()), (x,))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        slab = gating.slab_coordinates(model, particles.layout, kept)
        count = sum(p.numel() for p in cut(model, gating.recipe(model, kept)).parameters())
        assert int(slab.sum()) == count and not slab[particles.layout.spare]
        missing = slab.clone()
        missing[part.coordinates] = False
        assert not missing.any()


def test_nothing_to_gate() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    gating = ChannelGating(model, discover(model, networks.images()), Layout(model), CPU)
    assert gating.units == 0 and gating.scales.of(torch.zeros(2, 1000)).shape == (2, 0)
    assert gating.recipe(model, torch.zeros(0, dtype=torch.bool)) == {}
