"""What the gates rule: scales against a naive computation, effective weights, prices, and budgets that are met."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import networks
import pytest
import torch
from test_slicing import random_keep
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dllp.errors import StructureError
from dllp.gating import ChannelGating, LinearCost, Scales, WeightGating, channel_scales, filters
from dllp.particles import Layout, Particles
from dllp.slicing import Group, Slice, cut
from dllp.structure import Structure, discover

CPU = torch.device("cpu")
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d)
both_layouts = pytest.mark.parametrize("channels_last", [False, True])


class Split(nn.Module):
    """A norm reads half of the first convolution's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(4), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.conv(x).chunk(2, 1)
        return self.last(torch.cat([self.norm(left), right], 1)).mean((2, 3))


class HalfNormed(nn.Module):
    """One of two convolutions that are added has a norm: its scales stand for both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = networks.conv_bn(3, 8), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.left(x) + self.right(x))).mean((2, 3))


def separable_plain() -> nn.Module:
    """A depth-wise convolution and its producer, neither with a norm: the unit has filters of both."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.PReLU(8), nn.Conv2d(8, 6, 1), nn.ReLU()]
    return networks.Head(nn.Sequential(*layers), 6)


def grouped_plain() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 1, groups=4), nn.ReLU(), nn.Conv2d(12, 6, 1)]
    return networks.Head(nn.Sequential(*layers), 6)


def transposed_plain() -> nn.Module:
    """Transposed, grouped transposed and depth-wise transposed convolutions, none with a norm."""
    return nn.Sequential(
        nn.ConvTranspose2d(3, 8, 2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 12, 2, groups=4),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 12, 2, groups=12),
        nn.ReLU(),
        nn.Conv2d(12, 3, 1),
    )


def affine_free() -> nn.Module:
    return networks.normed(lambda: nn.BatchNorm2d(8, affine=False))


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
CASES: dict[str, Case] = {name: (family.build, family.example) for name, family in networks.FAMILIES.items()} | {
    build.__name__: (build, networks.images)
    for build in (HalfNormed, separable_plain, grouped_plain, transposed_plain, affine_free)
}


def random_network(build: Callable[[], nn.Module]) -> nn.Module:
    """A network in which every parameter, the norms' too, is a random number of either sign."""
    model = build()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def setting(build: Callable[[], nn.Module], example: Tensor, channels_last: bool = False, n: int = 2):
    """n random networks as rows, and the structure."""
    models = [random_network(build) for _ in range(n)]
    structure = discover(models[0], example)
    return Particles(models, channels_last=channels_last), structure


def own_filter(module: nn.Module, channel: int) -> Tensor:
    """The weights that an output channel is made of, found by differentiating it."""
    weight = module.weight.detach().clone().requires_grad_()
    if isinstance(module, nn.Linear):
        x = torch.rand(1, module.in_features) + 1
    else:
        x = torch.rand(1, module.in_channels, *[4] * (weight.dim() - 2)) + 1
    output = functional_call(module, {"weight": weight}, (x,))
    (gradient,) = torch.autograd.grad(output[:, channel].sum(), weight)
    return weight.detach()[gradient != 0]


def naive_scale(model: nn.Module, structure: Structure, group: int, unit: int) -> float:
    """RMS of the gammas of a unit, or of its filters where no norm with gammas reads it."""
    modules = dict(model.named_modules())
    gammas, weights = [], []
    for piece in structure.groups[group].slices:
        module = modules[piece.module]
        for channel in (piece.unit == unit).nonzero().flatten().tolist() if piece.side == "out" else ():
            if isinstance(module, NORMS):
                gammas += [] if module.weight is None else [module.weight[channel].item()]
            elif not isinstance(module, nn.PReLU):
                weights += own_filter(module, channel).flatten().tolist()
    values = gammas or weights
    return math.sqrt(sum(v * v for v in values) / len(values))


# --- scales -------------------------------------------------------------------------------------------------------


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
    """The groups are made by hand: discovery leaves split features whole so far."""
    model = random_network(Split)
    half = torch.tensor([0, 1, 2, 3])
    pieces = (Slice("conv", "out", torch.arange(8)), Slice("norm", "out", half), Slice("last", "in", torch.arange(8)))
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


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(5, 4),
        nn.Conv1d(4, 6, 3),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Conv3d(4, 4, 2, groups=4),
        nn.ConvTranspose1d(4, 6, 3),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        nn.ConvTranspose2d(4, 4, 3, groups=4),
        nn.ConvTranspose3d(6, 3, 2, groups=3),
    ],
    ids=str,
)
def test_filters(module: nn.Module) -> None:
    found = filters(module, module.weight.detach())
    for channel, row in enumerate(found):
        assert row.sort().values.tolist() == own_filter(module, channel).sort().values.tolist()
    assert found.numel() == module.weight.numel()


