"""The commit of a result's code, and what every new line says of where it comes from."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from dllp.errors import ConfigError
from paper import provenance
from paper.command import typed
from paper.provenance import source
from tests.support.history import git


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLLP_COMMIT", "DLLP_DIRTY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "nobody")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "checkout"
    for folder in ("dllp", "paper", "results"):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").write_text("as committed\n")
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x")
    return root


def test_a_checkout_has_a_commit_and_perhaps_changes(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD").decode().strip()
    assert source(checkout) == {"commit": commit, "dirty": False}
    (checkout / "results" / "file").write_text("a line more\n")
    assert source(checkout)["dirty"] is False, "what is being written is no change of the code"
    (checkout / "paper" / "file").write_text("another\n")
    assert source(checkout) == {"commit": commit, "dirty": True}
    git(checkout, "checkout", "--", "paper")
    (checkout / "dllp" / "new").touch()
    assert source(checkout)["dirty"] is True


def test_an_exported_tree_has_none(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"commit": None, "dirty": None}
    assert source(checkout / "dllp") == unknown, "within someone else's repository"
    shutil.rmtree(checkout / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert source(checkout) == unknown
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source(checkout) == unknown, "no git"


def test_the_environment_is_asked_first(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLP_COMMIT", "44b9c42")
    assert source(checkout) == {"commit": "44b9c42", "dirty": None}, "git knows another commit only"
    for text, flag in (("true", True), ("1", True), ("false", False), ("0", False)):
        monkeypatch.setenv("DLLP_DIRTY", text)
        assert source(checkout) == {"commit": "44b9c42", "dirty": flag}
    monkeypatch.setenv("DLLP_COMMIT", "")
    assert source(checkout)["commit"] == git(checkout, "rev-parse", "HEAD").decode().strip()


@pytest.mark.parametrize(("name", "value"), [("DLLP_COMMIT", "main"), ("DLLP_COMMIT", "\n"), ("DLLP_DIRTY", "maybe")])
def test_other_values_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        source()


def test_this_code_is_in_a_checkout_or_not() -> None:
    assert (provenance.ROOT / "dllp" / "__init__.py").exists()
    known = source()
    assert (known["commit"] is None) == (known["dirty"] is None)


def test_a_command_names_no_place_of_the_machine(tmp_path: Path) -> None:
    given = {"name": "table3", "rows": ["dllp-*", "dense"], "out": str(tmp_path / "mine"), "data": "~/tiny imagenet"}
    found = typed("python -m paper", {**given, "seeds": [0, 1], "quiet": True, "list": False, "data_root": "data"})
    assert found == (
        "python -m paper table3 --rows 'dllp-*' dense --out mine --data 'tiny imagenet' --seeds 0 1 --quiet "
        "--data-root data"
    )
    assert json.dumps(str(tmp_path)) not in found


def test_a_script_is_stored_as_typed_but_for_the_place_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--data-root",
        "/somewhere/cifar",
        "--out=/else/where.jsonl",
        "--row",
        "dense",
        "lr=0.1",
        "kept/here",
        "a b",
    ]
    monkeypatch.setattr("sys.argv", ["/a/benchmarks/script.py", *words])
    wanted = "script.py --data-root cifar --out=where.jsonl --row dense lr=0.1 kept/here 'a b'"
    assert provenance.command() == wanted


def test_no_result_names_a_place_on_a_machine() -> None:
    place = re.compile(r"(?<![\w.])/(?:root|home|tmp|work|Users|mnt)/")
    texts = [path for path in (provenance.ROOT / "results").rglob("*") if path.suffix in {".jsonl", ".json", ".md"}]
    assert len(texts) > 30
    assert [path.name for path in texts if place.search(path.read_text(encoding="utf-8"))] == []
