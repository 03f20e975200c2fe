"""What can be cut of the networks that people use, each cut verified on its own; `make test-zoo`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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


def test_there_are_so_many_of_each_kind() -> None:
    kinds = [network.kind for network in NETWORKS.values()]
    assert (kinds.count("convolutional"), kinds.count("transformer")) == (28, 33)
