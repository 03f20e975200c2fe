"""The report's page without a browser: what it holds, and what it refuses."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllp import report
from dllp.cli.main import main
from dllp.errors import ConfigError, DllpError
from dllp.evaluation import examples
from dllp.report import contents, figures, page, trust
from dllp.runs.folder import EXAMPLES
from tests.support.commands import one_line, plots

pytest.importorskip("plotly", reason="needs plotly: pip install -e '.[report]'")


# ---- the page


def test_the_page_holds_everything(report_page: str) -> None:
    assert len(report_page.encode()) < 4e6
    outside = re.sub(r'<script type="text/plain" id="library">.*?</script>', "", report_page, flags=re.DOTALL)
    assert "http:" not in outside and "https:" not in outside and 'src="//' not in outside
    sections = re.findall(r'<section id="([\w-]+)"', report_page)
    assert sections == ["verdict", "training", "channels-kept", "weights", "trust", "speed", "configuration"]
    assert re.findall(r'<a href="#([\w-]+)">', report_page) == sections
    shown = plots(report_page)
    assert set(shown) == set(re.findall(r'data-plot="([\w-]+)"', report_page))
    assert {"loss", "cost", "gates", "channels", "histograms", "reliability", "risk", "aleatoric", "latency"} <= set(
        shown
    )
    assert report_page.count('<img src="data:image/png;base64,') == 2 * trust.SHOWN
    for word in ("Budget: keep 30.0% of the FLOPs", "dllp prune", "particle 2", "after the decision, particle 1"):
        assert word in report_page


def test_the_policy_allows_two_scripts_only(report_page: str) -> None:
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="(.*?)">', report_page)[0])
    assert policy.startswith("default-src 'none'") and "connect-src" not in policy and "unsafe-eval" not in policy
    allowed = set(re.findall(r"sha256-([^']+)", policy))
    own = re.findall(r"<script>(.*?)</script>", report_page, re.DOTALL)
    packed = re.findall(r'id="library">(.*?)</script>', report_page, re.DOTALL)[0]
    library = gzip.decompress(base64.b64decode(packed))
    hashes = {base64.b64encode(hashlib.sha256(s).digest()).decode() for s in (own[0].encode(), library)}
    assert len(own) == 1 and hashes == allowed and library == page.require_plotly().read_bytes()
    assert re.search(r"script-src ([^;]*);", policy)[1].count("'") == 4  # type: ignore[index]


def test_the_same_run_gives_the_same_page(run: Path) -> None:
    found = contents.read(run)
    assert report.build([found]) == report.build([found])


def test_a_comparison(run: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = copied / "config.yaml"
    settings.write_text(settings.read_text().replace("seed: 0", "seed: 7"))
    assert main(["report", str(run), str(copied), "--quiet"]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = plots(text)
    assert set(shown) >= {"pareto"} and [t["name"] for t in shown["pareto"]["data"]] == [
        "Pareto front",
        "first",
        "copy",
    ]
    settings_table = text[text.index('<section id="settings"') :]
    assert "seed" in settings_table and "<bdi>7</bdi>" in settings_table and "epochs" not in settings_table


def untouched(folder: Path) -> None:
    pass


def relabelled(folder: Path) -> None:
    found = examples.read(folder)
    assert found is not None
    replace(found, labels=found.labels.flip(0)).write(folder)


def unanswered(folder: Path) -> None:
    """Without the answers to single examples its settings tell what it was evaluated on."""
    (folder / EXAMPLES).unlink()


def elsewhere(folder: Path) -> None:
    unanswered(folder)
    settings = folder / "config.yaml"
    settings.write_text(settings.read_text().replace("data: digits", "data: cifar10"))


def silent(folder: Path) -> None:
    unanswered(folder)
    (folder / "config.yaml").unlink()


@pytest.mark.parametrize(
    ("one", "two", "unlike"),
    [
        (untouched, untouched, False),
        (untouched, relabelled, True),
        (unanswered, unanswered, False),
        (untouched, unanswered, False),
        (unanswered, elsewhere, True),
        (untouched, silent, False),
    ],
)
def test_runs_on_different_test_examples_are_said_to_be(
    copied: Path, tmp_path: Path, one: Callable[[Path], None], two: Callable[[Path], None], unlike: bool
) -> None:
    """Figures of different tests are no comparison; a folder that says nothing raises no alarm."""
    other, both = Path(shutil.copytree(copied, tmp_path / "other")), tmp_path / "both.html"
    one(copied)
    two(other)
    assert main(["report", str(copied), str(other), "--out", str(both), "--quiet"]) == 0
    assert ("not evaluated on the same examples" in both.read_text(encoding="utf-8")) == unlike


@given(st.text())
def test_names_are_text(name: str) -> None:
    for shown in (page.html_text(name), figures.plot_text(name)):
        assert "<" not in shown and ">" not in shown and figures.plain(name, 10**6).isprintable()
    assert '"' not in page.html_text(name)
    found = json.loads(page._embedded({"a": name}))
    assert found == {"a": name} and "<" not in page._embedded({"a": name})


def test_long_names_stay_apart() -> None:
    same = "layer" * 20
    assert len(set(figures.distinct([same + "a", same + "b", "x"]))) == 3


# ---- mistakes


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    unfinished = tmp_path / "unfinished"
    (unfinished / "checkpoints").mkdir(parents=True)
    (unfinished / "config.yaml").touch()
    for folder, words in (("nothing", "not a folder"), ("empty", "no run.json"), ("unfinished", "--resume --out")):
        assert main(["report", str(tmp_path / folder)]) == 2
        one_line(capsys, words)
        assert main(["report", str(run), str(tmp_path / folder), "--out", str(tmp_path / "a.html")]) == 2
        one_line(capsys, words)
    assert main(["report"]) == 2
    one_line(capsys, "required: DIR; see dllp report --help")
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
    other = replace(found, config=found.config | {"task": "regression"})
    with pytest.raises(DllpError, match="compare runs of one kind"):
        report.build([found, other])
