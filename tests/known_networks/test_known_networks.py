"""What can be cut of the networks that people use, each cut verified on its own; `make test-zoo`."""

from __future__ import annotations

import pytest

from dllp.structure.verification import TOLERANCE
from tests.known_networks.networks import NETWORKS
from tests.known_networks.table import examine

BORROWED = [name for name in NETWORKS if name not in ("UNet", "nn.TransformerEncoder")]
ignored = pytest.mark.filterwarnings("ignore")  # of the libraries that the networks come from


def check(name: str) -> None:
    row = examine(name)
    assert row.most >= NETWORKS[name].reach
    assert row.difference <= TOLERANCE


@pytest.mark.parametrize("name", ["UNet", "nn.TransformerEncoder"])
def test_networks_that_need_no_other_library(name: str) -> None:
    check(name)


@ignored
@pytest.mark.zoo
@pytest.mark.parametrize("name", BORROWED)
def test_networks_of_other_libraries(name: str) -> None:
    check(name)


def test_there_are_so_many_of_each_kind() -> None:
    kinds = [network.kind for network in NETWORKS.values()]
    assert (kinds.count("convolutional"), kinds.count("transformer")) == (28, 33)
