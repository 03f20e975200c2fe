"""Residual branches: where they are found, what they cost, how they are chosen, and what is left without them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllp.errors import StructureError
from dllp.structure.groups import Structure, discover
from dllp.structure.padding import kept_units, padded, rounded
from dllp.structure.select import select
from dllp.structure.slicing import Recipe, cut, kept_indices, recipe
from dllp.structure.verification import verify
from tests.support import networks
from tests.support.oracles import difference

WIDTH, TOKENS = 8, 5


class Added(nn.Module):
    """x + branch(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Inverted(nn.Module):
    """A block of MobileNetV2: wide inside, narrow outside, nothing after the last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(WIDTH, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depthwise, self.norm2 = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12)
        self.project, self.norm3 = nn.Conv2d(12, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.norm1(self.expand(x)), inplace=True)
        y = F.relu6(self.norm2(self.depthwise(y)), inplace=True)
        return x + self.norm3(self.project(y))


class Next(nn.Module):
    """A block of ConvNeXt, whose layer scale is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.gamma * y).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Two heads; called by name, and answers with a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 2, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.qkv(tokens).chunk(3, -1))
        shares = (q @ k.transpose(-1, -2) * scale).softmax(-1)
        return self.out((shares @ v).transpose(1, 2).flatten(2)), shares


class PreNorm(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(tokens=self.norm1(x), scale=0.5)[0]
        return x + self.mlp(self.norm2(x))


class Parallel(nn.Module):
    """Attention and neurons of one norm side by side, as in GPT-J."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.attention(tokens=y, scale=0.5)[0] + self.mlp(y) + x


class Squeezed(nn.Module):
    """A branch that is scaled by what it holds, at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.squeeze = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return x + y * self.squeeze(y.mean((2, 3))).sigmoid()[:, :, None, None]


def on_images(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *blocks, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(WIDTH, 5))


def on_tokens(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, WIDTH), *blocks, nn.Linear(WIDTH, 5))


TOKEN_BATCH = torch.randn(2, TOKENS, 3, generator=torch.Generator().manual_seed(0))
Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, tuple[str, ...]]]
CASES: dict[str, Case] = {
    # the first block of the second and third stage has a projection for a shortcut
    "resnet": (
        lambda: networks.resnet((WIDTH, 12, 16), 2),
        networks.images,
        {f"features.{i}": (f"features.{i}.conv2.1.weight", f"features.{i}.conv2.1.bias") for i in (2, 3, 5, 7)},
    ),
    "inverted": (
        lambda: on_images(Inverted(), Inverted()),
        networks.images,
        {"1": ("1.norm3.weight", "1.norm3.bias"), "2": ("2.norm3.weight", "2.norm3.bias")},
    ),
    "next": (lambda: on_images(Next()), networks.images, {"1": ("1.gamma",)}),
    "squeezed": (lambda: on_images(Squeezed()), networks.images, {"1": ("1.norm.weight", "1.norm.bias")}),
    "pre-norm": (
        lambda: on_tokens(PreNorm()),
        lambda: TOKEN_BATCH,
        {
            "1.attention": ("1.attention.out.bias", "1.attention.out.weight"),
            "1.mlp": ("1.mlp.2.bias", "1.mlp.2.weight"),
        },
    ),
    "parallel": (
        lambda: on_tokens(Parallel()),
        lambda: TOKEN_BATCH,
        {"1": ("1.attention.out.bias", "1.attention.out.weight", "1.mlp.bias", "1.mlp.weight")},
    ),
}


def trained(build: Callable[[], nn.Module]) -> nn.Module:
    """A float64 network in evaluation mode whose norms are not trivial."""
    torch.manual_seed(0)
    model = build().double().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() < 2:
            tensor.data = torch.rand(tensor.shape, dtype=torch.float64) + 0.5
    return model


