"""Results in git's history: lines are added at the end of a file, and none is ever changed."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

APPENDED = re.compile(r"results/(?:.*/)?(?:runs|figures)\.jsonl")
"""Files that are only ever appended to."""


class NoHistory(Exception):
    """The tree was exported, or git is not installed; says which."""


@dataclass(frozen=True)
class Compared:
    """Changes of a file's earlier lines, in words, how many commits were looked at, and whether others are missing."""

    changed: list[str]
    commits: int
    shallow: bool


def compare(root: Path, start: str) -> Compared:
    """Every version of every file in :data:`APPENDED` with the one after it, from `start` to the working tree.

    An older version must be the beginning of the newer one; a merge must keep every line of each of its parents. Of a
    shallow clone that does not reach back to `start` what there is is compared.
    """
    try:
        top = Path(git(root, "rev-parse", "--show-toplevel").decode().strip())
    except (OSError, subprocess.CalledProcessError):
        raise NoHistory("no git repository here, or no git to read it") from None
    if top != root.resolve():
        raise NoHistory("an exported tree within another repository")
    cut = git(root, "rev-parse", "--is-shallow-repository").strip() == b"true"
    shallow = cut and not _known(root, start)
    changed: list[str] = []
    since = "HEAD" if shallow else f"{start}..HEAD"
    log = git(root, "log", "-m", "--raw", "--no-abbrev", "--no-renames", "--format=%H %P", since).decode()
    commits: set[str] = set()
    commit, parents = "", []
    for line in filter(None, log.splitlines()):
        if not line.startswith(":"):
            commit, *parents = line.split()
            commits.add(commit)
            continue
        about, name = line.split("\t")
        _, _, old, new, _ = about.split(" ")
        # the oldest commit of a shallow clone seems to have no parents, and its files to be new
        if APPENDED.fullmatch(name) and parents and not _kept(_blob(root, old), _blob(root, new), len(parents) > 1):
            changed.append(f"{commit[:10]} changes lines of {name}")
    for name in filter(APPENDED.fullmatch, git(root, "ls-tree", "-rz", "--name-only", "HEAD").decode().split("\0")):
        now = (root / name).read_bytes() if (root / name).exists() else b""
        if not now.startswith(git(root, "show", f"HEAD:{name}")):
            changed.append(f"the working tree changes lines of {name}")
    return Compared(changed, len(commits), shallow)


def _kept(old: bytes, new: bytes, merged: bool) -> bool:
    return set(old.splitlines()) <= set(new.splitlines()) if merged else new.startswith(old)


def _blob(root: Path, name: str) -> bytes:
    """Content by git's name; nothing where a file was not there, or is no longer."""
    return git(root, "cat-file", "blob", name) if name.strip("0") else b""


def _known(root: Path, commit: str) -> bool:
    command = ["git", "-C", str(root), "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, capture_output=True).returncode == 0


def git(root: Path, *words: str) -> bytes:
    """The output of a git command."""
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=True).stdout
