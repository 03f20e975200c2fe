"""The folder of results: lines and probabilities, whole whatever happens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dllp.errors import ArtifactError
from dllp.evaluation import metrics
from paper.store import LABELS, Store, shortened
from paper.summaries.prediction_metrics import probabilities


def line(digest: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"digest": digest, "seed": seed, **more}


def test_a_torn_last_line_is_ignored_and_repaired(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "table")
    assert store.lines() == [] and store.digests() == set()
    store.add(line("a"))
    store.add(line("b", figures=[1.5, float("nan"), {"x": float("inf")}]))
    whole = store.runs.read_bytes()
    for torn in (b'{"digest": "c", "se', b'{"digest"', b"\x00\x00\x00", b"7"):
        store.runs.write_bytes(whole + torn)
        assert store.digests() == {"a", "b"}
        store.add(line("c"))
        assert store.runs.read_bytes() == whole + b'{"digest":"c","seed":0}\n'
    assert store.lines()[1]["figures"] == [1.5, None, {"x": None}]


def test_a_whole_last_line_without_its_end_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.runs.write_bytes(b'{"digest": "a", "seed": 0}\n\n{"digest": "b", "seed": 1}')
    assert store.digests() == {"a", "b"}
    store.add(line("b", seed=7))
    store.add(line("c"))
    assert [(found["digest"], found["seed"]) for found in store.lines()] == [("a", 0), ("b", 1), ("c", 0)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.runs.write_bytes(b'{"digest": "a", "seed": 0}\n{"dig\n{"digest": "b", "seed": 1}\n')
    with pytest.raises(ArtifactError, match="line 2 is damaged"):
        store.lines()
    store.runs.write_bytes(b'{"digest": "a", "seed": 0, "hardware": ["\\u001b[2J"]}\n')
    with pytest.raises(ArtifactError, match="line 1 is damaged"):  # a terminal would obey it
        store.lines()


def test_the_latest_line_that_is_not_superseded_counts(tmp_path: Path) -> None:
    store = Store(tmp_path, note={"command": "by hand", "commit": None})
    for name in "ab":
        store.add(line(name, value=1))
    first = store.runs.read_bytes()
    assert store.add(line("a", value=2)) is False, "finished jobs have one line"
    store.supersede("a", "a mistake")
    assert store.digests() == {"b"}, "unfinished again"
    assert store.add(line("a", value=3)) is True and store.add(line("a", value=4)) is False
    assert [(found["digest"], found["value"]) for found in store.lines()] == [("b", 1), ("a", 3)]
    assert store.runs.read_bytes().startswith(first), "nothing is edited"
    *_, mark, _ = map(json.loads, store.runs.read_text().splitlines())
    assert (mark["superseded"], mark["why"], mark["command"]) == ("a", "a mistake", "by hand") and mark["date"]
    with store.runs.open("a") as file:  # as two folders' lines put together
        file.write(json.dumps(line("b", value=5)) + "\n")
    assert [(found["digest"], found["value"]) for found in store.lines()] == [("a", 3), ("b", 5)]


@pytest.mark.parametrize(
    "mark", [{"superseded": "a"}, {"superseded": "a/b", "why": "x"}, {"superseded": 1, "why": "x"}]
)
def test_a_mark_names_a_digest_and_a_reason(mark: dict[str, Any], tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.runs.write_text(json.dumps(mark) + "\n")
    with pytest.raises(ArtifactError, match="line 1 is damaged"):
        store.lines()


def test_what_is_superseded_here_is_not_taken_over_again(tmp_path: Path) -> None:
    source = Store(tmp_path / "table1")
    store = Store(tmp_path / "reliability", [source])
    for name in "ab":
        source.add(line(name))
    store.adopt({"a": False})
    assert store.lines() == [line("a") | {"commit": None, "dirty": None, "deterministic": None, "from": "table1"}]
    store.supersede("a", "run it here")
    assert store.adoptable() == {"b"}
    store.adopt({"a": False, "b": False})
    assert store.digests() == {"b"}


def test_the_latest_metrics_of_a_run_count_and_carry_the_note(tmp_path: Path) -> None:
    store = Store(tmp_path, note={"commit": "44b9c42"})
    for value in (1.0, 2.0):
        store.add_figures(line("a", date="today", alone=value))
    found = store.figures("a", "today")
    assert found is not None and (found["alone"], found["commit"]) == (2.0, "44b9c42")
    assert store.figures("a", "yesterday") is None


def test_many_writers(tmp_path: Path) -> None:
    def write(number: int) -> None:
        Store(tmp_path).add(line(f"{number % 40}", text="x" * 5000))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(80)))
    found = Store(tmp_path).lines()
    assert len(found) == 40 == Store(tmp_path).runs.read_bytes().count(b"\n")


def predictions(strength: float) -> tuple[np.ndarray, np.ndarray]:
    """(2, B, C) probabilities of two networks that agree about as much as such pairs do, and labels."""
    labels = torch.arange(4000) % 10
    logits = 2.5 * torch.randn(4000, 10)
    logits[torch.arange(4000), labels] += strength + 5 * torch.randn(4000)
    return torch.stack([logits, logits + torch.randn(4000, 10)]).softmax(-1).numpy(), labels.numpy()


def test_stored_probabilities_give_the_same_metrics_at_half_the_size(tmp_path: Path) -> None:
    store, (clean, labels) = Store(tmp_path), predictions(12)
    blurred, _ = predictions(6)
    store.add(line("a"), {"clean": clean, "gaussian-blur:1": blurred, LABELS: labels})
    stored, found = store.probabilities("a")
    assert set(stored) == {"clean", "gaussian-blur:1"} and (found == labels).all()
    for name, exact in (("clean", clean), ("gaussian-blur:1", blurred)):
        assert np.allclose(stored[name].sum(-1), 1)
        for p, q in zip((*exact, exact.mean(0)), (*stored[name], stored[name].mean(0)), strict=True):
            a, b = (metrics.summary(torch.from_numpy(v), torch.from_numpy(labels)) for v in (p, q))
            assert abs(a["accuracy"] - b["accuracy"]) < 3 / len(labels), "but for ties"
            assert all(abs(a[key] - b[key]) < 2e-3 for key in ("nll", "ece", "aurc", "brier", "entropy")), (a, b)
    path = tmp_path / "probabilities" / "a.npz"
    with np.load(path) as arrays:
        assert arrays["clean"].dtype == np.float16
    assert path.stat().st_size < 0.5 * 2 * (clean.size + blurred.size)


def test_shortening_keeps_order_and_never_gives_zero() -> None:
    values = np.sort(np.concatenate([np.logspace(-40, 0, 3000), [0.0, 1.0]])).astype(np.float32)
    short = shortened(values).astype(np.float64)
    assert (np.diff(short) >= 0).all() and short[-1] == 1 and short[0] == 2.0**-22
    large = values >= 1 / 16
    assert np.abs(short[large] / values[large] - 1).max() <= 2**-11
    for low, high, error in ((1 / 256, 1 / 16, 1 / 8), (2.0**-21, 1 / 256, 1 / 4)):
        part = (values >= low) & (values < high)
        assert np.abs(short[part] / values[part] - 1).max() <= error


@pytest.mark.parametrize(("last", "width"), [(9, 1), (255, 1), (256, 2), (999, 2), (70_000, 4)])
def test_labels_of_many_classes_come_back(tmp_path: Path, last: int, width: int) -> None:
    labels = np.array([0, 1, last])
    Store(tmp_path).add(line("a"), {"clean": np.full((1, 3, 2), 0.5), LABELS: labels})
    found = Store(tmp_path).probabilities("a")[1]
    np.testing.assert_array_equal(found, labels)
    assert found.itemsize == width
    torch.testing.assert_close(probabilities(Store(tmp_path), "a")[1], torch.from_numpy(labels))


def test_probabilities_that_are_missing_or_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ArtifactError, match="is missing"):
        store.probabilities("a")
    store.add(line("a"), {"clean": np.full((1, 4, 2), 0.5), LABELS: np.zeros(4)})
    path = tmp_path / "probabilities" / "a.npz"
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content[:60] + b"xxxx" + content[64:]):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match="is damaged"):
            store.probabilities("a")
