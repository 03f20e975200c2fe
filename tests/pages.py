"""What tests of the report's page share: a page, and the figures in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dllp.cli import main


def page(run: Path, path: Path) -> str:
    """The page of a run, which is left at `path`."""
    assert main(["report", str(run), "--out", str(path), "--quiet"]) == 0
    return path.read_text(encoding="utf-8")


def plots(text: str) -> dict[str, Any]:
    """The figures of a page by name."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])
