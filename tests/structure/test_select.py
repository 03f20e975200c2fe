"""The choice of units: in order of their scores, within the budget, in round numbers."""

from __future__ import annotations

from functools import cache
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dllp import zoo
from dllp.errors import StructureError
from dllp.structure.groups import Structure, discover
from dllp.structure.padding import widened
from dllp.structure.select import select
from tests.support import networks


@pytest.fixture(scope="module")
def structure() -> Structure:
    return discover(networks.resnet((16, 32, 64), 3), networks.images())


@pytest.mark.parametrize("cost", ["flops", "params"])
@pytest.mark.parametrize("keep", [0.2, 0.45, 0.7, 0.95, 1.0])
def test_select_meets_the_budget(structure: Structure, cost: str, keep: float) -> None:
    for seed in range(3):
        logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(seed))
        kept = select(structure, logits, cost=getattr(structure, cost), keep=keep)
        share = getattr(structure, cost).expected(kept.double()).item() / getattr(structure, cost).dense
        assert keep - 0.005 <= share <= keep + 1e-9
        for part in structure.slices:
            assert kept[part].any()
            gone = logits[part][~kept[part]]
            assert not len(gone) or logits[part][kept[part]].min() >= gone.max()


def test_select_without_a_budget(structure: Structure) -> None:
    logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(0))
    logits[structure.slices[0]] = torch.linspace(-3, -1, structure.groups[0].units)
    kept = select(structure, logits, cost=structure.flops, keep=None)
    assert int(kept[structure.slices[0]].sum()) == 1 and bool(kept[structure.slices[0]][-1])
    rest = structure.slices[0].stop
    assert torch.equal(kept[rest:], logits[rest:] > 0)


def test_select_keeps_more_for_more(structure: Structure) -> None:
    logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(1))
    shares = [
        structure.flops.expected(select(structure, logits, cost=structure.flops, keep=k / 10).double()).item()
        for k in range(2, 11)
    ]
    assert shares == sorted(shares) and shares[-1] == structure.flops.dense


@pytest.mark.parametrize("keep", [None, 0.3, 0.6])
def test_select_in_round_numbers(structure: Structure, keep: float | None) -> None:
    logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(2))
    kept = select(structure, logits, cost=structure.flops, keep=keep, round_to=8)
    counts = [int(kept[part].sum()) for part in structure.slices]
    assert all(count and count % 8 == 0 for count in counts)
    if keep is not None:
        assert structure.flops.expected(kept.double()).item() <= keep * structure.flops.dense


class Branches(nn.Module):
    """Units that cost 32 and 12 multiply-accumulates, three and four of them, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(30, 3), nn.Linear(10, 4)
        self.ends = nn.ModuleList([nn.Linear(3, 2), nn.Linear(4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.ends[0](self.wide(x).relu()) + self.ends[1](self.narrow(x[:, :10]).relu())


def test_select_lets_a_chunk_make_room_for_others() -> None:
    """Taken in order, all narrow units and one wide one cost 80 of 108; for one narrow unit less a wide one fits.

    For three less two would, but these are too large a part of the network to be given up for a budget.
    """
    found = discover(Branches(), torch.randn(2, 30))
    assert [g.name for g in found.groups] == ["wide", "narrow"] and found.flops.dense == 144
    logits = torch.tensor([0.3, 0.2, 0.1, 4.0, 3.0, 2.0, 1.0])
    kept = select(found, logits, cost=found.flops, keep=108 / 144)
    assert kept.tolist() == [True, True, False, True, True, True, False]
    assert found.flops.expected(kept.double()).item() == 100


class Sides(nn.Module):
    """Four units each that cost 98, 100 and 140 multiply-accumulates, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.makers = nn.ModuleList([nn.Linear(reads, 4) for reads in (96, 98, 138)])
        self.ends = nn.ModuleList([nn.Linear(4, 2) for _ in self.makers])

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.makers, self.ends, strict=True)
        return torch.stack([end(make(x[:, : make.in_features]).relu()) for make, end in pairs]).sum(0)


