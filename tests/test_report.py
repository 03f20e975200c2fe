"""The report without a browser: what it reads, what it computes, what it writes, and what it refuses."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dllp
from dllp import artifacts, examples, metrics, options, report
from dllp.cli import main
from dllp.errors import ArtifactError, ConfigError, DllpError
from dllp.report import compare, contents, figures, gallery, names, page, records, trust, weights
from dllp.reporting import command
from dllp.task import Task
from dllp.train import EpochRecord
from dllp.zoo import build
from tests.commands import npy, one_line, settle

pytest.importorskip("plotly", reason="needs plotly: pip install -e '.[report]'")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture(scope="module")
def text(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "a.html"
    assert main(["report", str(run), "--out", str(path), "--quiet"]) == 0
    return path.read_text(encoding="utf-8")


def plots(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


# ---- the page


def test_the_page_holds_everything(text: str) -> None:
    assert len(text.encode()) < 4e6
    outside = re.sub(r'<script type="text/plain" id="library">.*?</script>', "", text, flags=re.DOTALL)
    assert "http:" not in outside and "https:" not in outside and 'src="//' not in outside
    sections = re.findall(r'<section id="([\w-]+)"', text)
    assert sections == ["verdict", "training", "channels-kept", "weights", "trust", "speed", "configuration"]
    assert re.findall(r'<a href="#([\w-]+)">', text) == sections
    shown = plots(text)
    assert set(shown) == set(re.findall(r'data-plot="([\w-]+)"', text))
    assert {"loss", "cost", "gates", "channels", "histograms", "reliability", "risk", "aleatoric", "latency"} <= set(
        shown
    )
    assert text.count('<img src="data:image/png;base64,') == 2 * gallery.SHOWN
    for word in ("Budget: keep 30.0% of the FLOPs", "dllp prune", "particle 2"):
        assert word in text


def test_the_policy_allows_two_scripts_only(text: str) -> None:
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="(.*?)">', text)[0])
    assert policy.startswith("default-src 'none'") and "connect-src" not in policy and "unsafe-eval" not in policy
    allowed = set(re.findall(r"sha256-([^']+)", policy))
    own = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    packed = re.findall(r'id="library">(.*?)</script>', text, re.DOTALL)[0]
    library = gzip.decompress(base64.b64decode(packed))
    hashes = {base64.b64encode(hashlib.sha256(s).digest()).decode() for s in (own[0].encode(), library)}
    assert len(own) == 1 and hashes == allowed and library == page.require_plotly().read_bytes()
    assert re.search(r"script-src ([^;]*);", policy)[1].count("'") == 4  # type: ignore[index]


def test_the_same_run_gives_the_same_page(run: Path) -> None:
    found = contents.read(run)
    assert report.build([found]) == report.build([found])


def test_a_comparison(run: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = copy / "config.yaml"
    settings.write_text(settings.read_text().replace("seed: 0", "seed: 7"))
    assert main(["report", str(run), str(copy), "--quiet"]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = plots(text)
    assert set(shown) >= {"pareto"} and [t["name"] for t in shown["pareto"]["data"]] == [
        "Pareto front",
        "first",
        "copy",
    ]
    settings_table = text[text.index('<section id="settings"') :]
    assert "seed" in settings_table and "<bdi>7</bdi>" in settings_table and "epochs" not in settings_table


# ---- what is computed


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_front_is_what_nobody_beats(pairs: list[tuple[int, int]]) -> None:
    points = [compare.Point(str(i), "", macs, quality) for i, (macs, quality) in enumerate(pairs)]
    best = {(p.macs, p.quality) for p in compare.front(points)}

    def beaten(p: compare.Point) -> bool:
        return any(q.macs <= p.macs and q.quality >= p.quality and q != p and
                   (q.macs, q.quality) != (p.macs, p.quality) for q in points)  # fmt: skip

    assert best == {(p.macs, p.quality) for p in points if not beaten(p)}


def answers(seed: int, size: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = (3 * torch.randn(size, 5, generator=generator)).softmax(1)
    return p, torch.randint(5, (size,), generator=generator)


def test_diagrams_agree_with_the_metrics() -> None:
    p, y = answers(0)
    confidence, predicted = p.max(1)
    correct = predicted == y
    mean, accuracy, count = trust.reliability(confidence, correct)
    assert float((count * (mean - accuracy).abs()).sum() / len(y)) == pytest.approx(metrics.ece(p, y), abs=1e-6)
    coverage, risk = trust.risk_coverage(confidence, correct)
    assert float(risk.mean()) == pytest.approx(metrics.aurc(p, y), abs=1e-9)
    assert coverage[-1] == 1 and float(risk[-1]) == pytest.approx(1 - metrics.accuracy(p, y))


def test_histograms_are_densities(run: Path) -> None:
    found = contents.read(run)
    layers = weights.split(run, found.recipes[0], found.gated)
    assert [layer.name for layer in layers] == ["conv1", "conv2", "conv3", "classifier"]
    network = build("small_cnn", num_classes=10, in_channels=1, image_size=8)
    pruned = dllp.load(run, network).model
    for layer in layers:
        kept = pruned.get_submodule(layer.name).weight
        np.testing.assert_allclose(np.sort(layer.slab), np.sort(kept.detach().flatten().numpy()), atol=1e-6)
        assert len(layer.slab) + len(layer.spike) == network.get_submodule(layer.name).weight.numel()  # type: ignore
    slab = next(trace for trace in weights.histogram(layers[1]) if trace["name"].startswith("slab"))
    assert sum(slab["y"]) * slab["width"] == pytest.approx(1, abs=0.01)


def test_gates_over_time_are_shares(text: str, run: Path) -> None:
    gates = plots(text)["gates"]
    assert [choice["name"] for choice in gates["choices"]] == ["all layers", *contents.read(run).widths]
    for choice in gates["choices"]:
        columns = np.asarray(choice["data"][0]["z"]).sum(0)
        np.testing.assert_allclose(columns, 100, atol=0.1)
    last = np.asarray(gates["choices"][0]["data"][0]["z"])[:, -1]
    assert last[1:-1].sum() == 0 and last[0] > 0 and last[-1] > 0  # discrete: open or closed


def test_the_command_makes_the_same_run_again(run: Path) -> None:
    settings = options.read(run / "config.yaml")
    verb, words = options.parse(shlex.split(command(run, settings))[1:])
    assert verb == "prune" and words.pop("out") == str(run)
    task = Task(**{name: words.pop(name) for name in options.TASK if name in words})
    assert task == Task(**{name: settings[name] for name in options.TASK})
    again = task.config(words).resolved().as_dict()
    assert again == {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items() if name in again}


@given(st.text())
def test_names_are_text(name: str) -> None:
    for shown in (names.html_text(name), names.plot_text(name)):
        assert "<" not in shown and ">" not in shown and names.plain(name, 10**6).isprintable()
    assert '"' not in names.html_text(name)
    found = json.loads(page._embedded({"a": name}))
    assert found == {"a": name} and "<" not in page._embedded({"a": name})


def test_long_names_stay_apart() -> None:
    same = "layer" * 20
    assert len(set(figures.distinct([same + "a", same + "b", "x"]))) == 3


# ---- what is read


def test_examples_come_back(tmp_path: Path) -> None:
    _, y = answers(1, 20)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 5))
    posterior = dllp.Posterior([network, network], torch.ones(2))
    data = dllp.data.from_pair(torch.randn(20, 4), y)
    found = examples.collect(posterior, data)
    found.write(tmp_path)
    again = examples.read(tmp_path)
    assert again is not None and set(again.predicted) == {"particle 1", "particle 2", "all particles"}
    assert again.together == "all particles" and torch.equal(
        again.confidence["particle 1"], found.confidence["particle 1"]
    )
    assert float(again.epistemic.abs().max()) < 1e-6  # the same network twice disagrees with itself nowhere
    assert examples.read(tmp_path / "nothing") is None


@pytest.mark.parametrize("change", [
    {"labels": torch.zeros(3, dtype=torch.int32)}, {"aleatoric": torch.full((4,), torch.nan)},
    {"confidence/particle 1": torch.full((4,), 2.0)}, {"predicted/other": torch.zeros(4, dtype=torch.int32)},
    {"epistemic": torch.zeros(4, 1)}, {"labels": torch.zeros(4)},
])  # fmt: skip
def test_damaged_examples_are_refused(tmp_path: Path, change: dict[str, torch.Tensor]) -> None:
    whole = torch.zeros(4, dtype=torch.int32)
    tensors = {"labels": whole, "predicted/particle 1": whole, "confidence/particle 1": torch.ones(4)}
    tensors |= {"aleatoric": torch.zeros(4), "epistemic": torch.zeros(4)}
    artifacts.write_tensors(tmp_path / artifacts.EXAMPLES, tensors)
    assert examples.read(tmp_path) is not None
    artifacts.write_tensors(tmp_path / artifacts.EXAMPLES, tensors | change)
    with pytest.raises(ArtifactError, match="same examples"):
        examples.read(tmp_path)


@pytest.mark.parametrize(("file", "old", "new"), [
    ("run.json", '"phase": "', '"phase": "<b>'), ("run.json", '"multiplier": [', '"multiplier": ["x", '),
    ("evaluation.json", '"rows": [', '"rows": [3, '), ("evaluation.json", '"rows"', '"columns"'),
    ("evaluation.json", '"name": "dense"', '"name": 5'), ("log.jsonl", '"loss": [', '"loss": ["a", '),
    ("run.json", '"conv1": [\n', '"conv1": [\n 4,\n'),
])  # fmt: skip
def test_damaged_files_are_one_line(
    copy: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str
) -> None:
    content = (copy / file).read_text()
    assert old in content
    (copy / file).write_text(content.replace(old, new))
    assert main(["report", str(copy), "--quiet"]) == 2
    one_line(capsys, file)
    assert not (copy / "report.html").exists()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x), max_leaves=5
    )
)
def test_whatever_fits_is_of_its_kind(value: Any) -> None:
    if records.fits(value, list[float]):
        assert isinstance(value, list) and all(type(v) in (int, float) and math.isfinite(v) for v in value)
    if records.fits(value, float | None):
        assert value is None or math.isfinite(value)
    assert records.fits(value, bool) == isinstance(value, bool)


def test_records_know_their_fields(run: Path) -> None:
    found = contents.read(run)
    assert all(isinstance(record, EpochRecord) for record in found.history) and len(found.dense_history) == 2
    assert list(found.clean) == ["dense", "particle 1", "particle 2", "all particles"]


def test_stored_speed_is_shown(copy: Path) -> None:
    row = {"network": "dense", "runtime": "PyTorch", "device": "cpu", "threads": 1, "batch": 64, "median": 4e-3,
           "low": 3e-3, "high": 5e-3, "samples": 9, "cpu": 4e-3, "macs": 1e6, "bytes": 10, "memory": None,
           "speedup": None, "share": None, "throughput": 1.0}  # fmt: skip
    pruned = row | {"network": "pruned", "median": 2e-3, "macs": 2.5e5, "speedup": 2.0, "share": 2 / 3}
    slow = {"layer": "conv9", "dense_ms": 3.0, "pruned_ms": 1.5, "dense_width": 64, "pruned_width": 17,
            "kept_macs": 0.25, "lost_ms": 0.75}  # fmt: skip
    (copy / "speed.json").write_text(json.dumps({"rows": [row, pruned], "layers": [slow]}))
    assert main(["report", str(copy), "--quiet"]) == 0
    text = (copy / "report.html").read_text()
    assert "2.00×" in text and "67% of the saved FLOPs became saved time" in text and "conv9 (0.75 ms)" in text
    assert plots(text)["layers"]["data"][2]["x"] == [0.75]
    (copy / "speed.json").write_text(json.dumps({"rows": [row | {"median": 0.0}], "layers": []}))
    assert main(["report", str(copy), "--quiet"]) == 2


def test_corruptions_are_kept_and_shown(copy: Path) -> None:
    assert main(["evaluate", str(copy), "--corrupt", "gaussian-blur:1,2"]) == 0
    assert main(["evaluate", str(copy), "--corrupt", "sharpen", "gaussian-blur:2"]) == 0
    assert main(["report", str(copy), "--quiet"]) == 0
    shown = plots((copy / "report.html").read_text())["corrupted-accuracy"]["data"]
    assert [trace["name"] for trace in shown if trace["showlegend"]] == ["dense", "particle 1", "all particles"]
    curves = [["clean"], ["gaussian-blur:1", "gaussian-blur:2"], ["sharpen"]]
    assert [trace["x"] for trace in shown if trace["name"] == "dense"] == curves


# ---- runs of other kinds


def test_single_weights_made_from_python(tmp_path: Path) -> None:
    x, y = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    config = dllp.Config(keep_flops=0.5, epochs=2, batch_size=32, particles=1, granularity="weight", init="fresh")
    dllp.prune(build("small_cnn", num_classes=10, in_channels=1), (x, y), config).save(tmp_path / "a")
    assert main(["report", str(tmp_path / "a"), "--quiet"]) == 0
    text = (tmp_path / "a" / "report.html").read_text()
    assert "histograms" in plots(text) and "dllp evaluate measures its networks" in text
    assert "Latency was not measured" in text and "--data" in text


def test_a_regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = settle(tmp_path, monkeypatch)
    x = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    data = npy(tmp_path / "data", x, np.stack([x.sum(1)] * 7, 1))
    words = ["--data", str(data), "--model", f"{name}:wide", "--epochs", "2", "--keep-flops", "0.5", "--init", "fresh"]
    assert main(["prune", *words, "--out", "run", "--quiet"]) == 0
    assert main(["report", "run", "--model", f"{name}:wide", "--quiet"]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert "Error (RMSE)" in text and "accuracy" not in plots(text) and "reliability" not in plots(text)


def test_data_that_is_gone_is_said(copy: Path) -> None:
    settings = copy / "config.yaml"
    settings.write_text(settings.read_text().replace("data: digits", "data: /nowhere/at/all"))
    assert main(["report", str(copy), "--quiet"]) == 0
    text = (copy / "report.html").read_text()
    assert "Test images are not shown: no data set" in text and "reliability" in plots(text)


def test_answers_are_asked_for_where_the_folder_lacks_them(copy: Path, text: str) -> None:
    (copy / artifacts.EXAMPLES).unlink()
    assert main(["report", str(copy), "--quiet"]) == 0
    again = (copy / "report.html").read_text()
    assert plots(again)["reliability"] == plots(text)["reliability"] and again.count("<img") == text.count("<img")


# ---- mistakes


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    unfinished = tmp_path / "unfinished"
    (unfinished / "checkpoints").mkdir(parents=True)
    for folder, words in (("nothing", "not a folder"), ("empty", "no run.json"), ("unfinished", "--resume --out")):
        assert main(["report", str(tmp_path / folder)]) == 2
        one_line(capsys, words)
        assert main(["report", str(run), str(tmp_path / folder), "--out", str(tmp_path / "a.html")]) == 2
        one_line(capsys, words)
    assert main(["report"]) == 2
    one_line(capsys, "the run folder")
    assert main(["report", str(run), "--out", str(run / "run.json" / "a.html"), "--quiet"]) == 2
    one_line(capsys, "cannot write")
    assert not list(tmp_path.rglob("*.html"))


def test_without_plotly_one_line_says_how_to_get_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["report", str(run), "--out", str(tmp_path / "a.html")]) == 2
    one_line(capsys, "pip install 'dllp[report]'")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError):
        report.require_plotly()


def test_kinds_do_not_mix(run: Path) -> None:
    found = contents.read(run)
    other = contents.Run(**{**vars(found), "config": found.config | {"task": "regression"}})
    with pytest.raises(DllpError, match="compare runs of one kind"):
        report.build([found, other])
