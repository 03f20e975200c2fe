"""2,000 damaged files in every test run (`make fuzz`: 100,000), and what hypothesis thinks of besides."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from readers import Reader, readers
from run import campaign, merge

from dllp import files
from dllp.errors import DllpError
from dllp.runs.settings import read
from dllp.runs.tensors import read_tensors

IN_PROCESS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TREES = st.recursive(LEAVES, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=6), s, max_size=3))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Reader]:
    return readers(tmp_path_factory.mktemp("fuzz"))


def test_two_thousand_damaged_files(every: list[Reader]) -> None:
    figures = campaign(2000, every)
    failures = [text for own in figures["readers"].values() for text in own.get("failures", ())]
    assert figures["uncaught"] == 0, "\n\n".join(failures)
    assert figures["inputs"] >= 2000 and figures["refused"] > 1000
    assert all(own["refused"] for own in figures["readers"].values()), "a reader that takes everything reads nothing"


def test_whole_files_are_taken_and_damage_repeats(every: list[Reader]) -> None:
    for reader in every:
        assert reader.damaged(7) == reader.damaged(7) != reader.damaged(8)
        if reader.name not in ("config.yaml by prune", "train_x.npy", "train_y.npy"):  # seeds of other kinds of data
            own = reader.seeds[-1 if "weight" in reader.name else 0]
            assert reader.check(own), reader.name


@IN_PROCESS
@given(draw=st.data())
def test_hypothesis_damages_every_kind_of_file(every: list[Reader], draw: st.DataObject) -> None:
    reader = draw.draw(st.sampled_from([r for r in every if r.share > 0.2]))
    content = draw.draw(st.sampled_from(reader.seeds))
    for _ in range(draw.draw(st.integers(1, 4))):
        start, length = draw.draw(st.integers(0, len(content))), draw.draw(st.sampled_from((0, 1, 4, 8, 10**9)))
        content = content[:start] + draw.draw(st.binary(max_size=24)) + content[start + length :]
    reader.check(content)


@IN_PROCESS
@given(content=st.binary(max_size=200) | TREES.map(lambda tree: json.dumps(tree).encode()))
def test_json_of_any_kind(content: bytes) -> None:
    try:
        value = files.parse_json(content, "here")
    except DllpError as error:
        assert "here" in str(error)
    else:
        assert json.loads(json.dumps(value, allow_nan=False)) == value


@IN_PROCESS
@given(header=TREES, body=st.binary(max_size=32))
def test_headers_of_any_kind(tmp_path: Path, header: object, body: bytes) -> None:
    text = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "b": header}).encode()
    path = tmp_path / "any.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    with pytest.raises(DllpError, match=r"any\.safetensors"):
        read_tensors(path)


@IN_PROCESS
@given(name=st.sampled_from(["lr", "epochs", "slab_bounds", "model", "task", "dense", "x"]), value=TREES)
def test_settings_of_any_kind(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(f"{name}: {json.dumps(value)}\n")
    try:
        assert set(read(path)) <= {name}
    except DllpError as error:
        assert "any.yaml" in str(error) and str(error).isprintable()


def test_parts_of_the_summary_stay(tmp_path: Path) -> None:
    path = tmp_path / "trust" / "summary.json"
    merge(path, "fuzz", {"inputs": 1})
    merge(path, "crash", {"kills": 300})
    merge(path, "fuzz", {"inputs": 2})
    assert json.loads(path.read_text()) == {"crash": {"kills": 300}, "fuzz": {"inputs": 2}}
