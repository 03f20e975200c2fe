"""The report in a real browser: every plot is drawn, nothing is asked for, and hostile names stay text.

Screenshots are left in build/screenshots/.
"""

from __future__ import annotations

import base64
import gzip
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dllp.cli.main import main

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
pytest.importorskip("plotly", reason="needs plotly: pip install -e '.[report]'")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
EVIL = "<img src=x onerror=alert(1)>"
CLOSING = "</script><script>alert(1)</script>"
CLASSES = (EVIL, '"><b onclick=alert(1)>&amp;')
NETS = f"""
from collections import OrderedDict
from torch import nn

def hostile():
    parts = [({EVIL!r}, nn.Conv2d(3, 8, 3)), ("a", nn.ReLU()), ("javascript:alert(1)", nn.Conv2d(8, 16, 3)),
             ("b", nn.ReLU()), ("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten()), ("end", nn.Linear(16, 2))]
    return nn.Sequential(OrderedDict(parts))
"""
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
VIEWS: dict[str, dict[str, Any]] = {
    "desktop-light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "phone-dark": PHONE | {"device_scale_factor": 2, "color_scheme": "dark"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run in which every name that a stranger may choose is hostile."""
    place = tmp_path_factory.mktemp("hostile")
    random = np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 12)):
        for level, name in enumerate(CLASSES):
            folder = place / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 128, (10, 10, 3)) + 127 * level
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}{EVIL}.png")
    (place / "hostile_nets.py").write_text(NETS)
    run = place / f"run {EVIL}"
    words = ["--model", "hostile_nets:hostile", "--keep-flops", "0.5", "--epochs", "4", "--batch-size", "16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", list(sys.path))
        more = [
            "--particles",
            "2",
            "--init",
            "fresh",
            "--augment",
            "none",
            "--discrete-at",
            "0.75",
            "--out",
            str(run),
            "--quiet",
        ]
        assert main(["prune", "--data", str(place / "data"), *words, *more]) == 0
        assert main(["evaluate", str(run), "--trust-imports", "--corrupt", "gaussian-blur:1", "noise:0.2"]) == 0
        changed = run / "corruptions.json"
        changed.write_text(changed.read_text().replace("noise:0.2", CLOSING))
        assert main(["report", str(run), "--trust-imports", "--quiet"]) == 0
        shutil.copytree(run, place / "other")
        assert main(["report", str(run), "other", "--out", "both.html", "--quiet"]) == 0
        yield place


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER)
        yield chromium
        chromium.close()


class Watched:
    """A page and everything that it must not do."""

    def __init__(self, browser: Any, path: Path, **view: Any) -> None:
        self.context = browser.new_context(**view)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def check(self) -> None:
        """No word on the console, no dialog, and no request but for the file itself."""
        assert self.complaints == []
        outside = [url for url in self.requests[1:] if not url.startswith("data:")]
        assert outside == [] and self.requests[0].startswith("file:")
        self.context.close()

    def plots(self) -> dict[str, int]:
        """Drawn plots by name, with the number of visible marks, lines, bars and cells in each."""
        script = """() => [...document.querySelectorAll("[data-plot]")].map((e) => [e.dataset.plot,
            e.dataset.drawn === "yes" ? e.querySelectorAll(
                ".scatterlayer path, .barlayer path, .heatmaplayer image").length : -1])"""
        return dict(self.page.evaluate(script))


PLOTS = {
    "loss", "accuracy", "cost", "times", "temperature", "discrepancy", "gates", "channels", "histograms", "near-zero",
    "reliability", "risk", "aleatoric", "epistemic", "corrupted-accuracy", "corrupted-ece", "latency", "layers",
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_every_plot_is_drawn(folder: Path, browser: Any, name: str) -> None:
    watched = Watched(browser, next(folder.glob("run */report.html")), **VIEWS[name])
    drawn = watched.plots()
    assert set(drawn) == PLOTS - ({"layers"} - set(drawn))  # tiny layers may all have become faster than their share
    assert all(count > 0 for count in drawn.values()), drawn
    page = watched.page
    wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]  # a phone scrolls down, not sideways
    ground, text = page.evaluate("""() => { const s = getComputedStyle(document.body);
        return [s.backgroundColor, s.color].map((c) => Number(c.match(/\\d+/g)[0])); }""")  # fmt: skip
    assert (ground < text) == name.endswith("dark")
    inked = page.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill.match(/\\d+/g).map(Number)")
    assert abs(inked[0] - ground) > 100  # the plots follow the page
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SHOTS / f"{name}.png"), full_page=True)
    watched.check()


