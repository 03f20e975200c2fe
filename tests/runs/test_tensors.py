"""Tensors on disk: damage is found, foreign headers are refused, and networks come back as they were."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from dllp import ArtifactError
from dllp.runs import tensors
from dllp.runs.tensors import check_shapes, checksum, read_network, read_tensors, write_network
from tests.support import short_runs


@given(st.dictionaries(st.text(), st.text(), max_size=3), st.text(), st.integers(0, 3))
def test_the_checksum_covers_texts_names_types_shapes_and_values(texts: dict[str, str], name: str, at: int) -> None:
    assume(name != "other" and "more" not in texts)
    tensors = {name: torch.arange(4.0), "other": torch.zeros(2, 3, dtype=torch.bfloat16)}
    changed = tensors[name].clone()
    changed[at] += 1e-3
    changes = [
        (tensors, {**texts, "more": ""}),
        *((tensors, {**texts, key: text + " "}) for key, text in texts.items()),
        ({name + " ": tensors[name], "other": tensors["other"]}, texts),
        (tensors | {name: tensors[name].double()}, texts),
        (tensors | {name: tensors[name].view(2, 2)}, texts),
        (tensors | {name: changed}, texts),
        (tensors | {"other": tensors["other"].half()}, texts),
    ]
    base = checksum(tensors, texts)
    assert base == checksum(dict(reversed(tensors.items())), dict(reversed(texts.items()))), "in any order"
    strided = tensors | {name: tensors[name].view(2, 2).T}
    assert checksum(strided, texts) == checksum(strided | {name: strided[name].contiguous()}, texts)
    assert base not in [checksum(*change) for change in changes]


def entry(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"__metadata__": {"a": 1}, "a": entry()},
        {"a": 3},
        {"a": entry("OBJECT")},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[True])},
        {"a": entry(shape=[3])},
        {"a": entry(shape=[2**40, 2**40])},
        {"a": entry(), "b": entry()},
        {"a": entry(offsets=(1, 3))},
    ],
)
def test_headers_that_are_refused(tmp_path: Path, header: object) -> None:
    """By safetensors itself: another version of it must do the same."""
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\x00\x01")
    with pytest.raises(ArtifactError, match=r"a\.safetensors cannot be read: .*header"):
        read_tensors(tmp_path / "a.safetensors")


def test_headers_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(tensors, "HEADER_BYTES", 10)
    with pytest.raises(ArtifactError, match=r"a\.safetensors is no safetensors file: a header of"):
        read_tensors(tmp_path / "a.safetensors")


def test_shapes_are_compared_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_network(path, nn.Linear(3, 2))
    with torch.device("meta"):
        check_shapes(path, nn.Linear(3, 2))
        huge = nn.Linear(2**30, 2**20)
    with pytest.raises(ArtifactError, match=r"'weight' is \(2, 3\), but the network needs \(1048576, 1073741824\)"):
        check_shapes(path, huge)


def test_booleans_and_weights_are_what_they_say(tmp_path: Path) -> None:
    text = json.dumps({"a": entry("BOOL")}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\x00\x07")
    with pytest.raises(ArtifactError, match="'a' holds booleans"):
        read_tensors(tmp_path / "a.safetensors")
    network = torch.nn.Linear(2, 1)
    broken = {"weight": torch.tensor([[1.0, torch.inf]]), "bias": torch.zeros(1)}
    save_file(broken, tmp_path / "b.safetensors")
    with pytest.raises(ArtifactError, match=r"b\.safetensors: 'weight' holds numbers that are not finite"):
        read_network(tmp_path / "b.safetensors", network)


def test_tied_weights_and_odd_layouts_survive(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    network = Tied()
    write_network(tmp_path / "net.safetensors", network)
    other = Tied()
    read_network(tmp_path / "net.safetensors", other)
    assert short_runs.same(network, other) and other.a.weight is other.b.weight


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_sparse_tensors_come_back(tmp_path: Path, sparsity: float) -> None:
    network, other = nn.Linear(7, 5), nn.Linear(7, 5)
    with torch.no_grad():
        network.weight[torch.rand(5, 7) < sparsity] = 0
    write_network(tmp_path / "net.safetensors", network, ("weight",))
    read_network(tmp_path / "net.safetensors", other)
    assert short_runs.same(network, other)


@pytest.mark.parametrize("index", [torch.tensor([-1, 0]), torch.tensor([0, 99]), torch.tensor([0]), torch.zeros(2)])
def test_positions_that_do_not_fit(tmp_path: Path, index: Tensor) -> None:
    path = tmp_path / "net.safetensors"
    index = index.to(torch.int32) if not index.is_floating_point() else index
    save_file({"weight#index": index, "weight#value": torch.ones(2), "bias": torch.zeros(2)}, path)
    with pytest.raises(ArtifactError, match=r"net\.safetensors: the positions of 'weight' do not fit"):
        read_network(path, nn.Linear(3, 2))
