"""What can be cut of the networks that people use, each cut verified on its own; `make test-zoo`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dllp.structure.groups import discover
from dllp.structure.verification import TOLERANCE
from tests.known_networks.networks import NETWORKS
from tests.known_networks.table import Row, examine, write

ignored = pytest.mark.filterwarnings("ignore")  # of the libraries that the networks come from


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """Rows for results/structure."""
    rows: list[Row] = []
    yield rows
    write(rows)


def checked(name: str) -> Row:
    row = examine(name)
    assert row.most >= NETWORKS[name].reach
    assert row.difference <= TOLERANCE
    return row


@pytest.mark.parametrize("name", ["UNet", "nn.TransformerEncoder"])
def test_networks_that_need_no_other_library(name: str) -> None:
    checked(name)


@ignored
@pytest.mark.zoo
@pytest.mark.parametrize("name", NETWORKS)
def test_all_networks(name: str, table: list[Row]) -> None:
    table.append(checked(name))


BRANCHES = {
    "resnet18": 5, "resnet50": 12, "mobilenetv2_100": 10, "efficientnet_b0": 9, "vgg11_bn": 0, "densenet121": 0,
    "convnext_tiny": 18, "vit_tiny_patch16_224": 24, "swin_tiny_patch4_window7_224": 24, "cait_xxs24_224": 51,
    "Bert": 4, "GPT2": 4, "Llama, grouped queries": 4, "T5": 10,
}  # fmt: skip
"""Residual branches whose shortcut is an identity."""


@ignored
@pytest.mark.zoo
@pytest.mark.parametrize(("name", "count"), BRANCHES.items())
def test_whole_branches_can_go(name: str, count: int) -> None:
    network = NETWORKS[name]
    assert discover(network.build().eval(), network.example(), units="blocks").units == count


def test_there_are_so_many_of_each_kind() -> None:
    kinds = [network.kind for network in NETWORKS.values()]
    assert (kinds.count("convolutional"), kinds.count("transformer")) == (28, 33)