def patterns(structure: Structure, count: int = 6) -> list[Tensor]:
    """(U,) bool each: branches at random, and some units of all groups."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        keep = torch.rand(structure.units, generator=generator) < 0.5
        for group, part in zip(structure.groups, structure.slices, strict=True):
            keep[part.start] |= not group.gone
        found.append(keep)
    return found


# ---- where they are


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_found_with_their_last_affine_maps(case: Case) -> None:
    build, example, expected = case
    structure = discover(build(), example(), units="blocks")
    assert {g.name: tuple(piece.name for piece in g.slices) for g in structure.groups} == expected
    assert all((g.units, g.kind, g.width) == (1, "branch", 1) for g in structure.groups) and not structure.whole


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cut_is_gated(case: Case) -> None:
    """With all other units gated, too; what is left holds the numbers that the costs count."""
    build, example, expected = case
    model, structure = trained(build), discover(build(), example(), units="both")
    assert [g.name.removesuffix(":branch") for g in structure.groups if g.gone] == list(expected)
    for keep in patterns(structure):
        assert difference(model, structure.groups, keep, (example().double(),)) < 1e-12
        assert verify(model, structure.groups, keep, example()) < 1e-9
        kept = recipe(model, structure.groups, keep)
        small = cut(model, kept)
        counted = discover(small, example().double(), channels=False)
        assert structure.params.expected(keep.double()) == sum(p.numel() for p in small.parameters())
        assert structure.flops.expected(keep.double()).item() == pytest.approx(counted.flops.dense)
        places = kept_indices(model, kept)
        for name, parameter in model.named_parameters():
            if name in dict(small.named_parameters()):
                assert torch.equal(parameter.flatten()[places[name]], small.get_parameter(name))
            else:
                assert not places[name].numel()


def test_only_the_shortcut_is_left() -> None:
    model = trained(CASES["pre-norm"][0])
    structure = discover(model, TOKEN_BATCH.double(), units="blocks")
    assert [g.name for g in structure.groups] == ["1.attention", "1.mlp"]
    small = cut(model, recipe(model, structure.groups, torch.tensor([False, False])))
    x = TOKEN_BATCH.double()
    torch.testing.assert_close(small(x), model[2](model[0](x)), rtol=0, atol=0)
    one = cut(model, recipe(model, structure.groups, torch.tensor([True, False])))
    y = model[0](x)
    torch.testing.assert_close(one(x), model[2](y + model[1].attention(model[1].norm1(y), 0.5)[0]), rtol=0, atol=0)
    assert not list(small[1].parameters()) and isinstance(small[1].mlp, nn.Threshold)


class Both(nn.Module):
    """Two projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Elsewhere(Both):
    """A branch whose result is read a second time."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return (x + y) * y.sigmoid()


class Joined(Both):
    """A concatenation of x and f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.cat([x, self.a(x)], -1)[..., WIDTH // 2 : -WIDTH // 2])


class Chosen(Both):
    """A branch that ends in no affine map."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x)).softmax(-1)


class Shared(Both):
    """Two branches of one weight."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(self.a(x).relu())
        return x + self.b(x)


class Bare(Both):
    """A branch without a module that could go."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.a.weight, self.a.bias)


@pytest.mark.parametrize("block", [Both, Elsewhere, Joined, Chosen, Shared, Bare])
def test_no_branch(block: Callable[[], nn.Module]) -> None:
    model = on_tokens(block()).eval()
    structure = discover(model, TOKEN_BATCH, units="blocks")
    assert not structure.groups and not structure.whole


def test_a_filter_keeps_what_is_inside() -> None:
    model = on_tokens(PreNorm())
    structure = discover(model, TOKEN_BATCH, units="blocks", filter_fn=lambda module, name: name != "1.mlp.0")
    assert [g.name for g in structure.groups] == ["1.attention"]
    assert structure.whole == {"1.mlp:branch": "filter_fn keeps 1.mlp.0"}


class Inline(nn.Module):
    """Its own forward reshapes between the layers of its branch: they cannot be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).view(*x.shape[:-1], 2, WIDTH).mean(-2))


def test_what_cannot_be_verified_stays_whole() -> None:
    structure = discover(on_tokens(Inline(), PreNorm()), TOKEN_BATCH, units="both")
    assert [g.name for g in structure.groups if g.gone] == ["2.attention", "2.mlp"]
    assert "the cut network fails" in structure.whole["1"]


# ---- what they cost


