"""Raw lines of results are appended, never edited: this repository's history, and histories made up to break it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.history import NoHistory, compare, git

ROOT = Path(__file__).parents[2]
START = "44b9c42"
"""The first commit of the rule; before it lines were edited, as docs/results.md says."""
FILE = "results/table1/runs.jsonl"


def test_no_line_of_this_repository_was_edited() -> None:
    try:
        found = compare(ROOT, START)
    except NoHistory as error:
        pytest.skip(f"the history of results cannot be compared: {error}")
    assert found.changed == []
    if found.shallow:
        pytest.skip(
            f"a shallow clone without {START}: its {found.commits} commits were compared, older ones are absent"
        )


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two lines in a first commit, three in a second; no settings of the user's own."""
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "nobody")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "made up"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    write(root, ["a", "b"])
    commit(root)
    git(root, "tag", "start")
    write(root, ["a", "b", "c"])
    commit(root)
    return root


def write(root: Path, names: list[str], file: str = FILE) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text("".join(json.dumps({"digest": name, "seed": 0}) + "\n" for name in names))


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x")


def drop(root: Path, file: str = FILE) -> None:
    (root / file).unlink()


CHANGES: dict[str, Callable[[Path], None]] = {
    "a line edited": lambda root: write(root, ["a", "B", "c"]),
    "a line removed": lambda root: write(root, ["a", "b"]),
    "a line in the middle": lambda root: write(root, ["a", "x", "b", "c"]),
    "the file removed": drop,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("committed", [True, False])
def test_an_edited_line_is_found(change: str, committed: bool, repository: Path) -> None:
    assert compare(repository, "start").changed == []
    CHANGES[change](repository)
    if committed:
        commit(repository)
        write(repository, ["a", "b", "c"])  # that it is there again makes nothing good
        if change != "a line removed":
            commit(repository)
    (found, *_) = compare(repository, "start").changed
    assert found.endswith(f"changes lines of {FILE}") and found.startswith("the working tree") != committed


def test_lines_and_files_may_be_added(repository: Path) -> None:
    write(repository, ["x"], "results/table1/figures.jsonl")
    write(repository, ["a", "b", "c", "d"])
    write(repository, ["y"], "results/tuning/others.jsonl")
    commit(repository)
    write(repository, ["z"], "results/tuning/others.jsonl")  # no file of the rule
    write(repository, ["a", "b", "c", "d", "e"])
    found = compare(repository, "start")
    assert (found.changed, found.commits, found.shallow) == ([], 2, False)


@pytest.mark.parametrize(("merged", "fine"), [(["a", "b", "c", "d", "e"], True), (["a", "b", "c", "d"], False)])
def test_a_merge_keeps_the_lines_of_both_sides(merged: list[str], fine: bool, repository: Path) -> None:
    git(repository, "checkout", "--quiet", "-b", "side")
    write(repository, ["a", "b", "c", "e"])
    commit(repository)
    git(repository, "checkout", "--quiet", "main")
    write(repository, ["a", "b", "c", "d"])
    commit(repository)
    git(repository, "merge", "--quiet", "--no-commit", "--strategy=ours", "side")
    write(repository, merged)
    commit(repository)
    assert (compare(repository, "start").changed == []) is fine


def test_of_a_shallow_clone_what_there_is_is_compared(repository: Path, tmp_path: Path) -> None:
    write(repository, ["a", "b", "c", "d"])
    commit(repository)
    clone = tmp_path / "clone"
    git(repository, "clone", "--quiet", "--depth", "2", f"file://{repository}", str(clone))
    found = compare(clone, "start")
    assert (found.changed, found.commits, found.shallow) == ([], 2, True)
    write(clone, ["a", "b", "d"])
    assert compare(clone, "start").changed == [f"the working tree changes lines of {FILE}"]
    git(clone, "fetch", "--quiet", "--unshallow", "--tags")
    assert compare(clone, "start").shallow is False


def test_an_exported_tree_has_no_history(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = repository / "results"
    with pytest.raises(NoHistory, match="within another repository"):
        compare(inside, "start")
    shutil.rmtree(repository / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(NoHistory, match="no git repository here"):
        compare(repository, "start")
