"""Coloured digits: how they are painted, what is computed from predictions, and the bench end to end."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dllp.data import ArrayData, load
from paper import tables
from paper.__main__ import main
from paper.coloured_digits import CORRELATED, DATA, HUES, RANDOM, REVERSED, load_data, mirrored, painted
from paper.jobs import Runner
from paper.store import CLEAN, Store
from paper.summaries import colour
from paper.tables import Variant
from tests.support.commands import one_line


def colours(data: ArrayData) -> torch.Tensor:
    """(N,) indices of the backgrounds' colours, read from the brightest pixel of each image."""
    pixels = data.x.flatten(2).float() / 255
    brightest = pixels.sum(1).argmax(1)
    seen = pixels[torch.arange(len(pixels)), :, brightest]
    return (seen / seen.amax(1, keepdim=True))[:, None].sub(HUES).abs().sum(2).argmin(1)


@pytest.mark.parametrize("seed", [0, 3])
def test_colours_go_with_classes_in_training_and_against_them_in_the_test(seed: int) -> None:
    grey = load("digits")
    train, tests = painted(grey, seed)
    assert train.shape == (3, 8, 8) and (train.y == grey.train.y).all()
    own = torch.stack([torch.bincount(colours(train)[train.y == k], minlength=10).argmax() for k in range(10)])
    assert sorted(own.tolist()) == list(range(10)), "a colour for each class"
    expected = CORRELATED + (1 - CORRELATED) / 10
    assert (colours(train) == own[train.y]).double().mean() == pytest.approx(expected, abs=0.02)
    for name, rule in ((CLEAN, lambda y: y), (REVERSED, mirrored)):
        test = tests[name]
        assert (colours(test) == own[rule(test.y)]).double().mean() == pytest.approx(expected, abs=0.04)
    random = tests[RANDOM]
    assert torch.bincount(colours(random), minlength=10).min() > 15
    assert (colours(random) == own[random.y]).double().mean() < 0.2
    for test in tests.values():  # the same shapes: what is inked is dark, whatever the background
        assert torch.equal(test.x.amax(1, keepdim=True), 255 - grey.test.x) and (test.y == grey.test.y).all()
        assert (test.mean, test.std) == (train.mean, train.std)


