"""Networks that are not supported: one line, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import dllp
from tests.support.foreign import CLASSES, run, stack


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
    "script": (lambda: torch.jit.script(stack()), "torch.jit"),
    "compile": (lambda: torch.compile(stack(), backend="eager"), "_orig_mod"),
    "parallel": (lambda: nn.DataParallel(stack()), r"DataParallel.* its \.module"),
    "inner parallel": (lambda: nn.Sequential(nn.DataParallel(stack())), r"'0' is wrapped"),
    "half": (lambda: stack().half(), r"float16 but inputs float32.*\.float\(\)"),
    "frozen": (lambda: stack().requires_grad_(False), r"frozen.*requires_grad_"),
    "auxiliary": (Auxiliary, "in training.* not a tuple"),
    "pixels": (lambda: nn.Conv2d(3, CLASSES, 1), r"\(batch, outputs\), not one of shape \(2, 5, 8, 8\)"),
    "in place": (InPlace, r"changes its inputs in place.*clone"),
    "complex": (Spectrum, "'factor' holds no real numbers"),
    "parametrized": (all_parametrized, "no weights to gate: 2, 4, 0: .* computed.* parametrization"),
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
        match=r"keep more, or use granularity='weight' or method magnitude-l2 \(whole are 2: the weight",
    ):
        run(model, keep_flops=0.1)
