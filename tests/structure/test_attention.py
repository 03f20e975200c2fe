"""Heads, widths under norms, tied and fused weights: what the axes of attention networks are found to be."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dllp.errors import StructureError
from dllp.structure.following import CutAttention
from dllp.structure.groups import Structure, discover
from dllp.structure.padding import padded
from dllp.structure.select import select
from dllp.structure.slicing import cut, kept_indices, recipe
from dllp.structure.verification import verify
from tests.support.oracles import difference
from tests.support.particles import random_keep

WIDTH, HEADS, DIM, TOKENS = 12, 4, 3, 7


class Settings:
    """A configuration that modules share."""

    def __init__(self) -> None:
        self.heads, self.groups, self.dim = HEADS, 2, DIM


class Fused(nn.Module):
    """Heads from one projection; the last view takes its width from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-2, -1) * DIM**-0.5).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(b, n, c))


class Grouped(nn.Module):
    """Two key and value heads for four queries, rotary positions, sizes from a shared configuration."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.q, self.out = nn.Linear(WIDTH, HEADS * 4, bias=False), nn.Linear(HEADS * 4, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, 2 * 4, bias=False), nn.Linear(WIDTH, 2 * 4, bias=False)
        self.register_buffer("angle", torch.rand(TOKENS, 4))

    def rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.angle.cos() + torch.cat([-right, left], -1) * self.angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.rotate(self.q(x).view(b, n, -1, 4).transpose(1, 2))
        k, v = (layer(x).view(b, n, self.config.groups, 4).transpose(1, 2) for layer in (self.k, self.v))
        times = self.config.heads // self.config.groups
        k, v = (
            t[:, :, None].expand(b, self.config.groups, times, n, 4).reshape(b, self.config.heads, n, 4)
            for t in (self.rotate(k), v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))


class Rms(nn.Module):
    """As language models write it: in float32, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Response(nn.Module):
    """Global response normalisation: channels compete by their norm over all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(p=2, dim=1, keepdim=True)
        return x + self.shift + self.scale * x * size / (size.mean(-1, keepdim=True) + 1e-6)


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20, bias=False), nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), Response(10), nn.Linear(10, WIDTH))


class Transformer(nn.Module):
    """Words, positions, pre- or post-norm blocks; the output layer may share the weight of the table."""

    def __init__(
        self, attend: Callable[[], nn.Module], inner: Callable[[], nn.Module], norm: Callable[[], nn.Module], *,
        before: bool = True, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.table, self.places = nn.Embedding(11, WIDTH), nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.attend, self.inner = attend(), inner()
        self.norms = nn.ModuleList([norm(), norm(), norm()])
        self.gamma, self.before = nn.Parameter(torch.rand(WIDTH)), before
        self.last = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.last.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) + self.places
        if self.before:
            x = x + self.gamma * self.attend(self.norms[0](x))
            x = x + self.inner(self.norms[1](x))
        else:
            x = self.norms[0](x + self.gamma * self.attend(x))
            x = self.norms[1](x + self.inner(x))
        return self.last(self.norms[2](x).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "fused": lambda: Transformer(Fused, feed_forward, lambda: nn.LayerNorm(WIDTH)),
    "post-norm": lambda: Transformer(Fused, feed_forward, lambda: nn.LayerNorm(WIDTH), before=False),
    "grouped": lambda: Transformer(lambda: Grouped(Settings()), SwiGlu, Rms, tied=True),
    "rms": lambda: Transformer(Fused, SwiGlu, lambda: nn.RMSNorm(WIDTH), tied=True),
}
WORDS = torch.randint(11, (3, TOKENS), generator=torch.Generator().manual_seed(0))


def found(name: str) -> tuple[nn.Module, Structure]:
    torch.manual_seed(0)
    model = NETWORKS[name]()
    return model, discover(model, WORDS)


def test_the_units_of_attention() -> None:
    _, structure = found("fused")
    units = {(group.name, group.kind): group.units for group in structure.groups}
    assert units == {("table", "width"): WIDTH, ("attend.qkv", "head"): HEADS, ("inner.0", "width"): 10}
    assert list(structure.whole) == ["last"]
    heads = structure.groups[1]
    read = next(piece for piece in heads.slices if piece.role == "read")
    assert (read.name, read.axis) == ("attend.proj.weight", 1)
    assert read.unit.tolist() == [head for head in range(HEADS) for _ in range(DIM)]
    rows = next(piece for piece in heads.slices if piece.name == "attend.qkv.weight")
    assert rows.unit.tolist() == read.unit.tolist() * 3
    width = {(piece.name, piece.axis) for piece in structure.groups[0].slices if piece.role != "size"}
    assert {("table.weight", 1), ("places", 2), ("gamma", 0), ("norms.2", -1), ("last.weight", 1)} <= width


def test_the_units_of_grouped_queries() -> None:
    _, structure = found("grouped")
    heads = [group for group in structure.groups if group.kind == "head"]
    assert sorted(group.units for group in heads) == [2, 2]  # groups, and the queries of each
    assert {piece.name for group in heads for piece in group.slices if piece.role == "size"} >= {
        "attend:config.groups",
        "attend:config.heads",
    }


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_cut_equals_gated_and_is_replayed_on_a_fresh_instance(name: str, seed: int) -> None:
    model, structure = found(name)
    keep = random_keep(structure.groups, seed)
    assert verify(model, structure.groups, keep, WORDS) <= 1e-12
    kept = json.loads(json.dumps(recipe(model, structure.groups, keep)))
    small = cut(model, kept).eval()
    fresh = cut(NETWORKS[name](), kept).eval()
    fresh.load_state_dict(small.state_dict())
    assert torch.equal(fresh(WORDS), small(WORDS)) and torch.equal(copy.deepcopy(fresh)(WORDS), small(WORDS))
    held, left = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, small))
    places = kept_indices(model, kept)
    assert all(torch.equal(held[key].flatten()[places[key]], value) for key, value in left.items())


@pytest.mark.parametrize("name", NETWORKS)
def test_costs_count_attentions_own_products(name: str) -> None:
    model, structure = found(name)
    for seed in range(3):
        keep = random_keep(structure.groups, seed)
        small = cut(model, recipe(model, structure.groups, keep)).eval()
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            small(WORDS[:1])
        assert structure.flops.expected(keep.double()).item() == counter.get_total_flops() / 2
        count = sum(p.numel() for p in small.parameters())
        assert structure.params.expected(keep.double()).item() == count


def test_expectation_by_enumeration() -> None:
    """Heads times width twice: a gate on both sides of a product with a third count."""
    _, structure = found("fused")
    free = torch.rand(structure.units, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    random = torch.zeros(structure.units, dtype=torch.bool)
    for part in structure.slices:
        random[part.start : part.start + 3] = True
    states = free.round().repeat(2**9, 1)
    states[:, random] = torch.tensor(list(itertools.product([0.0, 1.0], repeat=9)), dtype=torch.float64)
    theta = torch.where(random, free, states[0])
    chance = (states * theta + (1 - states) * (1 - theta))[:, random].prod(1)
    for cost in (structure.flops, structure.params):
        assert cost.expected(theta).item() == pytest.approx((chance @ cost.expected(states)).item(), rel=1e-12)


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.8])
def test_a_budget_is_met_with_any_mixture_of_units(keep: float) -> None:
    torch.manual_seed(0)
    blocks = [Transformer(Fused, SwiGlu, lambda: nn.LayerNorm(WIDTH)) for _ in range(2)]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = blocks

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x)

    structure = discover(Both(), WORDS)
    logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(1))
    kept = select(structure, logits, cost=structure.flops, keep=keep)
    share = structure.flops.expected(kept.double()).item() / structure.flops.dense
    assert keep - 0.005 <= share <= keep


def test_padding_leaves_widths_under_norms_alone() -> None:
    model, structure = found("rms")
    keep = random_keep(structure.groups, 1)
    wide, _ = padded(model, structure, keep, 4)
    small = cut(model, recipe(model, structure.groups, keep))
    torch.testing.assert_close(wide.eval()(WORDS), small.eval()(WORDS))
    assert wide.table.embedding_dim == small.table.embedding_dim  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "bad",
    [
        {"attend": {".num_heads": [0]}}, {"attend": {".num_heads": [1, 2]}}, {"attend": {".forward": [1]}},
        {"attend": {".training": [1]}}, {"attend": {".@x/2": [1, 2]}}, {"attend": {".@0/3": [1, 2]}},
        {"": {"places.3": [0]}}, {"": {"places.2": [99]}}, {"": {"places.x": [0]}}, {"table": {"weight.1": []}},
    ],
)  # fmt: skip
def test_recipes_of_strangers(bad: dict[str, dict[str, list[int]]]) -> None:
    with pytest.raises(StructureError):
        cut(NETWORKS["fused"](), bad)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both"])
def test_attention_by_its_own_sizes_is_pytorchs(batch_first: bool, need_weights: bool, masks: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).double().eval()
    query, other = torch.randn(2, 5, WIDTH, dtype=torch.float64), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    options: dict[str, Tensor] = {}
    if masks in ("causal", "both"):
        options["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if masks in ("padding", "both"):
        options["key_padding_mask"] = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    args = [x if batch_first else x.transpose(0, 1) for x in (query, other, other)]
    expected = module(*args, need_weights=need_weights, **options)
    actual = CutAttention(module)(*args, need_weights=need_weights, **options)
    torch.testing.assert_close(actual[0], expected[0])
    assert (actual[1] is None) == (expected[1] is None)
    if need_weights:
        torch.testing.assert_close(actual[1], expected[1])


def test_attention_without_a_batch_and_for_each_head() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, bias=False).eval()
    x = torch.randn(5, WIDTH)
    expected, actual = (f(x, x, x, average_attn_weights=False) for f in (module, CutAttention(module)))
    torch.testing.assert_close(actual, expected)
    mask = torch.zeros(HEADS, 5, 5)
    with pytest.raises(StructureError, match="takes no mask for each head"):
        CutAttention(module)(x, x, x, attn_mask=mask)
    causal = torch.full((5, 5), -torch.inf).triu(1)
    torch.testing.assert_close(
        CutAttention(module)(x, x, x, need_weights=False, is_causal=True)[0],
        module(x, x, x, need_weights=False, attn_mask=causal)[0],
    )


class Cross(nn.Module):
    """PyTorch's attention as most forwards call it: it computes the heads' shares, which may be returned or not."""

    def __init__(self, keys: int = WIDTH, *, shares: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.shares = nn.Linear(5, WIDTH), nn.Linear(5, keys), shares
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, kdim=keys, vdim=keys, batch_first=True)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        y = self.right(y)
        mixed, shares = self.attend(self.left(x), y, y)
        return (self.last(mixed), shares) if self.shares else (self.last(mixed),)


@pytest.mark.parametrize("keys", [WIDTH, 10])
@pytest.mark.parametrize("seed", range(3))
def test_heads_are_cut_where_nobody_reads_their_shares(keys: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = Cross(keys), (torch.randn(2, 3, 5), torch.randn(2, 4, 5))
    structure = discover(model, inputs)
    assert HEADS in {group.units for group in structure.groups if group.kind == "head"}
    keep = random_keep(structure.groups, seed)
    exact = tuple(x.double() for x in inputs)
    assert difference(copy.deepcopy(model).double().eval(), structure.groups, keep, exact) <= 1e-12
    small = cut(model, recipe(model, structure.groups, keep)).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        small(*(x[:1] for x in inputs))
    assert structure.flops.expected(keep.double()).item() == counter.get_total_flops() / 2
    assert structure.params.expected(keep.double()).item() == sum(p.numel() for p in small.parameters())


def test_heads_whose_shares_are_returned_stay() -> None:
    structure = discover(Cross(shares=True), (torch.randn(2, 3, 5), torch.randn(2, 4, 5)))
    assert not any(group.kind == "head" for group in structure.groups)


def test_a_cut_attention_leaves_the_others_as_they_are() -> None:
    layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True) for _ in range(2))
    x = torch.randn(5, WIDTH)
    small = cut(layers, {"0": {"in_proj_weight.1": [0, 1], "in_proj_weight.0": [0, 1, 12, 13, 24, 25]}})
    assert torch.equal(small[1](x, x, x)[0], layers[1](x, x, x)[0])  # type: ignore[index]


def test_several_means_in_one_module_are_not_gated() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x - x.mean(-1, keepdim=True)).mean(1) @ x[0].new_ones(x.shape[-1], 1) + y.mean(1, keepdim=True)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.mean = nn.Linear(5, 6), nn.Linear(5, 4), Twice()

        def forward(self, x: Tensor) -> Tensor:
            return self.mean(self.a(x), self.b(x[:, 0]))

    structure = discover(Network(), torch.randn(2, 3, 5))
    assert structure.groups == ()


def test_gates_of_a_width_reach_its_norms() -> None:
    model, structure = found("fused")
    keep = random_keep(structure.groups, 2)
    assert difference(model.double().eval(), structure.groups, keep, (WORDS,)) <= 1e-12
    assert not any("forward" in vars(module) for module in model.modules())