def test_select_exchanges_what_is_worth_least() -> None:
    """Taken in order, 45 of 581 stay unused, and a unit of the last group fits in the place of one of either other.

    In place of the unit that costs 98 it fills the budget better, 3 are left and not 5; either is near enough (6.76),
    and so the unit goes whose logit is lower.
    """
    found = discover(Sides(), torch.randn(2, 138))
    assert found.flops.dense == 1352
    logits = torch.tensor([9.0, 5.0, -1.0, -1.0, 9.0, 4.0, -1.0, -1.0, 9.0, 3.0, -1.0, -1.0])
    kept = select(found, logits, cost=found.flops, keep=581 / 1352)
    assert [int(kept[part].sum()) for part in found.slices] == [2, 1, 2]
    assert found.flops.expected(kept.double()).item() == 576


def test_select_rounds_channels_not_units() -> None:
    model = networks.grouped()
    found = discover(model, networks.images())
    assert found.channels_per_unit.tolist() == [4] * 2 + [4] * 3 + [1] * 6
    kept = select(found, -torch.ones(found.units), cost=found.flops, keep=None, round_to=4)
    assert [int(kept[part].sum()) for part in found.slices] == [1, 1, 4]


def test_select_out_of_reach(structure: Structure) -> None:
    with pytest.raises(StructureError, match=r"0\.0001 cannot be reached.*0\.0"):
        select(structure, torch.zeros(structure.units), cost=structure.flops, keep=0.0001)
    with pytest.raises(StructureError, match="logits"):
        select(structure, torch.zeros(3), cost=structure.flops, keep=0.5)