def test_two_seeds_share_a_painting() -> None:
    digits = load("digits")
    one, again, other = (painted(digits, seed)[0].x for seed in (0, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    data = load_data(DATA)
    assert isinstance(data.train, ArrayData) and torch.equal(data.train.x, one) and len(data.classes) == 10


def test_pixels_are_normalised_by_channel() -> None:
    inputs = painted(load("digits"), 3)[0].inputs(slice(None)).double()
    assert inputs.mean((0, 2, 3)) == pytest.approx([0, 0, 0], abs=1e-5)
    assert inputs.std((0, 2, 3)) == pytest.approx([1, 1, 1], abs=1e-5)


def test_only_colour_and_nothing_but_shape() -> None:
    labels = torch.arange(200) % 10
    by_shape = torch.nn.functional.one_hot(labels, 10).double()
    by_colour = torch.nn.functional.one_hot(mirrored(labels), 10).double()
    unsure = torch.full((200, 10), 0.1).double()
    seen = {CLEAN: by_shape[None], REVERSED: by_colour[None], RANDOM: unsure[None]}
    found = colour.metrics(seen, labels)
    assert (found[CLEAN]["accuracy"], found[REVERSED]["accuracy"]) == (1, 0)
    assert (found[REVERSED]["reliance"], found[REVERSED]["by_colour"]) == (1, 1)
    assert found[RANDOM]["entropy"] == pytest.approx(math.log(10)) and found[RANDOM]["auroc"] == 1
    assert found[REVERSED]["auroc"] == 0.5, "as certain as before"
    both = {name: torch.cat([by_shape[None], p]) for name, p in seen.items()}
    found = colour.metrics(both, labels)
    assert found[REVERSED]["epistemic"] == pytest.approx(0.5) and found[CLEAN]["epistemic"] == 0
    assert found[REVERSED]["auroc_mutual_information"] == 1, "two that disagree notice it"


def contender(name: str, *lost: float) -> dict[str, Any]:
    return {"name": name, "row": name, "lost_by_painting": {str(number): value for number, value in enumerate(lost)}}


def test_a_difference_counts_beyond_two_standard_errors_over_paintings() -> None:
    rows = [contender("dense", 0.20, 0.30, 0.40), contender("more", 0.24, 0.35, 0.46), contender("all", 0.1, 0.3, 0.5)]
    found = colour._verdicts([*rows, contender("less", 0.1, 0.2), contender("one painting", 0.9)])
    verdicts = {verdict["name"]: verdict["verdict"] for verdict in found}
    assert verdicts == {"more": "more", "all": "not clearly other", "less": "less"}, "what one painting shows is none"
    assert found[0]["difference"] == pytest.approx(0.05)
    assert found[0]["standard_error"] == pytest.approx(0.01 / math.sqrt(3)), "of differences, not of both"
    assert colour._told(found[0]) == "- more: more (+5.00 ± 0.58 points)"
    assert colour._verdicts(rows[1:]) == []


def test_the_bench_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tables.TABLES["colour"]
    rows = [
        replace(row, job=replace(row.job, epochs=1), seeds=(0, 1, 2) if row.name == "dense" else (0, 2))
        for row in whole.rows
        if "80" not in row.name
    ]
    monkeypatch.setitem(tables.TABLES, "colour", replace(whole, rows=tuple(rows)))
    options = ["colour", "--out", str(tmp_path), "--device", "cpu"]
    assert main([*options, "--rows", "dense", "--launcher", "local", "--jobs", "1", "--quiet"]) == 0
    assert main(options) == 0
    store = Store(tmp_path / "colour")
    lines = store.lines()
    assert len(lines) == 7 and {line["data"]["name"] for line in lines} == {DATA}
    assert all(line["commit"] is None or len(line["commit"]) == 40 for line in lines)
    seen, _ = store.probabilities(lines[0]["digest"])
    assert set(seen) == {CLEAN, REVERSED, RANDOM}
    summary = json.loads((tmp_path / "colour" / "summary.json").read_text())
    assert [row["name"] for row in summary["rows"]] == [
        "dense", "two dense networks", "thin from scratch, 50% fewer FLOPs", "one particle, 50%", "two particles, 50%",
    ]  # fmt: skip
    dense = next(row for row in summary["rows"] if row["name"] == "dense")
    own = {line["seed"]: line["particles"][0]["accuracy"] for line in lines if line["row"] == "dense"}
    expected = ((own[0] + own[1]) / 2 + own[2]) / 2
    assert dense["data"][CLEAN]["accuracy"]["mean"] == pytest.approx(expected, abs=1 / 360), "by painting"
    assert [len(row["lost_by_painting"]) for row in summary["rows"]] == [2, 1, 2, 2, 2]
    assert [row["networks"] for row in summary["rows"]] == [1, 2, 1, 1, 2]
    assert dense["command"] == "dllp bench colour --rows dense" and "epistemic" not in dense["data"][CLEAN]
    text = (tmp_path / "colour" / "table.md").read_text()
    assert text in capsys.readouterr().out and text.count("\n| ") == 3 * 7 and "by information" in text
    assert (tmp_path / "colour" / "picture.svg").exists()


def test_it_is_about_the_test_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["colour", "--validation", "100", "--out", str(tmp_path)]) == 2
    one_line(capsys, "colour is about predictions on the test set")
    assert main(["colour", "--data", "cifar", "--out", str(tmp_path)]) == 2
    one_line(capsys, f"colour is measured on {DATA}: leave out --data")


def test_jobs_see_the_painting_of_their_seed() -> None:
    runner = Runner(load_data(DATA), device="cpu")
    for row in tables.TABLES["colour"].rows:
        train, seen = runner.splits.of(Variant().of(row.job, 2))
        expected, tests = painted(load("digits"), 2)
        assert isinstance(train, ArrayData) and torch.equal(train.x, expected.x)
        assert list(seen) == [CLEAN, REVERSED, RANDOM] and torch.equal(seen[REVERSED].x, tests[REVERSED].x)
