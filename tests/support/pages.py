"""What tests of the report's page share: a page, and the figures in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dllp.cli.main import main

PAGE = "page.html"


def write_page(run: Path, folder: Path) -> None:
    """The page of a run."""
    assert main(["report", str(run), "--out", str(folder / PAGE), "--quiet"]) == 0


def plots(text: str) -> dict[str, Any]:
    """The figures of a page by name."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])
