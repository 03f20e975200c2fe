"""Whole networks as users bring them: what they do beyond the small couplings of tests/support/networks.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import DataLoader, TensorDataset

import dllp
from dllp.deploy.export import export
from dllp.deploy.speed import subjects
from dllp.structure.groups import discover
from tests.support.networks import Head, conv_bn, images, shuffle
from tests.support.short_runs import CLASSES, run, stack

# ---- channels


class Unit(nn.Module):
    """ShuffleNetV2: two halves of the channels, of which one may pass by, shuffled; the next unit splits them again."""

    def __init__(self, width: int, first: bool = False) -> None:
        super().__init__()
        half = width // 2
        inputs = width if first else half
        self.left = conv_bn(width, half, 1) if first else None
        self.right = nn.Sequential(conv_bn(inputs, half, 1), nn.ReLU(), conv_bn(half, half, groups=half))
        self.last = conv_bn(half, half, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1) if self.left is None else (self.left(x), x)
        return shuffle(torch.cat([left, F.relu(self.last(self.right(right)))], 1))


def shuffled() -> nn.Module:
    units = [Unit(8, first=True), Unit(8), Unit(8)]
    return Head(nn.Sequential(conv_bn(3, 8), nn.ReLU(), *units, conv_bn(8, 12, 1), nn.ReLU()), 12)


def test_a_shuffle_before_a_split_leaves_the_other_channels_to_be_pruned():
    structure = discover(shuffled(), images())
    inner = {f"features.{k}.right.0.0" for k in (2, 3, 4)}
    assert {group.name for group in structure.groups} == {"features.0.0", *inner, "features.5.0"}
    assert structure.whole["features.2.left.0"]


class InTraining(nn.Module):
    """A side branch that evaluation does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = x + self.side(x) if self.training else x
        return self.fc(F.relu(self.last(x)).mean((2, 3)))


def test_what_layers_of_training_alone_read_is_kept_whole():
    result = run(InTraining(), keep_flops=0.8)
    assert "fails in training" in result.whole["first"]
    assert result.model.first.out_channels == 8 and result.widths["last"][0] < 8  # pyright: ignore


class LargeBatches(InTraining):
    """The side branch is for large batches only."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = x + self.side(x) if len(x) > 4 else x
        return self.fc(F.relu(self.last(x)).mean((2, 3)))


def test_a_way_that_no_example_showed_ends_the_run_with_one_line():
    with pytest.raises(dllp.StructureError, match=r"cut network fails on a batch of shape.*filter_fn"):
        run(LargeBatches())


def test_what_a_filter_fn_kept_is_known_to_export_speed_and_sampling(tmp_path: Path):
    result = run(Head(nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 8), nn.ReLU()), 8), keep_flops=0.7,
                 filter_fn=lambda module, name: name != "features.0.0")  # fmt: skip
    assert export(result, tmp_path / "small.pt2", (3, 8, 8), format="pt2", pad_to=4).difference < 1e-5
    assert len(subjects(result, (3, 8, 8))) == 4
    assert len(dllp.sample_gates(result, images(), 2)) == 4


# ---- single weights


class Attention(nn.Module):
    """Heads as a hard-coded shape: their channels cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv, self.out = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24), nn.Linear(8, 8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).reshape(len(x), 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), 4, 8)
        return self.fc(self.out(x).mean(1))


@pytest.mark.parametrize("model", [Attention, shuffled])
def test_single_weights_need_no_understanding_of_channels(model: Any):
    result = run(model(), granularity="weight", gate_linear=True)
    assert result.sizes[0].macs <= 0.5 * result.dense.macs
    assert not result.whole


def test_padding_a_network_of_single_weights_exports_its_zeros(tmp_path: Any):
    result = run(stack(), granularity="weight", keep_flops=0.3)
    assert export(result, tmp_path / "model.pt2", (3, 8, 8), format="pt2", pad_to=4).difference == 0


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = stack()
        self.alias = self.backbone

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(x)


def test_a_module_with_two_names_is_gated_once():
    result = run(TwoNames(), granularity="weight")
    assert set(result.widths) == {"backbone.0", "backbone.2", "backbone.4"}


# ---- copies, and the model that must stay as it was


