"""The demo's command over three seeds: the pruned networks keep what the dense one knows."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from dllp.cli.main import main

DEMO = "prune --data digits --model small_cnn --keep-flops 0.2 --particles 2 --granularity channel --quiet"


@pytest.mark.slow
def test_a_pruned_particle_stays_within_one_point_of_dense(tmp_path: Path) -> None:
    dense, pruned = [], []
    for seed in range(3):
        out = tmp_path / str(seed)
        assert main([*DEMO.split(), "--seed", str(seed), "--out", str(out)]) == 0
        rows = json.loads((out / "evaluation.json").read_text())["rows"]
        for row in rows:
            assert row["name"] == "dense" or row["macs"] <= 0.4 * rows[0]["macs"]
            if row["name"] == "dense":
                dense.append(row["metrics"]["accuracy"])
            elif row["name"].startswith("particle"):
                assert 0.195 * rows[0]["macs"] <= row["macs"] <= 0.2 * rows[0]["macs"]
                pruned.append(row["metrics"]["accuracy"])
    assert len(dense) == 3 and len(pruned) == 6
    assert mean(pruned) >= mean(dense) - 0.01, (dense, pruned)
