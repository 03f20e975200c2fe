"""Typed validation: what fits comes back as its type, what does not is named by its place in the file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllp.config import fits
from dllp.errors import ArtifactError, ConfigError
from dllp.records import EpochRecord, Size
from dllp.runs.schema import typed

RECORD = EpochRecord(
    epoch=1, phase="soft", loss=[0.5], accuracy=None, lr=0.1, temperature=1, budget=0.5, cost=[1.0], multiplier=[0.0],
    undecided=[0.0], noise=[1.0], seconds=1.5, engine="eager", gates=[[1, 2]],
)  # fmt: skip


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x), max_leaves=5
    )
)
def test_whatever_fits_is_of_its_kind(value: Any) -> None:
    if fits(value, list[float]):
        assert isinstance(value, list) and all(type(v) in (int, float) for v in value)
    assert fits(value, bool) == isinstance(value, bool)
    assert fits(value, int) == (type(value) is int)
    assert fits(value, Any) and fits([value], list[Any]) and fits({"a": value}, dict[str, Any])


def test_dataclasses_are_made_of_objects() -> None:
    assert typed(EpochRecord, asdict(RECORD), "here") == RECORD
    assert typed(list[EpochRecord], [asdict(RECORD)] * 2, "here") == [RECORD] * 2
    assert typed(dict[str, Size], {"a": {"macs": 3, "params": 4}}, "here") == {"a": Size(3, 4)}


def test_what_a_dataclass_has_by_default_may_be_missing_and_more_may_be_there() -> None:
    values = asdict(RECORD) | {"training": "dense"}
    del values["gates"], values["discrepancy"]
    assert typed(EpochRecord, values, "here").gates == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": [0.5, "x"]}, r"run\.json: \[1\]\.loss\[1\] must be a number$"),
        ({"loss": 3}, r"run\.json: \[1\]\.loss must be a list$"),
        ({"accuracy": True}, r"\[1\]\.accuracy must be a list$"),
        ({"phase": "<b>"}, r"\[1\]\.phase must be open, soft, discrete$"),
        ({"epoch": True}, r"\[1\]\.epoch must be a whole number$"),
        ({"engine": None}, r"\[1\]\.engine must be text$"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        typed(list[EpochRecord], [asdict(RECORD), asdict(RECORD) | change], "run.json")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"^a\.json: params is missing$"):
        typed(Size, {"macs": 1.0}, "a.json")
    with pytest.raises(ArtifactError, match=r"^a\.json: the document must be an object$"):
        typed(Size, [], "a.json")
    with pytest.raises(ConfigError, match=r"^a\.json: conv\.1\[0\] must be a whole number$"):
        typed(dict[str, list[int]], {"conv.1": [0.5]}, "a.json", ConfigError)
