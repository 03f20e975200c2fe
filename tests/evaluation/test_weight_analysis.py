"""What a run did to its weights: the parts partition them, the report says it, and `dllp analyze` prints it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dllp
from dllp.cli import progress
from dllp.cli.main import main
from dllp.errors import ConfigError
from dllp.evaluation import weight_analysis
from dllp.zoo import small_cnn
from tests.support.commands import one_line


def result(granularity: str, **changes: object) -> dllp.Result:
    data = (torch.randn(64, 1, 8, 8), torch.arange(64) % 10)
    values = {"keep_params": 0.4, "granularity": granularity, "particles": 1, "epochs": 1, "batch_size": 32}
    return dllp.prune(small_cnn(), data, dllp.Config(**{**values, **changes}))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("granularity", ["weight", "channel"])
def test_kept_and_removed_are_what_was_before(granularity: str) -> None:
    run = result(granularity)
    parts = weight_analysis.split(run.particles[0])
    assert list(parts) == ["conv1", "conv2", "conv3"] + ["classifier"] * (granularity == "channel")
    reference = dict(run.reference.named_parameters())
    total = 0
    for name, layer in parts.items():
        assert np.array_equal(layer["before"], reference[f"{name}.weight"].detach().numpy().ravel().astype(float))
        assert len(layer["kept"]) + len(layer["removed"]) == len(layer["before"])
        # M_0 is the slab as trained to the end, so that the parts are its own weights
        together = np.sort(np.concatenate([layer["kept"], layer["removed"]]))
        assert np.array_equal(together, np.sort(layer["before"]))
        total += len(layer["kept"])
    kept = sum(int((w != 0).sum()) for k, w in run.model.named_parameters() if k.removesuffix(".weight") in parts)
    assert total == kept


class Shared(nn.Module):
    """A convolution that is used twice under two names, and one whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.Conv2d(1, 12, 1), nn.ReLU())
        self.first, self.second, self.third = (nn.Conv2d(i, 8, 3, padding=1) for i in (12, 8, 8))
        self.third.weight = self.second.weight
        self.fourth = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 6, 3))
        self.last = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.start, self.first, self.second, self.third, self.fourth):
            x = layer(x).relu()
        return self.last(x.mean((2, 3)))


@pytest.mark.parametrize("granularity", ["weight", "channel"])
def test_weights_that_are_shared_or_computed(granularity: str) -> None:
    """Shared ones count once; computed ones are cut as what they are computed from."""
    data = (torch.randn(64, 1, 8, 8), torch.arange(64) % 10)
    config = dllp.Config(keep_params=0.7, granularity=granularity, particles=1, epochs=1, batch_size=32)  # type: ignore[arg-type]
    run = dllp.prune(Shared(), data, config)
    layers = weight_analysis.analyze(run)["layers"]
    assert "first" in layers and not {"second", "third"} <= set(layers)
    parts = weight_analysis.split(run.particles[0])
    for name, layer in parts.items():
        assert len(layer["kept"]) + len(layer["removed"]) == len(layer["before"]), name
    if granularity == "channel":
        assert list(parts) == ["start.0", "first", "second", "fourth", "last"]
        cut = run.model.get_submodule("fourth").weight
        assert isinstance(cut, torch.Tensor) and len(parts["fourth"]["kept"]) == cut.numel()