class Keeping(nn.Module):
    """Keeps features of its last forward, in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.features, self.seen = stack(), None, {}

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.net[:-1](x)
        self.seen["mean"] = [self.features.mean()]
        return self.net[-1](self.features)


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_a_network_that_keeps_its_features_can_be_copied(granularity: str):
    model = Keeping()
    model(images())
    result = run(model, granularity=granularity)
    assert torch.equal(copy.deepcopy(result.model)(images()), result.model(images()))


def old_spectral_norm() -> nn.Module:
    model = stack()
    spectral_norm(model[2])  # its hook computes the weight, as the older weight_norm and pruning do
    return model


def parametrized() -> nn.Module:
    model = stack()
    parametrizations.spectral_norm(model[2])
    return model


@pytest.mark.parametrize("build", [old_spectral_norm, parametrized])
def test_a_computed_weight_is_left_alone_and_the_model_too(build: Any):
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = run(model, granularity="weight", keep_flops=0.9)
    assert set(result.widths) == {"0", "4"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_complex_buffer_stays_as_it_is():
    model = stack()
    model.register_buffer("rotation", torch.polar(torch.ones(4), torch.arange(4.0)))
    found = run(model).model.get_buffer("rotation")
    assert torch.equal(found, model.get_buffer("rotation"))


# ---- inputs


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.fc = nn.Embedding(20, 6), nn.Conv1d(6, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(self.table(ids).transpose(1, 2))).mean(2))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(20, (24, 7), generator=torch.Generator().manual_seed(0)), torch.arange(24) % CLASSES


@pytest.mark.parametrize("source", ["pair", "loader"])
def test_integers_reach_a_network_that_looks_them_up(source: str):
    x, y = words()
    result = run(Words(), (x, y) if source == "pair" else DataLoader(TensorDataset(x.int(), y), batch_size=12))
    assert result.widths["conv"][0] < 8
    assert result.posterior.predict(x).mean.shape == (24, CLASSES)


@pytest.mark.parametrize("source", ["pair", "loader"])
def test_integers_become_numbers_for_every_other_network(source: str):
    x, y = words()
    model = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def trained(x: Tensor) -> dict[str, Tensor]:
        data = (x, y) if source == "pair" else DataLoader(TensorDataset(x, y), batch_size=12)
        return run(model, data).particles[0].network.state_dict()

    found, expected = trained(x), trained(x.float())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_integers_that_are_in_no_table_are_told():
    x, y = words()
    with pytest.raises(dllp.StructureError, match=r"cannot take inputs.* index out of range"):
        run(Words(), (x + 20, y))
    late = x.clone()
    late[-1] = 20
    with pytest.raises(dllp.StructureError, match=r"fails on a batch of shape .*index out of range"):
        run(Words(), (late, y), seed=1, batch_size=24)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 12, 2, stride=2)
        self.groups, self.fc = nn.Conv2d(12, 20, 3, groups=4), nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.groups(self.up(self.conv(x).relu()).relu()).relu().mean((2, 3)))


def test_widths_count_channels_where_a_gate_stands_for_one_of_each_group():
    result = run(Grouped())
    for i, particle in enumerate(result.particles):
        kept = {name: particle.network.get_submodule(name).out_channels for name in ("conv", "up", "groups")}
        assert kept == {name: counts[i] for name, counts in result.widths.items()}
    assert [counts[-1] for counts in result.widths.values()] == [8, 12, 20]
    assert any(counts[0] < counts[-1] for name, counts in result.widths.items() if name != "conv")


def test_recurrent_layers_cost_their_matrix_products():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.rnn(x)[0][:, -1])

    steps = 7
    assert discover(Recurrent(), torch.randn(2, steps, 3)).flops.dense == steps * 4 * 4 * (3 + 4) + 4 * CLASSES


@pytest.mark.parametrize("fused", [True, False])
def test_attention_costs_its_scores_whoever_computes_them(fused: bool):
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.attention(x, x, x, need_weights=not fused)[0].mean(1))

    words = 5
    projections, scores = 4 * words * 8 * 8, 2 * words * words * 8
    assert discover(Attending(), torch.randn(2, words, 8), channels=False).flops.dense == (
        projections + scores + 8 * CLASSES
    )


# ---- networks that are not supported: one line, with the way out


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = stack()

    def forward(self, x: Tensor) -> Any:
        return (self.net(x), x) if self.training else self.net(x)


class InPlace(Auxiliary):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.sub_(1))


class Spectrum(Auxiliary):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3, 1, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x * self.factor).real)


def all_parametrized() -> nn.Module:
    model = stack()
    for k in (0, 2, 4):
        parametrizations.weight_norm(model[k])
    return model


REFUSED = {
    "script": (lambda: torch.jit.script(stack()), "ScriptModule: give the plain network"),
    "compile": (lambda: torch.compile(stack(), backend="eager"), "_orig_mod"),
    "parallel": (lambda: nn.DataParallel(stack()), r"DataParallel.* its \.module"),
    "inner parallel": (lambda: nn.Sequential(nn.DataParallel(stack())), r"'0' is a DataParallel"),
    "frozen": (lambda: stack().requires_grad_(False), r"no parameter that learns.*requires_grad_"),
    "in place": (InPlace, r"changes its inputs in place.*clone"),
    "complex": (Spectrum, "mixes dtypes"),
    "parametrized": (all_parametrized, "no weights to gate: 2: .* computed.* parametrization"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_one_line_with_the_way_out(name: str):
    build, told = REFUSED[name]
    with pytest.raises(dllp.StructureError, match=told):
        run(build(), granularity="weight")


def test_a_budget_out_of_reach_tells_which_layers_stay_whole():
    model = stack()
    parametrizations.weight_norm(model[2])
    with pytest.raises(
        dllp.StructureError,
        match=r"keep more, or use granularity='weight' or method magnitude-l2 \(whole are 0: the weight that",
    ):
        run(model, keep_flops=0.1)
