"""Rows are the networks' memory, gradients land in them, and particles start apart."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dllp.config import Config
from dllp.errors import StructureError
from dllp.training.particles import ALIGN, Layout, Particles, jitter
from tests.support import networks
from tests.support.particles import batch, both_layouts, intact, is_padding, loss, scrambled

# --- rows ---------------------------------------------------------------------------------------------------------


@both_layouts
@pytest.mark.parametrize("name", ["resnet", "transposed", "volume", "transformer", "scaled"])
def test_rows_are_the_parameters(name: str, channels_last: bool) -> None:
    models = [networks.FAMILIES[name].build() for _ in range(3)]
    before = copy.deepcopy(models)
    particles = Particles(models, channels_last=channels_last)
    assert len(particles) == 3 and particles.active == particles.networks == models and intact(particles)
    start = particles.rows.untyped_storage().data_ptr()
    for i, (model, old) in enumerate(zip(models, before, strict=True)):
        for (key, new), value in zip(model.named_parameters(), old.parameters(), strict=True):
            assert torch.equal(new, value) and new.untyped_storage().data_ptr() == start and new.is_leaf
            assert torch.equal(particles.layout.segments[key].view(particles.rows[i]), value)
            if new.dim() == 4 and channels_last:
                assert new.is_contiguous(memory_format=torch.channels_last)
            else:
                assert new.is_contiguous()
    particles.rows[1] = 0
    assert all(not p.any() for p in models[1].parameters())
    assert all(torch.equal(a, b) for a, b in zip(models[2].parameters(), before[2].parameters(), strict=True))


def test_layout() -> None:
    model = networks.resnet()
    layout = Layout(model)
    end = 0
    for name, parameter in model.named_parameters():
        segment = layout.segments[name]
        assert segment.offset == -(-end // ALIGN) * ALIGN and segment.shape == parameter.shape
        end = segment.offset + parameter.numel()
    assert layout.size % ALIGN == 0 and end <= layout.spare == layout.size - 1
    modules = [m for m in model.modules() if list(m.parameters(recurse=False))]
    assert sum(layout.blocks) == layout.size and len(layout.blocks) == len(modules) + 1
    assert is_padding(layout)[layout.spare]
    assert layout.learnable(model).sum() == sum(p.numel() for p in model.parameters())


@both_layouts
def test_gradients_land_in_the_rows(channels_last: bool) -> None:
    family = networks.FAMILIES["resnet"]
    models = [scrambled(networks.resnet()).train() for _ in range(2)]
    for model in models:
        model.features[0][0].weight.requires_grad_(False)
        model.fc.bias.requires_grad_(False)
    plain = copy.deepcopy(models)
    particles = Particles(models, channels_last=channels_last)
    for seed in (0, 1):  # the second step replaces what the first one wrote
        particles.begin_step()
        for i, network in enumerate(models):
            scale = torch.ones((), dtype=torch.float64, requires_grad=True)
            value = loss(network(batch(family, seed))) * scale
            (other,) = particles.differentiate(i, value, scale)
            assert other is not None and other.item() == pytest.approx(value.item())
        particles.collect_gradients()
    assert intact(particles) and all(p.grad is None for m in models for p in m.parameters())
    for model, old, gradient in zip(models, plain, particles.gradients, strict=True):
        loss(old(batch(family, 1))).backward()
        for (name, _), value in zip(model.named_parameters(), old.named_parameters(), strict=True):
            found, wanted = particles.layout.segments[name].view(gradient), value[1].grad
            if wanted is None:
                assert not value[1].requires_grad and not found.any()
            else:
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    learnable, padding = particles.layout.learnable(models[0]), is_padding(particles.layout)
    assert bool(particles.gradients[:, learnable].any()) and not particles.gradients[:, ~learnable].any()
    assert not particles.rows[:, padding].any() and not (learnable & padding).any()


class Sometimes(nn.Module):
    """A layer that a forward may skip, as in stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.skip = nn.Linear(3, 3), nn.Linear(3, 3), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.skip else self.second(x)