def test_sums_and_spread() -> None:
    scales = Scales(torch.zeros(7, 1, dtype=torch.int64), torch.ones(7), ("a", "b", "c"), (4, 1, 2))
    values = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 2, 0, 3]])
    assert scales.module_sums(values).tolist() == [[10, 5, 13], [1, 2, 3]]
    assert scales.spread(torch.tensor([[1.0, 2, 3], [4, 5, 6]])).tolist() == [[1] * 4 + [2, 3, 3], [4] * 4 + [5, 6, 6]]
    # one is the other's transpose
    other = torch.tensor([[0.5, -1, 2], [1, 1, 4]])
    torch.testing.assert_close((scales.spread(other) * values).sum(), (other * scales.module_sums(values)).sum())


# --- single weights -----------------------------------------------------------------------------------------------


def weight_gating(particles: Particles, structure: Structure, **options: object) -> WeightGating:
    return WeightGating(particles.networks[0], structure, particles.layout, CPU, **options)  # type: ignore[arg-type]


@both_layouts
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("name", ["resnet", "transposed", "grouped", "sequence", "volume"])
def test_effective_weights_are_products(name: str, linear: bool, channels_last: bool) -> None:
    build, example = CASES[name]
    particles, structure = setting(build, example(), channels_last)
    gating = weight_gating(particles, structure, linear=linear)
    gates = torch.rand(gating.units)
    scaled = particles.rows.clone()
    # the scale of a single weight is the weight itself, so that its gate and its prior mean the same coordinate
    torch.testing.assert_close(gating.scales.of(particles.rows), particles.rows[:, gating.scales.coordinates[:, 0]])
    scaled[:, gating.scales.coordinates[:, 0]] *= gates
    for model, row in zip(particles.networks, scaled, strict=True):
        parameters = dict(model.named_parameters())
        weights = gating.weights(parameters, gates)
        for key, value in weights.items():
            assert torch.equal(value, particles.layout.segments[key].view(row))
            last = channels_last and value.dim() == 4
            assert value.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        touched = {k for k, p in parameters.items() if not torch.equal(particles.layout.segments[k].view(row), p)}
        assert touched == set(weights) == {f"{module}.weight" for module in gating.scales.modules}
    kinds = {type(model.get_submodule(module)) for module in gating.scales.modules}
    assert (nn.Linear in kinds) == (linear and name != "transposed")


def test_effective_weights_keep_dtype_and_gradients() -> None:
    particles, structure = setting(networks.chain, networks.images(), n=1)
    gating = weight_gating(particles, structure)
    gates = torch.rand(gating.units, requires_grad=True)
    half = {name: p.detach().bfloat16() for name, p in particles.networks[0].named_parameters()}
    assert all(w.dtype == torch.bfloat16 for w in gating.weights(half, gates).values())
    sum(w.sum() for w in gating.weights(dict(particles.networks[0].named_parameters()), gates).values()).backward()
    assert gates.grad is not None
    torch.testing.assert_close(gates.grad, gating.scales.of(particles.rows)[0])


def test_linear_cost_by_enumeration() -> None:
    cost = LinearCost(torch.tensor([1.0, 2.5, 4.0], dtype=torch.float64), 20.0)
    states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3)), dtype=torch.float64)
    for state, value in zip(states, cost.expected(states), strict=True):
        assert value.item() == pytest.approx(12.5 + float(state @ cost.price))
    theta = torch.tensor([0.3, 0.9, 0.5], dtype=torch.float64, requires_grad=True)
    weights = (states * theta + (1 - states) * (1 - theta)).prod(1)
    torch.testing.assert_close(cost.expected(theta), weights @ cost.expected(states))
    (gradient,) = torch.autograd.grad(cost.expected(theta), theta)
    torch.testing.assert_close(gradient, cost.price)


def test_linear_cost_counts_single_weights_exactly() -> None:
    cost = LinearCost(torch.full((3,), 1.0, dtype=torch.float64), 2.0**25 + 1)
    assert cost.expected(torch.tensor([1.0, 0.0, 1.0])).item() == 2**25


@both_layouts
def test_prices_of_weights(channels_last: bool) -> None:
    particles, structure = setting(networks.resnet, networks.images(), channels_last)
    gating = weight_gating(particles, structure, linear=True)
    keep = torch.rand(gating.units) < 0.3
    weights = gating.weights(dict(particles.networks[0].named_parameters()), keep.float())
    macs = {layer.name: layer.macs / layer.weights for layer in structure.layers}
    left = sum(macs[key.removesuffix(".weight")] * int(w.count_nonzero()) for key, w in weights.items())
    assert gating.flops.expected(keep.float()).item() == pytest.approx(left, rel=1e-12)  # all work is gated
    gone = int((~keep).sum())
    assert gating.params.expected(keep.float()).item() == structure.params.dense - gone
    everything = torch.ones(gating.units)
    assert gating.flops.expected(everything).item() == pytest.approx(gating.flops.dense, rel=1e-12)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("budget", ["flops", "params"])