def test_expected_cost_by_all_patterns() -> None:
    """Three channels of a stream, two neurons in a branch and the branch itself: 64 patterns of open gates."""
    model = nn.Sequential(
        nn.Linear(2, 3), Added(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3))), nn.Linear(3, 2)
    )
    structure = discover(model, torch.randn(1, 2), units="both")
    assert [(g.name, g.units, g.kind) for g in structure.groups] == [
        ("0", 3, "channel"), ("1.branch.0", 2, "channel"), ("1.branch", 1, "branch")
    ]  # fmt: skip
    assert structure.holders == [[], [2], []]
    theta = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, dtype=torch.float64)
    for pattern in itertools.product((0.0, 1.0), repeat=6):
        z = torch.tensor(pattern, dtype=torch.float64)
        w, h, b = z[:3].sum(), z[3:5].sum(), z[5]
        macs = 2 * w + b * 2 * w * h + 2 * w
        params = (2 * w + w) + b * (w * h + h + h * w + w) + (2 * w + 2)
        expected += torch.where(z > 0, theta, 1 - theta).prod() * torch.stack([macs, params])
        assert structure.flops.expected(z) == macs and structure.params.expected(z) == params
    torch.testing.assert_close(structure.flops.expected(theta), expected[0])
    torch.testing.assert_close(structure.params.expected(theta), expected[1])


# ---- which of them stay


@pytest.fixture(scope="module")
def deep() -> Structure:
    return discover(networks.resnet((16, 32), 4), networks.images(), units="both")


@pytest.mark.parametrize("cost", ["flops", "params"])
@pytest.mark.parametrize("keep", [0.05, 0.2, 0.45, 0.8, 1.0])
def test_select_meets_the_budget_with_any_mixture(deep: Structure, cost: str, keep: float) -> None:
    for seed in range(4):
        logits = torch.randn(deep.units, generator=torch.Generator().manual_seed(seed))
        kept = select(deep, logits, cost=getattr(deep, cost), keep=keep)
        share = getattr(deep, cost).expected(kept.double()).item() / getattr(deep, cost).dense
        assert keep - 0.005 <= share <= keep + 1e-9
        consistent(deep, kept)


def consistent(structure: Structure, kept: Tensor) -> None:
    """A closed branch closes what it holds; every group of an open one, and those outside, have a unit left."""
    for holders, part in zip(structure.holders, structure.slices, strict=True):
        is_open = all(bool(kept[structure.slices[b]]) for b in holders)
        is_branch = part.stop - part.start == 1
        assert is_open or not kept[part].any()
        assert kept[part].any() or not is_open or is_branch


def test_a_branch_goes_when_it_or_all_it_holds_is_closed(deep: Structure) -> None:
    branch = next(g for g, group in enumerate(deep.groups) if group.gone)
    (inner,) = (g for g, holders in enumerate(deep.holders) if branch in holders)
    for closed in (branch, inner):
        logits = torch.ones(deep.units)
        logits[deep.slices[closed]] = -1
        kept = select(deep, logits, cost=deep.flops, keep=None)
        assert not kept[deep.slices[branch]].any() and not kept[deep.slices[inner]].any()
        assert int((~kept).sum()) == 1 + deep.groups[inner].units
        kept = select(deep, logits, cost=deep.flops, keep=0.8)
        assert not kept[deep.slices[branch]].any()
        consistent(deep, kept)


def test_branches_alone_leave_no_room_for_another() -> None:
    structure = discover(networks.resnet((8, 8), 4), networks.images(), units="blocks")
    cost = structure.flops
    for seed, keep in itertools.product(range(3), (0.5, 0.7, 0.9)):
        logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(seed))
        kept = select(structure, logits, cost=cost, keep=keep)
        assert cost.expected(kept.double()) <= keep * cost.dense
        for closed in (~kept).nonzero().flatten():
            more = kept.clone()
            more[closed] = True
            assert cost.expected(more.double()) > keep * cost.dense


