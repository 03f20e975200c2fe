"""`dllp analyze` and `dllp methods`: what a run did to its weights, and which methods there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dllp import analysis, artifacts, shipping
from dllp.task import DENSE_FILE


def analyze(given: dict[str, Any]) -> None:
    """The distribution of one particle's weights before pruning, of the kept part and of the removed part."""
    folder = Path(given["folder"])
    result, _, network = shipping.open_run(given)
    dense = None
    if (folder / DENSE_FILE).exists():
        dense = network()
        artifacts.read_network(folder / DENSE_FILE, dense)
    report = analysis.analyze(result, given.get("particle", 1) - 1, dense)
    if "json" in given:
        artifacts.write_json(Path(given["json"]), {"folder": str(folder), **report})
    if not given.get("quiet"):
        print(analysis.text(report))
