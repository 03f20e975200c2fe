"""M_p is a plain network equal to the gated one, M_0 keeps the spike, and extraction refuses what does not agree."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dllp.errors import StructureError
from dllp.records import ExtractedParticle
from dllp.structure.groups import discover
from dllp.structure.slicing import Fold, cut
from dllp.training.extract import extract, plain
from dllp.training.gating import ChannelGating, WeightGating
from dllp.training.particles import Particles
from tests.support import networks
from tests.support.particles import batch, both_layouts, intact, loss, random_keep, scrambled

CPU = torch.device("cpu")


class Run:
    """Two particles that were sliced, moved a little in their small shape, and finished."""

    def __init__(self, name: str = "chain", channels_last: bool = False) -> None:
        family = networks.FAMILIES[name]
        models = [scrambled(family.build()).train() for _ in range(2)]
        self.original, self.x, self.example = copy.deepcopy(models[0]), batch(family), family.example()
        if self.example.is_floating_point():
            self.example = self.example.double()
        self.structure = discover(models[0], self.example)
        self.particles = Particles(models, channels_last=channels_last)
        self.gating = ChannelGating(models[0], self.structure, self.particles.layout, CPU)
        self.keep = torch.stack([random_keep(self.structure.groups, seed) for seed in (1, 2)])
        self.spike = [copy.deepcopy(model) for model in models]
        pairs = zip(models, self.keep, strict=True)
        self.particles.slice([self.gating.recipe(model, keep) for model, keep in pairs])
        for _ in range(2):
            self.particles.begin_step()
            for i, network in enumerate(self.particles.active):
                self.particles.differentiate(i, loss(network(self.x)))
            self.particles.collect_gradients()
            gradients = self.particles.gradients
            self.particles.rows.sub_(0.05 * gradients / gradients.norm(dim=1, keepdim=True))
        self.particles.finish()

    def extract(self) -> list[ExtractedParticle]:
        return extract(self.particles, self.gating, self.keep, self.example)


def is_plain(network: nn.Module, original: nn.Module, particles: Particles) -> None:
    """No gates, hooks, gradients or shared memory, and nothing of this package."""
    hooks = [key for key in vars(network) if key.endswith("_hooks")]
    rows = {t.untyped_storage().data_ptr() for t in (particles.rows, particles.gradients)}
    rows |= {t.untyped_storage().data_ptr() for part in particles.sliced for t in (part.row, part.gradient)}
    assert list(network.state_dict()) == list(original.state_dict())
    pairs = zip(network.named_modules(), original.named_modules(), strict=True)
    for (name, module), (original_name, twin) in pairs:
        assert name == original_name and type(module) is type(twin) and vars(module).keys() == vars(twin).keys()
        assert not module.training and not any(getattr(module, key) for key in hooks)
        assert not type(module).__module__.startswith("dllp")
    for parameter in network.parameters():
        assert type(parameter) is nn.Parameter and parameter.grad is None and parameter.is_contiguous()
        assert parameter.untyped_storage().data_ptr() not in rows
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert b"dllp" not in pickle.dumps(network)


@both_layouts
@pytest.mark.parametrize("name", ["chain", "resnet", "grouped", "transposed", "sequence", "mlp", "squeeze"])
def test_slab_is_plain_and_equals_the_gated_network(name: str, channels_last: bool) -> None:
    run = Run(name, channels_last)
    rows = run.particles.rows.clone()
    extracted = run.extract()
    assert torch.equal(run.particles.rows, rows) and intact(run.particles)
    for particle, keep in zip(extracted, run.keep, strict=True):
        is_plain(particle.network, run.original, run.particles)
        is_plain(particle.reference, run.original, run.particles)
        assert particle.gated == () and particle.keep is not None and torch.equal(particle.keep, keep)
        fold = Fold(particle.reference, run.structure.groups)(
            dict(particle.reference.named_parameters()), keep.double()
        )
        expected = functional_call(particle.reference, fold, (run.x,))
        torch.testing.assert_close(particle.network(run.x), expected, rtol=1e-10, atol=1e-10)
        again = cut(particle.reference, particle.recipe)
        pairs = zip(again.state_dict().values(), particle.network.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        count = sum(p.numel() for p in particle.network.parameters())
        assert run.structure.params.expected(keep.double()).item() == pytest.approx(count)
    assert extracted[0].recipe != extracted[1].recipe


def test_reference_keeps_the_spike() -> None:
    run = Run("resnet")
    for i, particle in enumerate(run.extract()):
        gone = torch.ones(run.particles.layout.size, dtype=torch.bool)
        gone[run.particles.sliced[i].coordinates] = False
        changed = 0
        for (name, now), before in zip(particle.reference.named_parameters(), run.spike[i].parameters(), strict=True):
            spike = run.particles.layout.segments[name].view(gone)
            assert torch.equal(now[spike], before[spike])
            changed += int((now[~spike] != before[~spike]).sum())
        assert changed > 1000 and int(gone.sum()) > 1000
        for name, buffer in particle.reference.named_buffers():
            if name.endswith("running_mean"):
                kept = particle.recipe.get(name.removesuffix(".running_mean"), {}).get("out", list(range(len(buffer))))
                moved = buffer != dict(run.spike[i].named_buffers())[name]
                assert moved.nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("name", ["chain", "resnet"])
def test_closed_channels_of_the_reference_are_in_the_spike(name: str) -> None:
    """Its outputs go to those of the small network as the spike narrows, in proportion to its width."""
    run = Run(name)
    gaps = []
    for spike in (1e3, 1e5, 1e7):
        found = extract(run.particles, run.gating, run.keep, run.example, spike)
        x = run.example.to(next(found[0].network.parameters()).dtype)
        with torch.no_grad():
            gaps.append(max(float((p.reference(x) - p.network(x)).abs().max()) for p in found))
        assert all(torch.equal(a, b) for p in found for a, b in _kept(p))
    assert gaps[0] > 0 and gaps[1] == pytest.approx(gaps[0] / 100, rel=0.2) and gaps[2] < gaps[1] / 50
    narrow = run.gating.scales.of(run.particles.rows).cpu().amax()
    wide = extract(run.particles, run.gating, run.keep, run.example, float(1 / narrow))
    plainly = run.extract()  # a channel that is in the spike already stays as it is
    for ours, theirs in zip(wide, plainly, strict=True):
        pairs = zip(ours.reference.parameters(), theirs.reference.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def _kept(particle: ExtractedParticle) -> list[tuple[Tensor, Tensor]]:
    """Parameters of M_p, and what the cut leaves of M_0."""
    again = cut(particle.reference, particle.recipe)
    return list(zip(again.parameters(), particle.network.parameters(), strict=True))


@both_layouts
def test_what_was_trained_is_what_is_extracted(channels_last: bool) -> None:
    run = Run("resnet", channels_last)
    for particle, small in zip(run.extract(), run.particles.active, strict=True):
        assert particle.network.state_dict().keys() == small.state_dict().keys()
        for name, value in small.state_dict().items():
            assert torch.equal(particle.network.state_dict()[name], value)


def test_a_wrong_group_is_refused() -> None:
    run = Run("chain")
    first, second = run.structure.groups
    keep = torch.ones(2, run.structure.units, dtype=torch.bool)
    keep[:, [9, 11]] = False
    wrong = tuple(replace(p, unit=p.unit.flip(0)) if p.role == "read" else p for p in second.slices)
    run.gating.structure = replace(run.structure, groups=(first, replace(second, slices=wrong)))
    before = copy.deepcopy(run.particles.networks[0].state_dict())
    with pytest.raises(StructureError, match="cannot be pruned safely: the cut network differs"):
        extract(run.particles, run.gating, keep, run.example)
    after = run.particles.networks[0].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()) and intact(run.particles)


def test_a_network_that_changed_since_is_refused() -> None:
    run = Run("chain")
    run.particles.networks[1].features[3].register_forward_hook(lambda module, inputs, output: output.flip(1))
    with pytest.raises(StructureError, match=r"cannot be pruned safely.*mixes them"):
        run.extract()


@both_layouts
@pytest.mark.parametrize("linear", [False, True])
def test_single_weights_are_exact_zeros(linear: bool, channels_last: bool) -> None:
    family = networks.FAMILIES["resnet"]
    models = [networks.resnet() for _ in range(2)]
    original = copy.deepcopy(models[0])
    structure = discover(original, family.example())
    particles = Particles(models, channels_last=channels_last)
    gating = WeightGating(models[0], structure, particles.layout, CPU, linear=linear)
    keep = torch.rand(2, gating.units) < 0.4
    rows = particles.rows.clone()
    extracted = extract(particles, gating, keep, family.example())
    assert torch.equal(particles.rows, rows) and intact(particles)
    at = gating.scales.coordinates[:, 0]
    for i, particle in enumerate(extracted):
        is_plain(particle.network, original, particles)
        is_plain(particle.reference, original, particles)
        pruned = rows[i].clone()
        pruned[at[~keep[i]]] = 0
        for name, segment in particles.layout.segments.items():
            assert torch.equal(particle.network.get_parameter(name), segment.view(pruned))
            assert torch.equal(particle.reference.get_parameter(name), segment.view(rows[i]))
        assert particle.recipe == {} and particle.gated == tuple(f"{name}.weight" for name in gating.scales.modules)
        assert particle.keep is not None
        nonzero = torch.cat([(particle.network.get_parameter(name) != 0).flatten() for name in particle.gated])
        assert torch.equal(particle.keep, nonzero), "in each parameter's own order, however it was trained"
        zeros = sum(int((particle.network.get_parameter(name) == 0).sum()) for name in particle.gated)
        assert zeros == int((~keep[i]).sum()) and ("fc.weight" in particle.gated) == linear
        gated = gating.fold(dict(particle.reference.named_parameters()), keep[i].float())
        x = torch.randn(2, 3, 8, 8)
        torch.testing.assert_close(particle.network(x), functional_call(particle.reference, gated, (x,)))


def test_without_gates_both_are_the_particle() -> None:
    models = [networks.chain() for _ in range(2)]
    particles = Particles(models, channels_last=True)
    for particle, model in zip(extract(particles, None, None, networks.images()), models, strict=True):
        is_plain(particle.network, networks.chain(), particles)
        assert particle.recipe == {} and particle.keep is None and particle.network is not particle.reference
        for name, value in model.state_dict().items():
            assert torch.equal(particle.network.state_dict()[name], value)
            assert torch.equal(particle.reference.state_dict()[name], value)


def test_plain_leaves_the_network_alone() -> None:
    model = networks.chain().train()
    particles = Particles([model])
    copied = plain(model)
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.zero_()
    assert model.training and intact(particles) and bool(particles.rows.any())
    assert isinstance(copied(torch.randn(1, 3, 8, 8)), Tensor)
