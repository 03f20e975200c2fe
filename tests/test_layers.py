"""The contract of layers is written down once: what CONTRIBUTING.md prints is what import-linter checks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_contributing_prints_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (c for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == "layers")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Layers")[2]
    assert re.findall(r"^ {4}(.+)$", text, re.MULTILINE) == contract["layers"]
    assert len(contract["layers"]) == 10


def test_no_folder_is_crowded() -> None:
    for folder in [ROOT / "dllp", *(path for path in (ROOT / "dllp").iterdir() if path.is_dir())]:
        assert len(list(folder.glob("*.py"))) <= 18, folder.name
