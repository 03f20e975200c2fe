"""The documentation: its examples run, its names and links exist, and the site builds without a network.

A comment before a block says what a test does with it: `<!-- test: skip -->`, `<!-- test: needs PACKAGE -->` to run it
where that is installed, or `<!-- test: OLD -> NEW | ... -->` to make it short. Blocks of a page share a namespace and a
folder, like a reader who follows them from top to bottom.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

import dllp
from dllp.cli.parser import parse
from paper.jobs import recipe
from paper.pages import written
from paper.tables import TABLES
from tests.support.commands import ENVIRONMENT

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- test: (?P<marker>.*?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
NAME = re.compile(r"\bdllp(?:\.[A-Za-z_]\w*)+")


def _id(page: Path) -> str:
    return str(page.relative_to(DOCS))


@dataclass(frozen=True)
class Block:
    """An example: its language, its code as a test runs it, and its line in the page."""

    language: str
    code: str
    line: int
    skipped: bool


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, shortened where a marker says so."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        code, marker = match["code"], match["marker"] or ""
        for change in marker.split(" | ") if "->" in marker else ():
            old, new = change.split(" -> ")
            assert old in code, f"{page.name}: the marker's {old!r} is not in its block"
            code = code.replace(old, new)
        line = text.count("\n", 0, match.start("code"))
        needed = marker.removeprefix("needs ") if marker.startswith("needs ") else ""
        absent = bool(needed) and importlib.util.find_spec(needed) is None
        found.append(Block(match["language"], code, line, marker == "skip" or absent))
    return found


RUNNABLE = [page for page in PAGES if any(not block.skipped for block in blocks(page))]


# torch.export.load warns about PyTorch's own code.
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", RUNNABLE, ids=_id)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.skipped:
            continue
        if block.language == "python":
            code = compile("\n" * block.line + block.code, str(page), "exec")  # errors name the page's own lines
            exec(code, namespace)  # noqa: S102
        else:
            assert block.language == "sh", f"{page.name}, line {block.line}: only python and sh are run"
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code], env=ENVIRONMENT | {"PATH": path},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{page.name}, line {block.line}: {done.stderr}"


def test_the_tutorial_is_run() -> None:
    found = [block.language for block in blocks(DOCS / "tutorial.md") if not block.skipped]
    assert found.count("python") >= 5 and found.count("sh") >= 2


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_python_blocks_parse_and_fences_have_a_language(page: Path) -> None:
    found = blocks(page)
    assert len(re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE)) == 2 * len(found)
    for block in found:
        if block.language == "python":
            ast.parse(block.code)


def resolve(name: str) -> Any:
    """What a dotted name means: a module, or an attribute of one."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        module = ".".join(parts[:size])
        if _exists(module):
            return reduce(getattr, parts[size:], importlib.import_module(module))
    raise AssertionError(name)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_name_exists(page: Path) -> None:
    names = set(NAME.findall(page.read_text(encoding="utf-8")))
    missing = []
    for name in sorted(names):
        try:
            resolve(name)
        except AttributeError:
            fields = getattr(resolve(name.rpartition(".")[0]), "__annotations__", {})  # a dataclass without default
            if name.rpartition(".")[2] not in fields:
                missing.append(name)
    assert not missing


def test_the_method_names_what_computes_it() -> None:
    names = NAME.findall((DOCS / "method.md").read_text(encoding="utf-8"))
    equations = ("algorithm1", "spike_and_slab", "gates", "stein", "likelihood", "schedule", "update")
    others = ("structure.cost", "structure.slicing", "training.extract")
    for module in (*(f"method.{name}" for name in equations), *others):
        assert any(name.startswith(f"dllp.{module}.") for name in names), module


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert "://" not in target, target
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.is_file() and there.is_relative_to(DOCS), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(there), f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    """The ids that Markdown gives to a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_pages_hold_their_tables_and_the_reference(page: Path) -> None:
    """They read without a build; `python -m paper.pages` writes them."""
    text = page.read_text(encoding="utf-8")
    assert written(text) == text
    assert not re.search(r"^(--8<--|:::)", text, re.MULTILINE) and not re.search(r"\]\[dllp", text)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == dllp.__version__ and citation["license"] == "MIT"


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    for needed in ("mkdocs", "material"):
        pytest.importorskip(needed, reason="needs the documentation's packages: pip install -e '.[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = ENVIRONMENT | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file()
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:)?//", html)
        assert not loaded, page.name


HEADLINE = [
    ("table1", "given-channel-55", "ResNet-56, channels"), ("table1", "given-channel-70", "ResNet-56, channels"),
    ("table1", "given-weight-55", "ResNet-56, single weights"), ("table2", "given-channel-74.65", "VGG-16, channels"),
    ("table2", "given-weight-74.65", "VGG-16, single weights"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "name", "title"), HEADLINE)
def test_the_readme_says_what_was_measured(table: str, name: str, title: str) -> None:
    """Every figure of its lines on CIFAR-10 is that of the summary."""
    rows = json.loads((ROOT / "results" / table / "summary.json").read_text())["rows"]
    (row,) = (row for row in rows if row["name"] == name)
    cells = [
        title, f"{row['flops_removed_mean']:.1f}%", f"{row['dense_acc_mean']:.2f}",
        f"{row['acc_mean']:.2f} ± {row['acc_std']:.2f}", f"{row['drop_mean']:.2f} ± {row['drop_se']:.2f}",
        f"{row['ensemble_acc_mean']:.2f}", f"{row['nll_mean']:.3f}, {row['ensemble_nll_mean']:.3f}",
        f"{row['ece_mean']:.2f}, {row['ensemble_ece_mean']:.2f}",
    ]  # fmt: skip
    assert "| " + " | ".join(cells) + " |" in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_the_recipe_on_the_page_of_results_is_the_one_that_tables_take() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    for granularity, column in (("channel", 1), ("weight", 2)):
        config = recipe("resnet56", granularity).resolved()
        for row in rows:
            numbers = tuple(float(number) for number in row[column].split(" to "))
            assert getattr(config, row[0]) == (numbers[0] if len(numbers) == 1 else numbers), row
        named = {name for name, _, _ in rows} | {"init", "batch_size", "epochs", "lr", "lr_end", "granularity"}
        usual = dllp.Config(granularity=granularity).resolved()  # type: ignore[arg-type]
        changed = {f.name for f in fields(dllp.Config) if getattr(config, f.name) != getattr(usual, f.name)}
        assert changed <= named


def test_the_command_on_the_page_of_results_is_a_row_of_table_1() -> None:
    (block,) = (block for block in blocks(DOCS / "results.md") if "--model resnet56" in block.code)
    args = parse(shlex.split(block.code.replace("\\\n", " "))[1:])
    row = next(row for row in TABLES["table1"].rows if row.name == "dllp-channel-55")
    wanted, given = row.job.config, args.chosen
    assert args.command == "prune" and given["model"] == row.job.network and given["data"] == TABLES["table1"].data
    wanted, defaults = wanted.resolved(), dllp.Config().resolved().as_dict()
    defaults["slab_bounds"] = tuple(defaults["slab_bounds"])
    for name in defaults.keys() - {"seed", "init", "precision"}:  # by name a network starts fresh
        assert given.get(name, defaults[name]) == getattr(wanted, name), name