def test_a_hard_cut_is_told_from_a_gaussian(capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    parts, reference = {}, {}
    for name, scale in (("a", 0.01), ("b", 3.0)):
        w = scale * random.normal(size=20_000)
        keep = np.abs(w) > np.quantile(np.abs(w), 0.8)
        parts[name] = {"before": w, "kept": w[keep], "removed": w[~keep]}
        reference[name] = scale * random.normal(size=20_000)
    report = weight_analysis.study(parts, reference)
    whole = report["whole"]
    assert whole["before"]["near_zero"] == pytest.approx(1, abs=0.05) and abs(whole["before"]["kurtosis"]) < 0.1
    assert whole["kept"]["near_zero"] == 0 and whole["kept"]["dip_p"] == 0
    assert whole["kept"]["wasserstein"] > 10 * whole["before"]["wasserstein"]
    assert report["layers"]["a"]["kept"]["count"] == 4000
    tail = report["tail"]
    k = {name: report["layers"][name]["kept"]["fits"]["pareto"]["parameters"]["k"] for name in parts}
    assert {name: row["k"] for name, row in tail["layers"].items()} == k
    for name, row in tail["layers"].items():
        assert row["predicted"] == pytest.approx(tail["h"] / parts[name]["before"].std())
    assert k["a"] == pytest.approx(k["b"], rel=0.05), "cut at the same quantile: the index knows no scale"
    assert tail["layers"]["a"]["predicted"] > 100 * tail["layers"]["b"]["predicted"]
    densities = report["densities"]["b"]
    assert densities["limit"] == pytest.approx(4 * parts["b"]["kept"].std()), "the wider of both parts"
    assert densities["kept"][50] == 0 < densities["removed"][50], "the bin at zero lost everything"
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    progress.show_weights({**report, "reference": "dense"})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["whole"] in lines and lines[-1][-1] == "row."
    assert ["a", f"{k['a']:.3g}", f"{tail['layers']['a']['predicted']:.3g}"] in lines


def test_densities_hold_all_but_the_tails_of_what_a_spike_hides(capsys: pytest.CaptureFixture[str]) -> None:
    """Most weights at zero make the deviation of all of them small; the few kept ones lie beyond it."""
    random = np.random.default_rng(0)
    kept, removed = random.normal(size=500), 1e-6 * random.normal(size=20_000)
    report = weight_analysis.study(
        {"a": {"before": np.concatenate([removed, kept]), "kept": kept, "removed": removed}}, {}
    )
    found = report["densities"]["a"]
    inside = np.sum(found["kept"]) * 2 * found["limit"] / len(found["kept"])
    assert inside > 0.99 and np.argmax(found["before"]) == len(found["before"]) // 2
    progress.show_weights({**report, "reference": "M_0"})
    assert re.search(r"20,000 +[19]\.\d\de-0[67] ", capsys.readouterr().out), "three digits of any size"


def test_the_table_of_a_large_network_fits_80_columns_with_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    fits = {"generalised_pareto": {"ks": 0.123, "log_likelihood": 2.0}, "amoroso_2": {"ks": 0.4, "log_likelihood": 1.0}}
    numbers = {"count": 25_502_912, "std": 1.0001, "near_zero": 1.03, "kurtosis": -123.45, "ks": 0.004}
    shape = {**numbers, "dip_p": None, "wasserstein": 0.011, "fits": fits}
    parts = {"before": shape, "kept": shape, "removed": {**shape, "fits": {}}}
    name = "layer3.22.conv2"
    layers = {name: {**parts, "kept": None}, "fc": dict.fromkeys(parts)}
    progress.show_weights({"reference": "M_0", "whole": parts, "layers": layers})
    shown = capsys.readouterr().out.splitlines()
    lines, numbers = [line.split() for line in shown], ["25,502,912", "1.00", "1.03", "-123.45", "0.004", "–", "0.011"]
    before, kept = ([part, *numbers, "GPD", "0.123"] for part in ("before", "kept"))
    removed = ["removed", *numbers, "–", "–"]
    assert [line for line in lines if "25,502,912" in line] == [before, kept, removed, before, removed]
    assert max(map(len, shown)) <= 80 and ["fc"] not in lines, "what has no row has no name"


def test_a_particle_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no particle 2: choose from 1 to 1"):
        weight_analysis.analyze(result("weight"), 1)


def test_the_command_reads_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, target = tmp_path / "run", tmp_path / "shapes.json"
    short = ["--particles", "1", "--epochs", "1", "--keep-params", "0.5", "--granularity", "weight", "--quiet"]
    assert main(["prune", "--out", str(out), *short]) == 0
    assert main(["analyze", str(out), "--json", str(target)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "near zero" in shown and "kept weights before and after the gates were decided, and at the end" in shown
    report = json.loads(target.read_text())
    assert report["reference"] == "dense" and report["layers"]["conv2"]["kept"]["count"] > 0
    assert main(["analyze", str(out), "--particle", "2"]) == 2
    one_line(capsys, "no particle 2")
    (out / "particle-0.safetensors").unlink()
    assert main(["analyze", str(out)]) == 2
    one_line(capsys, "particle-0.safetensors is missing")
    assert main(["analyze", str(tmp_path / "nothing")]) == 2
    one_line(capsys)
