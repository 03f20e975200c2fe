"""What removed branches leave in a graph, and what has to stay."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dllp.deploy.export import packed, trace
from dllp.structure.branches import GONE, IDENTITY
from dllp.structure.groups import discover
from dllp.structure.slicing import cut, recipe
from tests.structure.test_branches import CASES, Case
from tests.support import networks


class Block(nn.Module):
    """x and the zeros of a branch that is gone, put together in some way, between layers of a network."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], least: float = math.inf) -> None:
        super().__init__()
        self.join, self.branch = join, nn.Threshold(least, 0.0)
        self.stem, self.head = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(self.join(x, self.branch(x)))


def operations(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target).split(".")[1] for n in program.graph.nodes if str(n.target).startswith("aten.")]


def answers(program: torch.export.ExportedProgram, x: Tensor) -> Tensor:
    """Of the graph after it was written and read."""
    return torch.export.load(io.BytesIO(packed(program, "pt2"))).module()(x)


@pytest.mark.parametrize(
    "join", [
        lambda x, zeros: (x + zeros).relu(), lambda x, zeros: (zeros + x).relu(),
        lambda x, zeros: zeros.add_(x).relu_(), lambda x, zeros: torch.relu(torch.relu(zeros + x)),
    ],
)  # fmt: skip
def test_a_removed_branch_leaves_nothing(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    block, x = Block(join).eval(), torch.randn(3, 2, 4, 4)
    program = trace(block, x)
    assert operations(program) == ["conv2d", "relu", "conv2d"]
    assert torch.equal(answers(program, x), block(x))


@pytest.mark.parametrize(
    ("join", "least"), [
        (lambda x, zeros: (x + zeros).relu(), 0.5),  # passes what is above
        (lambda x, zeros: x + zeros.exp(), math.inf),
        (lambda x, zeros: x * zeros, math.inf),
        (lambda x, zeros: x.mean((2, 3), keepdim=True) + zeros, math.inf),  # gives the smaller one the larger shape
        (lambda x, zeros: torch.add(zeros, x, alpha=2.0), math.inf),
    ],
)  # fmt: skip
def test_what_is_no_addition_of_zeros_stays(join: Callable[[Tensor, Tensor], Tensor], least: float) -> None:
    block, x = Block(join, least).eval(), torch.randn(3, 2, 4, 4)
    program = trace(block, x)
    assert "threshold" in operations(program)
    assert torch.equal(answers(program, x), block(x))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_kind_of_branch_leaves_anything(case: Case) -> None:
    """With a layer scale behind it, with a gate, in front of a norm or behind one."""
    build, example, _ = case
    model, x = build().eval(), torch.cat([example(), example()])
    structure = discover(model, example(), units="blocks")
    small = cut(model, recipe(model, structure.groups, torch.zeros(structure.units, dtype=torch.bool))).eval()
    program = trace(small, x)
    assert not {"threshold", "new_zeros", "mul"} & set(operations(program))
    assert operations(program).count("add") < operations(trace(model, x)).count("add")
    torch.testing.assert_close(answers(program, x), small(x), rtol=0, atol=1e-6)


def test_a_sum_that_is_the_output_stays() -> None:
    class Last(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.branch(x)

    last, x = Last(torch.add), torch.randn(3, 2)
    assert torch.equal(answers(trace(last, x), x), last(x))


def test_a_network_without_some_blocks_has_no_more_operations_than_its_layers_need() -> None:
    model = networks.resnet((16, 32), 4).eval()
    structure = discover(model, networks.images(), units="both")
    keep = torch.ones(structure.units, dtype=torch.bool)
    for group, part in zip(structure.groups, structure.slices, strict=True):
        if group.units == 1:
            keep[part] = False
    kept = recipe(model, structure.groups, keep)
    assert any(entry.startswith(GONE) and entry != IDENTITY for entries in kept.values() for entry in entries)
    small, x = cut(model, kept).eval(), torch.randn(2, 3, 8, 8)
    program = trace(small, x)
    found = operations(program)
    assert "threshold" not in found and found.count("add") < operations(trace(model, x)).count("add")
    torch.testing.assert_close(answers(program, x), small(x), rtol=0, atol=1e-6)
