"""Networks that return several tensors, or keep some between two forwards, are cut and verified as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dllp
from dllp.structure.groups import discover
from dllp.structure.slicing import copied, cut, gated_outputs, recipe, tensors
from dllp.structure.verification import verify
from tests.support.particles import random_keep

WIDTH, HEADS, TOKENS = 8, 4, 5
X = torch.randn(2, TOKENS, 3, generator=torch.Generator().manual_seed(0))


class Several(nn.Module):
    """Two heads on one stream; the second one alone reads the neurons of `side`."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.stem, self.side = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 6)
        self.first, self.second, self.pack = nn.Linear(WIDTH, 4), nn.Linear(6, 2), pack

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).relu()
        return self.pack(self.first(x), self.second(self.side(x).relu()))


PACKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"boxes": a, "labels": b},
    "nested": lambda a, b: {"boxes": [a], "besides": (None, {"labels": b})},
}


@pytest.mark.parametrize("name", PACKS)
def test_several_outputs_are_all_compared(name: str) -> None:
    torch.manual_seed(0)
    model = Several(PACKS[name]).eval()
    structure = discover(model, X)
    assert [(group.name, group.units) for group in structure.groups] == [("stem", WIDTH), ("side", 6)]
    assert set(structure.whole) == {"first", "second"}
    for seed in range(3):
        keep = random_keep(structure.groups, seed)
        assert verify(model, structure.groups, keep, X) < 1e-12
        small: Any = cut(model, recipe(model, structure.groups, keep))
        assert small.side.weight.shape == tuple(int(keep[part].sum()) for part in structure.slices)[::-1]
        found = tensors(small(X))
        assert [tuple(y.shape) for y in found] == [(2, TOKENS, 4), (2, TOKENS, 2)]
        for a, b in zip(found, tensors(gated_outputs(model, structure.groups, keep.float(), (X,))), strict=True):
            torch.testing.assert_close(a, b)


class Shuffled(Several):
    """The second output alone shows that its neurons are moved."""

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).relu()
        return self.pack(self.first(x), self.second(self.side(x).sort(-1).values))


@pytest.mark.parametrize("name", PACKS)
def test_the_last_output_alone_can_forbid_a_cut(name: str) -> None:
    structure = discover(Shuffled(PACKS[name]), X)
    assert [group.name for group in structure.groups] == ["stem"] and "side" in structure.whole


class Cached(nn.Module):
    """Attention whose table of positions is looked up once in evaluation, and kept for later forwards, as in LeViT."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table, self.kept = nn.Parameter(torch.randn(HEADS, TOKENS)), dict[str, Tensor]()
        place = torch.arange(TOKENS)
        self.register_buffer("places", (place[:, None] - place).abs(), persistent=False)

    def bias(self, device: torch.device) -> Tensor:
        if self.training:
            return self.table[:, self.places]
        if str(device) not in self.kept:
            self.kept[str(device)] = self.table[:, self.places]
        return self.kept[str(device)]

    def train(self, mode: bool = True) -> Cached:
        if mode:
            self.kept = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) + self.bias(x.device)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def stream() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, WIDTH), Cached(), nn.Linear(WIDTH, 2))


@pytest.mark.parametrize("filled", [False, True])
def test_a_tensor_of_the_first_forward_is_made_again_after_a_cut(filled: bool) -> None:
    """Heads go, and with them rows of the table; what an earlier forward has kept of it is of no use then."""
    model: Any = stream().eval()
    if filled:
        with torch.no_grad():
            model(X)
    before = dict(model[1].kept)
    structure = discover(model, X)
    part = next(part for group, part in zip(structure.groups, structure.slices, strict=True) if group.kind == "head")
    assert part.stop - part.start == HEADS
    assert model[1].kept.keys() == before.keys() and all(model[1].kept[k] is v for k, v in before.items())
    for seed in range(3):
        keep = random_keep(structure.groups, seed)
        keep[part] = torch.arange(HEADS) != seed
        assert verify(stream(), structure.groups, keep, X) < 1e-12
        small: Any = cut(model, recipe(model, structure.groups, keep))
        assert len(small[1].table) == HEADS - 1 and not small.training
        with torch.no_grad():
            twice = [small(X) for _ in range(2)]
            assert torch.equal(*twice) and len(small[1].kept) == 1
            torch.testing.assert_close(twice[0], small.train()(X))


def test_a_run_measured_in_evaluation_returns_networks_that_remember_nothing() -> None:
    model: Any = stream().eval()
    with torch.no_grad():
        model(X)
    x = torch.randn(64, TOKENS, 3, generator=torch.Generator().manual_seed(1))
    config = dllp.Config(keep_flops=0.4, epochs=2, batch_size=16, task="regression", device="cpu", seed=0)
    pooled = nn.Sequential(model, nn.Flatten())
    result = dllp.prune(pooled, (x, x[..., :2].flatten(1)), config, validation=0.25, progress=False)
    assert result.sizes[0].macs <= 0.4 * result.dense.macs
    for network in (result.model, result.reference):
        with torch.no_grad():
            torch.testing.assert_close(network(X), copied(network).train()(X))
