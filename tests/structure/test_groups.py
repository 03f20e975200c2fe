"""Groups, and what they cost."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dllp.errors import Interrupted, StructureError
from dllp.structure.groups import OUTPUT, UNREAD, Structure, discover
from dllp.structure.slicing import cut, recipe
from dllp.structure.verification import verify
from tests.support import networks
from tests.support.particles import random_keep


def macs(model: nn.Module, example: Tensor) -> float:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # fused attention counts for nothing
        copy.deepcopy(model).eval()(example[:1])
    return counter.get_total_flops() / 2


def wide() -> nn.Module:
    return networks.resnet((16, 32, 64), 3)


@pytest.fixture(scope="module")
def structure() -> Structure:
    return discover(wide(), networks.images())


@pytest.mark.parametrize("name", networks.FAMILIES)
def test_groups_and_reasons(name: str) -> None:
    family = networks.FAMILIES[name]
    found = discover(family.build(), family.example())
    assert tuple(group.name for group in found.groups) == family.pruned
    assert tuple(found.whole) == family.whole
    assert all(found.whole.values())
    assert found.slices[-1].stop == found.units == len(found.channels_per_unit)


@pytest.mark.parametrize("name", networks.FAMILIES)
def test_costs_are_exact(name: str) -> None:
    family = networks.FAMILIES[name]
    model, example = family.build(), family.example()
    found = discover(model, example)
    assert found.flops.dense == pytest.approx(macs(model, example), rel=1e-12)
    assert found.params.dense == sum(p.numel() for p in model.parameters())
    for seed in range(3):
        keep = random_keep(found.groups, seed)
        small = cut(model, recipe(model, found.groups, keep))
        assert found.flops.expected(keep.double()).item() == pytest.approx(macs(small, example), rel=1e-12)
        count = sum(p.numel() for p in small.parameters())
        assert found.params.expected(keep.double()).item() == pytest.approx(count, rel=1e-12)


class Stream(nn.Module):
    """The same gates stand on both sides of `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.fc(self.last(F.relu(x + self.inner(x))).mean((2, 3)))


def test_expectation_by_enumeration() -> None:
    found = discover(Stream(), networks.images())
    assert [group.units for group in found.groups] == [3, 4]
    theta = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=7)), dtype=torch.float64)
    weights = (states * theta + (1 - states) * (1 - theta)).prod(1)
    for cost in (found.flops, found.params):
        assert cost.expected(theta).item() == pytest.approx((weights @ cost.expected(states)).item(), rel=1e-12)


def test_cost_gradient_and_float32(structure: Structure) -> None:
    theta = torch.full((2, structure.units), 0.5, requires_grad=True)
    value = structure.flops.to("cpu", torch.float32).expected(theta)
    assert value.shape == (2,) and value.dtype == torch.float32
    value.sum().backward()
    assert theta.grad is not None and bool((theta.grad > 0).all())
    exact = structure.flops.expected(theta.detach())
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=0.0)


def test_layers(structure: Structure) -> None:
    assert structure.flops.dense == sum(layer.macs for layer in structure.layers)
    names = {n for n, m in wide().named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    assert {layer.name for layer in structure.layers} == names


@pytest.mark.parametrize("name", ["resnet", "sequence", "transformer", "zero_pad"])
def test_the_model_is_untouched(name: str) -> None:
    family = networks.FAMILIES[name]
    model, example = family.build().train(), family.example()
    next(model.children()).eval()
    first = next(model.parameters())
    first.requires_grad_(False)
    last = list(model.parameters())[-1]
    last.grad = torch.ones_like(last)
    next(model.children()).register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    hooks = [list(m._forward_hooks) for m in model.modules()]
    grads = [p.requires_grad for p in model.parameters()]
    pointers = [p.data_ptr() for p in model.parameters()]
    random = torch.get_rng_state()
    discover(model, example)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert [m.training for m in model.modules()] == modes
    assert [list(m._forward_hooks) for m in model.modules()] == hooks
    assert [p.requires_grad for p in model.parameters()] == grads
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert torch.equal(last.grad, torch.ones_like(last))
    assert not example.requires_grad


@pytest.mark.parametrize("name", networks.MIXING)
def test_mixed_channels_stay_whole_with_the_reason(name: str) -> None:
    model = networks.MIXING[name]()
    before = copy.deepcopy(model.state_dict())
    found = discover(model, networks.images())
    assert [group.name for group in found.groups] == ["features.2"]
    assert found.whole["features.0"] and "\n" not in found.whole["features.0"]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_shuffle_is_cut_in_rows_and_columns() -> None:
    """Channels (2, 4) become (4, 2): a row goes with all of its columns, a column with both of its rows."""
    found = discover(networks.between(networks.shuffle), networks.images())
    assert [(group.units, group.width) for group in found.groups] == [(2, 4), (4, 2), (6, 1)]
    rows, columns = (next(p for p in group.slices if p.role == "read").unit.tolist() for group in found.groups[:2])
    assert rows == [0, 1] * 4 and columns == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_mean_over_channels_counts_the_open_ones() -> None:
    found = discover(networks.between(lambda x: x - x.mean(1, keepdim=True)), networks.images())
    assert [(group.name, group.kind) for group in found.groups] == [("features.0", "width"), ("features.2", "channel")]


def test_filter_keeps_the_whole_group() -> None:
    model = networks.resnet()
    asked: list[str] = []

    def allowed(module: nn.Module, name: str) -> bool:
        assert module is model.get_submodule(name)
        asked.append(name)
        return name != "features.3.conv2.0"

    found = discover(model, networks.images(), filter_fn=allowed)
    assert "features.3.conv2.0" in found.whole["features.0.0"]
    assert "features.0.0" not in [group.name for group in found.groups] and "fc" in asked


def test_frozen_networks_are_pruned_alike() -> None:
    model = networks.resnet().requires_grad_(False)
    with torch.no_grad():
        assert len(discover(model, networks.images()).groups) == 6


def test_nothing_to_prune() -> None:
    found = discover(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), networks.images())
    assert found.groups == () and found.units == 0 and list(found.whole) == ["1"]
    assert found.flops.expected(torch.zeros(0)).item() == found.flops.dense == 960


class Tied(nn.Module):
    """A weight that two layers share, its inputs and outputs thereby too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 7), nn.Linear(7, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


def test_shared_and_computed_weights() -> None:
    found = discover(Tied(), torch.randn(2, 6))
    assert [group.name for group in found.groups] == ["c"] and "inputs" in found.whole["a"]
    model = networks.mlp()
    torch.nn.utils.parametrizations.weight_norm(model[2])
    found = discover(model, torch.randn(2, 6))
    assert [group.name for group in found.groups] == ["2"] and "computed" in found.whole["0"]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.conv, self.cell, self.fc = nn.Conv1d(3, 8, 3), kind(8, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.cell(torch.relu(self.conv(x)).transpose(1, 2))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_cells(kind: type[nn.RNNBase]) -> None:
    found = discover(Recurrent(kind), torch.randn(2, 3, 9))
    assert [group.name for group in found.groups] == ["conv", "cell"] and list(found.whole) == ["fc"]


class Lost(nn.Module):
    """Channels that are added up and repeated: no layer reads them one by one, yet they are no outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 6, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x)).unflatten(1, (3, 4)).sum(2).repeat_interleave(4, 1)
        return self.last(torch.relu(self.second(x)).mean((2, 3)))


def test_channels_that_are_lost_on_their_way_are_not_taken_for_outputs() -> None:
    found = discover(Lost(), networks.images())
    assert found.whole["first"] not in (OUTPUT, UNREAD) and found.whole["last"] == OUTPUT
    assert [group.name for group in found.groups] == ["second"]


def test_casts_inside_a_network_are_followed_in_float64() -> None:
    class Casts(Stream):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    assert len(discover(Casts(), networks.images()).groups) == 2


def test_a_network_that_cannot_learn_is_refused() -> None:
    class NoGrad(Stream):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    with pytest.raises(StructureError, match="switches gradients off"):
        discover(NoGrad(), networks.images())


class Mixing(nn.Module):
    """Channels that a softmax mixes, in front of outputs that are often 0 or 1 whatever they are."""

    def __init__(self, outputs: int, end: Callable[[Tensor], Tensor], mix: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1), nn.Linear(4, outputs)
        self.end, self.mix = end, mix

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.end(self.last(self.second(x.softmax(1) if self.mix else x.tanh()).mean((2, 3))))


@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize("end", [torch.relu, lambda x: x.clamp(0, 1)])
def test_outputs_that_stand_still_prove_nothing(outputs: int, end: Callable[[Tensor], Tensor]) -> None:
    """Cut and gated network are equal wherever both are 0: other weights are drawn until the outputs move."""
    found = discover(Mixing(outputs, end, mix=True), networks.images())
    assert [group.name for group in found.groups] == ["second"] and "softmax" in found.whole["first"]
    found = discover(Mixing(outputs, end, mix=False), networks.images())
    assert [group.name for group in found.groups] == ["first", "second"]


class Structured(nn.Module):
    """Takes a whole batch as one argument, and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(16, 3)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        more = sum(F.relu(self.right(x)) for x in batch["more"])
        return {"out": self.last(torch.cat([F.relu(self.left(batch["x"])), more], 1))}


def test_an_argument_may_be_a_structure_of_tensors() -> None:
    model = Structured()
    example = ({"x": torch.randn(2, 6), "more": [torch.randn(2, 4), torch.randn(2, 4)]},)
    found = discover(model, example)
    assert [(group.name, group.units) for group in found.groups] == [("right", 8), ("left", 8)]
    assert found.flops.dense == 6 * 8 + 2 * 4 * 8 + 16 * 3
    assert verify(model, found.groups, random_keep(found.groups, 0), example) <= 1e-12


def test_unusable_examples() -> None:
    with pytest.raises(StructureError, match=r"cannot take inputs of shape \(1, 4, 8, 8\)") as caught:
        discover(networks.chain(), torch.randn(1, 4, 8, 8))
    assert "\n" not in str(caught.value)
    with pytest.raises(StructureError, match="example"):
        discover(networks.chain(), torch.zeros(0, 3, 8, 8))
    with pytest.raises(StructureError, match="lazy"):
        discover(nn.Sequential(nn.LazyLinear(3)), torch.zeros(1, 3))


def test_a_signal_while_the_network_is_tried_is_no_fault_of_the_network() -> None:
    class Stopped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise Interrupted(15)

    with pytest.raises(Interrupted):
        discover(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Stopped(8, 3)), torch.randn(2, 4))


def doubled_in_part(x: Tensor) -> Tensor:
    x[:, ::2].mul_(2)
    return x


def without_the_first(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


@pytest.mark.parametrize("function", [doubled_in_part, without_the_first])
def test_writing_to_some_channels_in_place_keeps_them_whole(function: Callable[[Tensor], Tensor]) -> None:
    found = discover(networks.between(function), networks.images())
    assert [group.name for group in found.groups] == ["features.2"] and found.whole["features.0"]


@pytest.mark.parametrize("function", [lambda x: x.mul_(2).relu_(), lambda x: x.add_(x.sigmoid())])
def test_operations_in_place_on_all_channels_are_followed(function: Callable[[Tensor], Tensor]) -> None:
    model = networks.between(function)
    found = discover(model, networks.images())
    assert [group.name for group in found.groups] == ["features.0", "features.2"]
    assert verify(model, found.groups, random_keep(found.groups, 0), networks.images()) <= 1e-12


def test_a_hook_that_moves_channels_keeps_them_whole() -> None:
    model = networks.between(torch.relu)
    model.features[0].register_forward_hook(lambda module, inputs, output: output.flip(1))  # type: ignore
    found = discover(model, networks.images())
    assert [group.name for group in found.groups] == ["features.2"] and found.whole["features.0"]


def test_a_network_compiled_in_place_is_seen_as_it_was() -> None:
    plain, compiled = networks.resnet(), networks.resnet()
    compiled.compile(backend="eager")
    names = [[group.name for group in discover(m, networks.images()).groups] for m in (plain, compiled)]
    assert names[0] == names[1]
