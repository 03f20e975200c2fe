"""Gates of single weights: effective weights, prices, and budgets that are met."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from dllp.errors import StructureError
from dllp.structure.groups import Structure, discover
from dllp.training.gating import LinearCost, WeightGating
from dllp.training.particles import Particles
from tests.support import networks
from tests.support.particles import CASES, CPU, both_layouts, setting


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
        weights = gating.fold(parameters, gates)
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
    assert all(w.dtype == torch.bfloat16 for w in gating.fold(half, gates).values())
    sum(w.sum() for w in gating.fold(dict(particles.networks[0].named_parameters()), gates).values()).backward()
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
    weights = gating.fold(dict(particles.networks[0].named_parameters()), keep.float())
    macs = {f"{layer.name}.weight": layer.macs for layer in structure.layers}
    left = sum(macs[key] * int(w.count_nonzero()) / w.numel() for key, w in weights.items())
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


class Mixed(nn.Module):
    """Weights of five kinds, of which one alone has gates."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.computed = nn.Conv1d(4, 8, 1), weight_norm(nn.Conv1d(8, 8, 1))
        self.attention, self.recurrent = nn.MultiheadAttention(8, 2, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.computed(self.conv(x)).transpose(1, 2)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.fc(self.recurrent(x)[0][:, -1])


def test_what_has_no_gates_is_told_with_the_reason() -> None:
    particles, structure = setting(Mixed, torch.randn(4, 4, 6), n=1)
    gating = weight_gating(particles, structure)
    assert gating.scales.modules == ("conv",)
    reasons = {
        "computed": "computed from others", "attention": "no convolution", "attention.out_proj": "a linear layer",
        "recurrent": "no convolution", "fc": "set gate_linear",
    }  # fmt: skip
    assert gating.whole.keys() == reasons.keys() and all(words in gating.whole[n] for n, words in reasons.items())
    gating = weight_gating(particles, structure, linear=True)
    assert gating.scales.modules == ("conv", "fc") and "never called" in gating.whole["attention.out_proj"]
    with pytest.raises(StructureError, match=r"keep more \(without gates are recurrent: "):
        gating.select(torch.zeros(gating.units), "flops", 0.1)


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


def test_slab_of_single_weights() -> None:
    particles, structure = setting(networks.chain, networks.images(), n=1)
    gating = weight_gating(particles, structure)
    keep = torch.rand(gating.units) < 0.5
    slab = gating.slab_coordinates(particles.networks[0], particles.layout, keep)
    at = gating.scales.coordinates[:, 0]
    assert torch.equal(slab[at], keep) and int((~slab).sum()) == int((~keep).sum())