def test_round_numbers_leave_branches_alone(deep: Structure) -> None:
    logits = torch.randn(deep.units, generator=torch.Generator().manual_seed(0))
    kept = select(deep, logits, cost=deep.flops, keep=0.4, round_to=4)
    assert all(int(kept[part].sum()) % 4 == 0 for g, part in zip(deep.groups, deep.slices, strict=True) if not g.gone)
    consistent(deep, kept)
    model, x = networks.resnet((16, 32), 4).eval(), networks.images()
    kept = select(deep, logits, cost=deep.flops, keep=0.4)
    assert not all(kept[deep.slices[g]].any() for g, group in enumerate(deep.groups) if group.gone)
    chosen = recipe(model, deep.groups, kept)
    assert torch.equal(kept_units(model, deep, chosen), kept)
    wide, macs = padded(model, deep, kept, 8)
    torch.testing.assert_close(wide(x), cut(model, chosen)(x))
    assert macs >= deep.flops.expected(kept.double())
    small, macs = rounded(model, deep, kept, 8)
    assert small(x).shape == (1, 5) and macs <= deep.flops.expected(kept.double())


# ---- recipes of strangers


@pytest.mark.parametrize(
    "bad",
    [
        {"1.mlp": {"!": []}}, {"1.mlp": {"!returns": []}}, {"1.mlp": {"!returns [0, 1]": []}},
        {"1.mlp": {"!returns {}": []}}, {"1.mlp": {"!zeros": [1]}}, {"": {"!identity": []}},
        {"1.mlp": {"!returns [[0]]": []}},
    ],
)  # fmt: skip
def test_recipes_that_remove_in_no_known_way(bad: Recipe) -> None:
    with pytest.raises(StructureError, match="in no known way"):
        cut(on_tokens(PreNorm()), bad)


# ---- networks of others


def test_layers_of_pytorch_run_without_their_branches() -> None:
    """Their kernel for evaluation, which reads the weights of all modules, is not called."""
    for norm_first in (False, True):
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, norm_first=norm_first)
        model = on_tokens(layer).eval()
        structure = discover(model, TOKEN_BATCH, units="blocks")
        assert len(structure.groups) == 2
        for keep in ([True, False], [False, True], [False, False]):
            small = cut(model, recipe(model, structure.groups, torch.tensor(keep)))
            with torch.no_grad():
                fast = small(TOKEN_BATCH)
            torch.testing.assert_close(fast, small(TOKEN_BATCH))


def hugging_face(name: str, task: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
    torch.manual_seed(0)
    common = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return getattr(transformers, task)(getattr(transformers, f"{name}Config")(**common, **options)).eval()


def tokens_of(count: int) -> Tensor:
    return torch.randint(3, 50, (2, count), generator=torch.Generator().manual_seed(0))


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_branches_of_bert() -> None:
    model = hugging_face("Bert", "BertForSequenceClassification", **SIZES)
    structure = discover(model, tokens_of(7), units="both")
    found = [(g.name, [name for name, _ in g.gone]) for g in structure.groups if g.gone]
    layer = "bert.encoder.layer.0"
    assert found[:2] == [
        (f"{layer}.attention", [f"{layer}.attention.self", f"{layer}.attention.output.dense"]),
        (layer, [f"{layer}.intermediate", f"{layer}.output.dense"]),
    ]
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "task", "options"),
    [
        ("Llama", "LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}),
        ("GPT2", "GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    ],
)
def test_decoding_without_an_attention(name: str, task: str, options: dict[str, Any]) -> None:
    """The first layer's, whose entry in the cache tells how many tokens were seen; and all of them."""
    model = hugging_face(name, task, **options)
    structure = discover(model, tokens_of(7), units="blocks")
    assert [g.name.rpartition(".")[2] for g in structure.groups[1::2]] == ["mlp", "mlp"]
    tokens = tokens_of(9)
    for keep in ([False, True, True, True], [False, False, True, False], [False, True, False, True]):
        small: Any = cut(model, recipe(model, structure.groups, torch.tensor(keep)))
        with torch.no_grad():
            whole = small(input_ids=tokens, use_cache=False).logits
            past = small(input_ids=tokens[:, :5], use_cache=True).past_key_values
            for i in range(5, 9):
                found = small(input_ids=tokens[:, i : i + 1], past_key_values=past, use_cache=True)
                torch.testing.assert_close(found.logits[:, 0], whole[:, i], rtol=1e-5, atol=1e-6)
                past = found.past_key_values