def test_a_skipped_layer_has_no_gradient() -> None:
    model = Sometimes()
    particles, x = Particles([model]), torch.randn(2, 3)
    second = particles.layout.segments["second.weight"]
    assert particles.differentiate(0, model(x).square().sum()) == [] and bool(second.view(particles.gradients[0]).any())
    model.skip = True
    particles.differentiate(0, model(x).square().sum())
    assert not second.view(particles.gradients[0]).any() and bool(particles.gradients.any())


def test_shared_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    particles = Particles([model])
    assert sum(particles.layout.blocks) == particles.layout.size
    assert intact(particles) and model[1].weight is model[0].weight
    assert set(particles.layout.segments) == {"0.weight", "0.bias", "1.bias"}
    particles.differentiate(0, model(torch.ones(1, 4)).sum())
    model(torch.ones(1, 4)).sum().backward()
    found = particles.layout.segments["0.weight"].view(particles.gradients[0])
    assert intact(particles) and torch.equal(found, model[0].weight.grad)


def test_networks_without_one_kind_of_parameters() -> None:
    with pytest.raises(StructureError, match="no parameter that learns"):
        Particles([nn.Sequential(nn.ReLU())])
    with pytest.raises(StructureError, match=r"dtypes.*\.to\("):
        Particles([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())])


# --- starting points ----------------------------------------------------------------------------------------------


def test_jitter_is_relative_to_each_tensor() -> None:
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 100), nn.BatchNorm1d(100), nn.PReLU())
    with torch.no_grad():
        model[1].weight.mul_(50)
    model[1].bias.requires_grad_(False)
    before = copy.deepcopy(model)
    random = torch.get_rng_state()
    jitter(model, 0.1, seed=3)
    assert torch.equal(torch.get_rng_state(), random)
    moved = {k: (p - q).detach() for (k, p), q in zip(model.named_parameters(), before.parameters(), strict=True)}
    for name in ("0.weight", "1.weight"):
        assert float(moved[name].std() / before.get_parameter(name).detach().std()) == pytest.approx(0.1, rel=0.05)
        assert abs(float(moved[name].mean() / moved[name].std())) < 0.03
    # a constant tensor has no spread of its own, a single number neither; frozen ones stay where they are
    assert not any(bool(moved[name].any()) for name in ("1.bias", "2.weight", "2.bias", "3.weight"))
    again = copy.deepcopy(before)
    jitter(again, 0.1, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    jitter(again, 0.0, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("init", ["given", "fresh"])
def test_start(init: str) -> None:
    model = networks.chain().eval()
    model.fc.bias.requires_grad_(False)
    before, random = copy.deepcopy(model), torch.get_rng_state()
    config, cpu = Config(particles=3, init=init, seed=5), torch.device("cpu")  # type: ignore[arg-type]
    particles = Particles.start(model, config, cpu)
    again, other = Particles.start(model, config, cpu), Particles.start(model, replace(config, seed=6), cpu)
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training and all(network.training for network in particles.networks)
    for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(particles.rows, again.rows) and not torch.equal(particles.rows[1:], other.rows[1:])
    assert not particles.networks[2].fc.bias.requires_grad and not particles.channels_last
    weight = particles.layout.segments["features.2.0.weight"]
    values = torch.stack([weight.view(row) for row in particles.rows])
    assert len({tuple(v.flatten().tolist()) for v in values}) == 3
    given = model.features[2][0].weight.detach()
    if init == "given":
        assert torch.equal(values[0], given)
        ratio = (values[1:] - given).std(dim=(1, 2, 3, 4)) / given.std()
        assert ratio.tolist() == pytest.approx([0.1, 0.1], rel=0.1)
    else:
        assert values.std(dim=(1, 2, 3, 4)).tolist() == pytest.approx([math.sqrt(2 / (12 * 9))] * 3, rel=0.1)
        flat = torch.cat([values.flatten(1), given.flatten()[None]])
        assert float((torch.corrcoef(flat) - torch.eye(4)).abs().max()) < 0.15
