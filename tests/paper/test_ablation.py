"""What a departure from a recipe is worth: differences seed by seed, worked by hand."""

import math
from typing import Any

import pytest
from scipy.stats import ttest_1samp

from paper.summaries.ablation import differences, worth


def line(seed: int, *accuracies: float, nll: float = 0.5) -> dict[str, Any]:
    particles = [{"accuracy": accuracy, "nll": nll} for accuracy in accuracies]
    return {"seed": seed, "particles": particles, "ensemble": {"accuracy": max(accuracies), "nll": nll / 2}}


RECIPE = [line(0, 0.9, 0.8), line(1, 0.7, 0.9), line(2, 0.6, 0.6)]
DEPARTURE = [line(1, 0.9, 0.9, nll=0.7), line(2, 0.7, 0.6, nll=0.7), line(3, 0.1, 0.1)]


def test_seeds_are_paired_and_others_are_left_out() -> None:
    (found,) = worth({"channel-recipe": RECIPE, "channel-beta-0": DEPARTURE, "weight-beta-0": DEPARTURE})
    assert (found["name"], found["seeds"]) == ("channel-beta-0", [1, 2])
    # one: 0.9 - 0.8 and 0.65 - 0.6; all: 0.9 - 0.9 and 0.7 - 0.6
    assert found["one_accuracy"]["mean"] == pytest.approx(0.075)
    assert found["one_accuracy"]["standard_error"] == pytest.approx(0.025)
    assert found["all_accuracy"]["mean"] == pytest.approx(0.05)
    assert found["one_nll"]["mean"] == pytest.approx(0.2)
    assert found["all_nll"]["mean"] == pytest.approx(0.1)
    assert found["one_accuracy"]["p"] == pytest.approx(ttest_1samp([0.1, 0.05], 0)[1])


def test_one_seed_and_equal_runs_have_no_probability() -> None:
    (single,) = worth({"channel-recipe": RECIPE, "channel-beta-0": DEPARTURE[:1]})
    assert single["one_accuracy"]["standard_error"] is None and single["one_accuracy"]["p"] is None
    (equal,) = worth({"channel-recipe": RECIPE, "channel-same": [dict(each) for each in RECIPE]})
    assert equal["one_accuracy"] == {"mean": 0.0, "standard_error": 0.0, "p": None}


def test_only_clear_differences_are_bold() -> None:
    many = [line(seed, 0.9 + 0.001 * seed, nll=0.5 + 0.1 * (-1) ** seed) for seed in range(10)]
    base = [line(seed, 0.8, nll=0.5) for seed in range(10)]
    table, note = differences(worth({"channel-recipe": base, "channel-beta-0": many}), {"channel-beta-0": "beta = 0"})
    (row,) = [text for text in table.splitlines() if "beta = 0" in text]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    error = 100 * 0.001 * math.sqrt(sum((k - 4.5) ** 2 for k in range(10)) / 90)
    assert cells == ["beta = 0", f"**+10.45 ± {error:.2f}**", "+0.0000 ± 0.0333", f"**+10.45 ± {error:.2f}**",
                     "+0.0000 ± 0.0167", "10"]  # fmt: skip
    assert "0.05" in note
    assert differences([], {}) == []