class Loop(nn.Module):
    """A residual block whose convolution reads the channels that it writes: its cost grows as their square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv(x))


def loops() -> nn.Module:
    return networks.Head(nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), Loop(10), Loop(10)), 10)


@cache
def found(name: str) -> Structure:
    builds = {"plain": networks.plain, "residual": networks.resnet, "loops": loops, "grouped": networks.grouped}
    return discover(builds[name](), networks.images())


def chunks(structure: Structure, logits: Tensor, round_to: int) -> list[list[list[int]]]:
    """The units of each group, best first, in the fewest that are `round_to` channels or a multiple of them."""
    result = []
    for part in structure.slices:
        width = int(structure.channels_per_unit[part.start])
        step = next(k for k in count(1) if k * width % round_to == 0)
        order = sorted(range(part.start, part.stop), key=lambda unit: -float(logits[unit]))
        result.append([order[i : i + step] for i in range(0, len(order), step)])
    return result


@pytest.mark.parametrize("name", ["plain", "residual", "loops", "grouped"])
@given(share=st.floats(0, 1), round_to=st.sampled_from([1, 3, 4, 8]), seed=st.integers(0, 9999))
@settings(max_examples=40)
def test_a_selection_fills_its_budget_with_whole_chunks_and_never_exceeds_it(
    name: str, share: float, round_to: int, seed: int
) -> None:
    structure = found(name)
    logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = chunks(structure, logits, round_to)

    def price(taken: list[int]) -> float:
        """What the first chunks of each group cost, as a share of the dense network."""
        keep = torch.zeros(structure.units, dtype=torch.float64)
        keep[[unit for part, k in zip(parts, taken, strict=True) for chunk in part[:k] for unit in chunk]] = 1
        return structure.flops.expected(keep).item() / structure.flops.dense

    least = price([1] * len(parts))
    keep = least + share * (1 - least)
    kept = select(structure, logits, cost=structure.flops, keep=keep, round_to=round_to)
    taken = [sum(bool(kept[chunk[0]]) for chunk in part) for part in parts]
    chosen = sorted(unit for part, k in zip(parts, taken, strict=True) for chunk in part[:k] for unit in chunk)
    assert kept.nonzero().flatten().tolist() == chosen, "the best of each group, in whole chunks"
    assert price(taken) <= keep * (1 + 1e-9)
    for g, part in enumerate(parts):
        more = [k + (i == g) for i, k in enumerate(taken)]
        assert taken[g] == len(part) or price(more) > keep, "one chunk more is too much"


def test_gates_at_one_half_are_closed(structure: Structure) -> None:
    """theta > 1/2 is open, as for gates of single weights; the best of each group stays all the same."""
    kept = select(structure, torch.zeros(structure.units), cost=structure.flops, keep=None)
    assert [int(kept[part].sum()) for part in structure.slices] == [1] * len(structure.groups)


def bits(text: str) -> Tensor:
    return torch.tensor([digit == "1" for digit in text.replace(" ", "")])


def test_widened_adds_units_in_an_order_up_to_a_multiple() -> None:
    """Groups of 2 and 3 units with 4 channels each, and of 6 with 1: a multiple of channels is another of units."""
    structure = discover(networks.grouped(), networks.images())
    keep = bits("01 001 001010")
    assert structure.steps(8) == [2, 2, 8] and structure.steps(4) == [1, 1, 4]
    by_index = widened(structure, keep, structure.steps(4))
    assert torch.equal(by_index, bits("01 001 111010"))
    assert torch.equal(widened(structure, keep, structure.steps(8)), bits("11 101 111111"))
    priority = torch.arange(structure.units).float()
    by_priority = widened(structure, keep, [2, 2, 4], priority)
    assert torch.equal(by_priority, bits("11 011 001111"))
    assert torch.equal(widened(structure, by_index, structure.steps(4), priority), by_index), "nothing is missing"


@pytest.mark.parametrize("round_to", [1, 4])
def test_an_even_cut_leaves_equally_wide_layers_equally_wide(round_to: int) -> None:
    even = discover(networks.resnet((16, 32), 3), networks.images(), even=True)
    logits = torch.randn(even.units, generator=torch.Generator().manual_seed(3))
    kept = select(even, logits, cost=even.flops, keep=0.5, round_to=round_to)
    counts: dict[int, set[int]] = {}
    for group, part in zip(even.groups, even.slices, strict=True):
        counts.setdefault(group.units, set()).add(int(kept[part].sum()))
    assert counts.keys() == {16, 32} and all(len(found) == 1 for found in counts.values())
    assert even.flops.expected(kept.double()).item() <= 0.5 * even.flops.dense
    assert all(next(iter(found)) % round_to == 0 for found in counts.values())


def small_bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes))


@cache
def mixed(name: str) -> Structure:
    """Channels; channels and branches; channels, heads, widths under norms and branches."""
    if name == "transformer":
        return discover(small_bert(), torch.arange(14).view(2, 7), units="both")
    model = zoo.build("small_cnn", 10, 3, image_size=8) if name == "plain" else networks.resnet((16, 32), 2)
    return discover(model, networks.images(), units="both")


@pytest.mark.parametrize("name", ["plain", "residual", "transformer"])
@given(keep=st.sampled_from([0.2, 0.5, 0.8]), scale=st.sampled_from([0.01, 1.0, 10.0]), seed=st.integers(0, 9999))
@settings(max_examples=40)
def test_any_mixture_of_units_fills_a_budget(name: str, keep: float, scale: float, seed: int) -> None:
    """Within half a percent of the dense cost, whether units of a group have logits alike or not."""
    structure = mixed(name)
    noise = torch.randn(structure.units + len(structure.groups), generator=torch.Generator().manual_seed(seed))
    units, groups = noise.split([structure.units, len(structure.groups)])
    logits = units + scale * groups.repeat_interleave(torch.tensor([group.units for group in structure.groups]))
    kept = select(structure, logits, cost=structure.flops, keep=keep)
    share = structure.flops.expected(kept.double()).item() / structure.flops.dense
    assert keep - 0.005 <= share <= keep * (1 + 1e-9)
