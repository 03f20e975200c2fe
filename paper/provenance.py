"""Where a result comes from: the commit of the checkout that computed it, local changes of its code, and the time."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dllp.errors import ConfigError

ROOT = Path(__file__).parents[1]
CODE = ("dllp", "paper")
"""Folders whose files decide what is computed; results that are being written there count as no change."""
COMMIT, DIRTY = "DLLP_COMMIT", "DLLP_DIRTY"
"""Environment variables that say it for a copy of the tree without `.git`."""
PLACE = re.compile(r"(?<![^=])/.+")
"""An absolute path, also behind `--option=`."""
FLAGS = {"true": True, "1": True, "false": False, "0": False}


def source(root: Path = ROOT) -> dict[str, Any]:
    """`commit` (hexadecimal) and `dirty` of the code: by the environment, or by git; None where neither knows.

    `dirty` is true where a file of :data:`CODE` differs from the commit, new files included.
    """
    given, flag = os.environ.get(COMMIT), os.environ.get(DIRTY)
    if given and not re.fullmatch("[0-9a-f]{7,64}", given):
        raise ConfigError(f"{COMMIT} = {given!r}: give a commit's hexadecimal name, as git rev-parse HEAD prints it")
    if flag and flag not in FLAGS:
        raise ConfigError(f"{DIRTY} = {flag!r}: give true or false")
    commit, dirty = (given, None) if given else _of_checkout(root)
    return {"commit": commit, "dirty": FLAGS[flag] if flag else dirty}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command() -> str:
    """The script that runs, with its arguments as typed; files and folders by their names, wherever they are."""
    script, *words = sys.argv
    return shlex.join([Path(script).name, *(PLACE.sub(lambda found: Path(found[0]).name, word) for word in words)])


def _of_checkout(root: Path) -> tuple[str | None, bool | None]:
    found = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    top, _, commit = (found or "").strip().partition("\n")
    if not commit or Path(top) != root.resolve():  # an exported tree may lie within someone else's repository
        return None, None
    changes = _git(root, "status", "--porcelain", "--", *CODE)
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *words: str) -> str | None:
    """The output of a git command; None where there is no git, or it refuses."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 # nosec B603
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
