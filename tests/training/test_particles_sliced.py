"""Sliced networks compute what the gated ones do, forward and backward, and bring their buffers home."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dllp.structure.groups import discover
from dllp.structure.slicing import Fold, cut, recipe
from dllp.training.particles import Particles, kept_coordinates
from tests.support import networks
from tests.support.particles import batch, both_layouts, intact, is_padding, loss, random_keep, scrambled, sliced


@both_layouts
@pytest.mark.parametrize("name", networks.FAMILIES)
def test_sliced_equals_gated(name: str, channels_last: bool) -> None:
    particles, groups, keeps = sliced(name, channels_last)
    x = batch(networks.FAMILIES[name])
    generator = torch.Generator().manual_seed(9)
    for _ in range(2):  # as they were sliced, and after the full rows have moved
        particles.begin_step()
        for i, network in enumerate(particles.active):
            particles.differentiate(i, loss(network(x)))
        particles.collect_gradients()
        assert intact(particles)
        for i, keep in enumerate(keeps):
            model, small = copy.deepcopy(particles.networks[i]), copy.deepcopy(particles.active[i])
            parameters = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
            fold = Fold(model, groups)
            fold.prepare(model)
            weights = fold(parameters, keep.double())
            expected = functional_call(model, {**parameters, **weights}, (x,))
            torch.testing.assert_close(small(x), expected, rtol=1e-10, atol=1e-10)
            found = torch.autograd.grad(loss(expected), list(parameters.values()), allow_unused=True)
            wanted = torch.zeros_like(particles.rows[i])
            for key, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    particles.layout.segments[key].view(wanted).copy_(gradient)
            scale = float(wanted.abs().max())
            torch.testing.assert_close(particles.gradients[i], wanted, rtol=0, atol=1e-10 * max(scale, 1))
            gone = torch.ones(particles.layout.size, dtype=torch.bool)
            gone[particles.sliced[i].coordinates] = False
            gone[particles.layout.spare] = True
            assert not particles.gradients[i, gone].any() and bool(particles.gradients[i, ~gone].any())
        with torch.no_grad():
            noise = 0.1 * torch.randn(particles.rows.shape, generator=generator, dtype=torch.float64)
            particles.rows.add_(noise).mul_(~is_padding(particles.layout))


def test_coordinates_are_one_to_one_and_padding_stays_zero() -> None:
    particles, _, _ = sliced("grouped", channels_last=True)
    for part in particles.sliced:
        padding = is_padding(part.layout)
        real = part.coordinates[~padding]
        assert len(real.unique()) == len(real) == sum(p.numel() for p in part.network.parameters())
        assert bool((part.coordinates[padding] == particles.layout.spare).all())
        assert not is_padding(particles.layout)[real].any()
        mask = kept_coordinates(particles.networks[0], particles.layout, part.recipe)
        assert torch.equal(mask.nonzero().flatten(), real.sort().values)
        part.gradient[~padding] = 1
    particles.begin_step()
    particles.collect_gradients()
    for gradient, part in zip(particles.gradients, particles.sliced, strict=True):
        assert not gradient[is_padding(particles.layout)].any() and not part.row[is_padding(part.layout)].any()
        assert gradient.sum() == sum(p.numel() for p in part.network.parameters())


def test_frozen_parameters_stay_frozen_when_sliced() -> None:
    family = networks.FAMILIES["chain"]
    models = [scrambled(networks.chain()).train()]
    models[0].features[2][0].weight.requires_grad_(False)
    groups = discover(models[0], batch(family)).groups
    particles = Particles(models)
    particles.slice([recipe(models[0], groups, random_keep(groups, 1))])
    particles.differentiate(0, loss(particles.active[0](batch(family))))
    particles.collect_gradients()
    assert intact(particles) and not particles.active[0].features[2][0].weight.requires_grad
    segment = particles.layout.segments["features.2.0.weight"]
    assert not segment.view(particles.gradients[0]).any() and bool(particles.gradients.any())


@both_layouts
@pytest.mark.parametrize("name", ["resnet", "sequence", "dense", "transposed", "mlp"])
def test_finish_brings_statistics_home(name: str, channels_last: bool) -> None:
    particles, _, _ = sliced(name, channels_last)
    before = [{k: b.clone() for k, b in m.named_buffers()} for m in particles.networks]
    for seed in range(3):
        for network in particles.active:
            network(batch(networks.FAMILIES[name], seed))
    particles.rows.mul_(1.5)
    rows = particles.rows.clone()
    particles.finish()
    assert torch.equal(particles.rows, rows) and intact(particles)
    for model, part, old in zip(particles.networks, particles.sliced, before, strict=True):
        expected = cut(model, part.recipe).state_dict()
        assert list(expected) == list(part.network.state_dict())
        assert all(torch.equal(v, expected[k]) for k, v in part.network.state_dict().items())
        for module_name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert int(module.num_batches_tracked) == int(old[f"{module_name}.num_batches_tracked"]) + 3
                kept = part.recipe.get(module_name, {}).get("out", list(range(module.num_features)))
                for key in ("running_mean", "running_var"):
                    changed = getattr(module, key) != old[f"{module_name}.{key}"]
                    assert changed.nonzero().flatten().tolist() == kept


class Buffers(nn.Module):
    """Buffers that are not running statistics: a mask, bytes, and one in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3)
        self.register_buffer("mask", torch.rand(8, 40) > 0.5)
        self.register_buffer("bytes", torch.arange(300).to(torch.uint8))
        picture = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        self.register_buffer("picture", picture, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x)).mean((2, 3))


def test_other_buffers_survive() -> None:
    model = Buffers()
    groups = discover(model, networks.images()).groups
    particles = Particles([model])
    particles.slice([recipe(model, groups, random_keep(groups, 1))])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    particles.finish()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    small = particles.active[0]
    small.mask.logical_not_()
    small.picture.mul_(2)
    particles.finish()
    assert torch.equal(model.mask, ~before["mask"]) and torch.equal(model.picture, 2 * before["picture"])