def test_hostile_names_stay_text(folder: Path, browser: Any) -> None:
    watched = Watched(browser, next(folder.glob("run */report.html")), **VIEWS["desktop-light"])
    page = watched.page
    assert EVIL in page.title() and EVIL in page.inner_text("h1")
    assert page.evaluate("document.querySelectorAll('[onerror], [onclick], img:not([src^=\"data:\"])').length") == 0
    assert page.evaluate("document.scripts.length") == 4  # plots, packed library, own script, unpacked library
    assert all(any(name in text for name in CLASSES) for text in page.inner_text(".gallery").splitlines())
    labels = page.evaluate("[...document.querySelectorAll('#plot-channels .ytick text')].map((e) => e.textContent)")
    assert sorted(labels) == [EVIL, "javascript:alert(1)"]
    axis = page.evaluate("[...document.querySelectorAll('#plot-corrupted-accuracy .xtick')].map((e) => e.textContent)")
    assert CLOSING in axis
    options = page.evaluate("[...document.querySelectorAll('[data-chooses=gates] option')].map((e) => e.textContent)")
    assert options == ["all layers", EVIL, "javascript:alert(1)"]
    assert page.evaluate("document.querySelectorAll('.plot a').length") == 0
    watched.check()


def test_keys_reach_everything(folder: Path, browser: Any) -> None:
    watched = Watched(browser, next(folder.glob("run */report.html")), **VIEWS["desktop-light"])
    page = watched.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.dataset.plot ?? document.activeElement.dataset.chooses ?? ''")
        )
    assert PLOTS - {"layers"} <= reached
    page.focus("#plot-loss")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.text_content("#plot-loss .hoverlayer")
    page.keyboard.press("Escape")
    assert not page.text_content("#plot-loss .hoverlayer")
    before = page.inner_html("#plot-histograms .barlayer")
    page.select_option("[data-chooses=histograms]", index=1)
    page.wait_for_timeout(200)
    assert page.inner_html("#plot-histograms .barlayer") != before
    watched.check()


def test_colours_follow_a_change_of_mind(folder: Path, browser: Any) -> None:
    watched = Watched(browser, next(folder.glob("run */report.html")), **VIEWS["desktop-light"])
    ink = "getComputedStyle(document.querySelector('#plot-loss .xtick text')).fill"
    light = watched.page.evaluate(ink)
    watched.page.emulate_media(color_scheme="dark")
    watched.page.wait_for_timeout(200)
    assert watched.page.evaluate(ink) != light
    watched.check()


def test_a_comparison_is_drawn(folder: Path, browser: Any) -> None:
    watched = Watched(browser, folder / "both.html", **VIEWS["desktop-light"])
    assert watched.plots()["pareto"] > 0
    assert EVIL in watched.page.inner_text("#verdict") and "other" in watched.page.inner_text("#verdict")
    watched.page.screenshot(path=str(SHOTS / "comparison.png"), full_page=True)
    watched.check()


def test_a_library_that_was_changed_does_not_run(folder: Path, browser: Any, tmp_path: Path) -> None:
    """The policy names the one library by its hash: whatever else stands in its place is refused."""
    text = next(folder.glob("run */report.html")).read_text()
    start = text.index('id="library">') + len('id="library">')
    evil = base64.b64encode(gzip.compress(b"window.Plotly = {}; alert(1)")).decode()
    path = tmp_path / "changed.html"
    path.write_text(text[:start] + evil + text[text.index("</script>", start) :])
    context = browser.new_context()
    page = context.new_page()
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri())
    page.wait_for_selector(".plot.failed")
    assert "could not be drawn" in page.inner_text("#plot-loss") and dialogs == []
    context.close()
