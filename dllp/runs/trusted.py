"""Code that a user has trusted for a run folder, remembered in the user's own settings.

Not in the folder: whoever hands over a folder must not be able to say what may be imported from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dllp import files
from dllp.errors import ArtifactError


def _place() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dllp" / "trusted.json"


def _known() -> dict[str, list[str]]:
    """Absolute folder -> what may be imported for it; a file that cannot be read trusts nothing."""
    try:
        return files.typed(dict[str, list[str]], files.read_json(_place()), _place())
    except ArtifactError:
        return {}


def is_trusted(folder: Path, code: str) -> bool:
    """True where a user trusted `package.module:factory` for this folder before."""
    return code in _known().get(str(folder.resolve()), ())


def remember(folder: Path, code: Iterable[str]) -> None:
    """Trust the code for this folder from here on; where that cannot be written, commands ask again."""
    known, key = _known(), str(folder.resolve())
    wanted = sorted({*known.get(key, ()), *code})
    if wanted != known.get(key, []):
        with suppress(ArtifactError, OSError):
            _place().parent.mkdir(parents=True, exist_ok=True)
            files.write_json(_place(), known | {key: wanted})
