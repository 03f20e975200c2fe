"""Cut networks equal gated ones, and recipes of strangers are rejected."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dllp.errors import StructureError
from dllp.structure.groups import discover, verify
from dllp.structure.slicing import Fold, Group, Slice, WeightFold, cut, gated_outputs, kept_indices, recipe
from tests.support import networks
from tests.support.oracles import difference
from tests.support.particles import random_keep, scrambled


@pytest.mark.parametrize("name", networks.FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_cut_equals_gated(name: str, seed: int) -> None:
    family = networks.FAMILIES[name]
    torch.manual_seed(seed)
    model, example = scrambled(family.build()), family.example()
    groups = discover(model, example.double() if example.is_floating_point() else example).groups
    keep = random_keep(groups, seed)
    inputs = torch.randn(3, *example.shape[1:], dtype=torch.float64) if example.is_floating_point() else example
    assert difference(model, groups, keep, (inputs,)) <= 1e-12
    assert verify(model, groups, keep, example) <= 1e-12
    replayed = json.loads(json.dumps(recipe(model, groups, keep)))
    (expected, *_), actual = gated_outputs(model, groups, keep.double(), (inputs,)), cut(model, replayed)(inputs)
    actual = actual if isinstance(actual, torch.Tensor) else actual[0]
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_all_kept_is_an_empty_recipe() -> None:
    model = networks.resnet()
    groups = discover(model, networks.images()).groups
    assert recipe(model, groups, torch.ones(sum(g.units for g in groups), dtype=torch.bool)) == {}


def test_cut_is_a_plain_network_in_the_same_state() -> None:
    model = networks.grouped().train()
    model.features[0][0].weight.requires_grad_(False)
    groups = discover(model, networks.images()).groups
    keep = random_keep(groups, 3)
    small = cut(model, recipe(model, groups, keep))
    kept = [int(part.sum()) for part in keep.split([g.units for g in groups])]
    first, second, third = (small.features[i][0] for i in (0, 2, 4))
    assert small.training and type(small) is type(model)
    assert not first.weight.requires_grad and second.weight.requires_grad
    assert (first.out_channels, second.in_channels, second.out_channels) == (kept[0] * 4, kept[0] * 4, kept[1] * 4)
    assert (second.groups, third.in_channels, small.features[2][1].num_features) == (4, kept[1] * 4, kept[1] * 4)
    assert all(type(p) is nn.Parameter and p.grad is None and p.is_leaf for p in small.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.modules())
    small(torch.randn(2, 3, 8, 8))[0].sum().backward()


def test_cut_keeps_dtype_and_memory_format() -> None:
    model = networks.chain().to(torch.bfloat16, memory_format=torch.channels_last)
    small = cut(
        model,
        {"features.0.0": {"out": [0, 3, 5]}, "features.0.1": {"out": [0, 3, 5]}, "features.2.0": {"in": [0, 3, 5]}},
    )
    weight = small.features[2][0].weight
    assert weight.dtype == torch.bfloat16 and weight.shape == (12, 3, 3, 3)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(weight, model.features[2][0].weight[:, [0, 3, 5]])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"nowhere": {"out": [0]}}, "'nowhere'"),
        ({"features.0.0": {"out": [0, 8]}}, "'features.0.0'.*0..7 in order"),
        ({"features.0.0": {"out": [-1, 2]}}, "in order"),
        ({"features.0.0": {"out": [1, 1]}}, "in order"),
        ({"features.0.0": {"out": [2, 1]}}, "in order"),
        ({"features.0.0": {"out": []}}, "in order"),
        ({"features.0.1": {"in": [0]}}, "'features.0.1', side 'in'"),
        ({"features.1": {"out": [0]}}, "'features.1', side 'out'"),
        ({"features.0.0.__class__": {"out": [0]}}, "no module"),
    ],
)
def test_recipes_of_strangers(bad: object, message: str) -> None:
    model = networks.chain()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StructureError, match=message):
        cut(model, bad)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_grouped_convolutions_lose_equally_many() -> None:
    with pytest.raises(StructureError, match="equally many"):
        cut(networks.grouped(), {"features.2.0": {"in": [0, 1, 2, 4]}})


KINDS = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sides", [("out",), ("in",), ("out", "in")])
def test_every_group_of_a_grouped_convolution_keeps_its_own_channels(kind: type, sides: tuple[str, ...]) -> None:
    """The groups keep different local channels; the reference is the whole convolution with the others at 0."""
    conv = kind(8, 12, 3, groups=4).double()
    keep = {"in": [0, 3, 4, 7], "out": [0, 1, 3, 5, 7, 8, 9, 10]}  # of 2 inputs and 3 outputs in each group
    into, out = (keep[side] if side in sides else list(range(size)) for side, size in (("in", 8), ("out", 12)))
    small = cut(nn.Sequential(conv), {"0": {side: keep[side] for side in sides}})
    x = torch.randn(2, 8, *[5] * (conv.weight.dim() - 2), dtype=torch.float64)
    alone = torch.zeros_like(x)
    alone[:, into] = x[:, into]
    torch.testing.assert_close(small(x[:, into]), conv(alone)[:, out], rtol=1e-12, atol=1e-12)
    assert (small[0].in_channels, small[0].out_channels, small[0].groups) == (len(into), len(out), 4)


def test_kept_indices_are_places_in_the_full_tensors() -> None:
    model = networks.grouped()
    model.register_buffer("flags", torch.tensor([True, False]), persistent=False)
    groups = discover(model, networks.images()).groups
    chosen = recipe(model, groups, random_keep(groups, 3))
    small, found = cut(model, chosen), kept_indices(model, chosen)
    for named in ("named_parameters", "named_buffers"):
        full = dict(getattr(model, named)())
        for name, tensor in getattr(small, named)():
            assert torch.equal(full[name].flatten()[found[name]], tensor), name
    assert found["flags"].tolist() == [0, 1]


@pytest.mark.parametrize("channels_last", [False, True])
def test_gates_of_single_weights_in_the_order_of_memory(channels_last: bool) -> None:
    conv, linear = nn.Conv2d(3, 4, (2, 5)), nn.Linear(6, 2)
    parameters = {"conv": conv.weight, "linear": linear.weight}
    fold = WeightFold({name: p.shape for name, p in parameters.items()}, {"conv"} if channels_last else ())
    gates = torch.rand(sum(fold.sizes), requires_grad=True)
    first = gates[:120].view(4, 2, 5, 3).permute(0, 3, 1, 2) if channels_last else gates[:120].view(4, 3, 2, 5)
    weights = fold(parameters, gates)
    assert torch.equal(weights["conv"], conv.weight * first)
    assert torch.equal(weights["linear"], linear.weight * gates[120:].view(2, 6))
    rows = torch.stack([gates, 2 * gates])
    assert torch.equal(fold.split(rows)["conv"][1], 2 * first)


def test_fold_is_differentiable_and_keeps_dtypes() -> None:
    model = networks.Dense().to(torch.bfloat16)
    groups = discover(networks.Dense(), networks.images()).groups
    gates = torch.full((sum(g.units for g in groups),), 0.5, requires_grad=True)
    fold = Fold(model, groups).to("cpu")
    weights = fold(dict(model.named_parameters()), gates)
    assert list(weights) == fold.names and all(w.dtype == torch.bfloat16 for w in weights.values())
    sum(w.float().square().sum() for w in weights.values()).backward()
    assert gates.grad is not None and bool((gates.grad != 0).all())


def test_fold_leaves_foreign_channels_open() -> None:
    model = nn.Sequential(nn.Conv2d(5, 2, 1))
    group = Group("x", 2, (Slice("0.weight", 1, torch.tensor([-1, 0, 1, 0, -1]), "read"),))
    weight = Fold(model, [group])(dict(model.named_parameters()), torch.tensor([0.25, 0.0]))["0.weight"]
    expected = model[0].weight * torch.tensor([1, 0.25, 0, 0.25, 1]).view(1, 5, 1, 1)
    torch.testing.assert_close(weight, expected)


def test_verify_refuses_a_wrong_group() -> None:
    model = networks.chain()
    first, second = discover(model, networks.images()).groups
    flipped = tuple(replace(p, unit=p.unit.flip(0)) if p.role == "read" else p for p in second.slices)
    bad = replace(second, slices=flipped)
    keep = torch.ones(20, dtype=torch.bool)
    keep[[1, 9, 11]] = False
    with pytest.raises(StructureError, match=r"the cut network differs from the gated one.*granularity='weight'"):
        verify(model, (first, bad), keep, networks.images())


def test_outputs_that_are_no_numbers_are_no_proof() -> None:
    """NaN compares as neither larger nor smaller: it must not pass for a difference of 0."""
    model = networks.chain().double()
    groups = discover(model, networks.images().double()).groups
    with torch.no_grad():
        model.fc.bias[0] = math.nan
    keep = random_keep(groups, 0)
    assert difference(model, groups, keep, (networks.images().double(),)) == math.inf
    with pytest.raises(StructureError, match="differs from the gated one by inf"):
        verify(model, groups, keep, networks.images())