@pytest.mark.parametrize("keep", [0.2, 0.45, 0.9, 1.0])
def test_weights_meet_the_budget(linear: bool, budget: str, keep: float) -> None:
    particles, structure = setting(networks.resnet, networks.images(), n=1)
    gating = weight_gating(particles, structure, linear=linear)
    logits = torch.randn(gating.units)
    kept = gating.select(logits, budget, keep)  # type: ignore[arg-type]
    cost = getattr(gating, budget)
    share = cost.expected(kept.double()).item() / cost.dense
    assert keep - 0.005 <= share <= keep + 1e-12
    assert kept.all() if keep == 1 else logits[kept].min() >= logits[~kept].max()


def test_weights_without_a_budget() -> None:
    particles, structure = setting(networks.chain, networks.images(), n=1)
    gating = weight_gating(particles, structure)
    logits = torch.randn(gating.units)
    assert torch.equal(gating.select(logits, "flops", None), logits > 0)


def test_weights_out_of_reach() -> None:
    build = lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(256, 50), nn.ReLU(), nn.Linear(50, 5))  # noqa: E731
    particles, structure = setting(build, networks.images(), n=1)
    gating = weight_gating(particles, structure)
    with pytest.raises(StructureError, match=r"cannot be met.*0\.9.*gate_linear"):
        gating.select(torch.zeros(gating.units), "params", 0.5)
    assert bool(weight_gating(particles, structure, linear=True).select(torch.zeros(12 + 13050), "params", 0.5).any())


def test_filter_chooses_the_weights() -> None:
    particles, structure = setting(networks.chain, networks.images(), n=1)
    asked = {}

    def allowed(module: nn.Module, name: str) -> bool:
        asked[name] = module
        return name != "features.0.0"

    gating = weight_gating(particles, structure, linear=True, filter_fn=allowed)
    assert gating.scales.modules == ("features.2.0", "fc") and gating.units == 12 * 8 * 9 + 60
    assert asked == {n: particles.networks[0].get_submodule(n) for n in ("features.0.0", "features.2.0", "fc")}
    with pytest.raises(StructureError, match=r"no weights to gate.*filter_fn"):
        weight_gating(particles, structure, filter_fn=lambda module, name: False)


def test_linear_layers_are_gated_on_request() -> None:
    particles, structure = setting(networks.mlp, torch.randn(4, 6), n=1)
    with pytest.raises(StructureError, match="gate_linear"):
        weight_gating(particles, structure)
    assert weight_gating(particles, structure, linear=True).scales.lengths == (60, 80, 24)


def test_shared_computed_and_idle_weights_have_no_gates() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d, self.idle = (nn.Linear(6, 6) for _ in range(5))
            self.b.weight = self.a.weight
            nn.utils.parametrizations.weight_norm(self.c)

        def forward(self, x: Tensor) -> Tensor:
            return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))

    model = Odd()
    structure, particles = discover(model, torch.randn(2, 6)), Particles([model])
    assert weight_gating(particles, structure, linear=True).scales.modules == ("d",)


# --- channels -----------------------------------------------------------------------------------------------------


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
    weights = gating.weights(dict(model.named_parameters()), gates)
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
        fold, gates = gating.closed(part.network, part.recipe, pad, kept)
        weights = fold(dict(part.network.named_parameters()), gates)
        found = functional_call(part.network, weights, (x,))
        wanted = functional_call(model, gating.weights(dict(model.named_parameters()), kept.double()), (x,))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        slab = gating.slab_coordinates(model, particles.layout, kept)
        count = sum(p.numel() for p in cut(model, gating.recipe(model, kept)).parameters())
        assert int(slab.sum()) == count and not slab[particles.layout.spare]
        missing = slab.clone()
        missing[part.coordinates] = False
        assert not missing.any()


def test_slab_of_single_weights() -> None:
    particles, structure = setting(networks.chain, networks.images(), n=1)
    gating = weight_gating(particles, structure)
    keep = torch.rand(gating.units) < 0.5
    slab = gating.slab_coordinates(particles.networks[0], particles.layout, keep)
    at = gating.scales.coordinates[:, 0]
    assert torch.equal(slab[at], keep) and int((~slab).sum()) == int((~keep).sum())


def test_nothing_to_gate() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    gating = ChannelGating(model, discover(model, networks.images()), Layout(model), CPU)
    assert gating.units == 0 and gating.scales.of(torch.zeros(2, 1000)).shape == (2, 0)
    assert gating.recipe(model, torch.zeros(0, dtype=torch.bool)) == {}
