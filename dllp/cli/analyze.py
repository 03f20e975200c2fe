"""`dllp analyze` and `dllp methods`: what a run did to its weights, and which methods there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dllp import files
from dllp.baselines import METHODS, hyperparameters
from dllp.cli import export
from dllp.cli.task import DENSE_FILE
from dllp.evaluation import weight_analysis
from dllp.runs import artifacts

OWN_PAPER = "Efficient Stein Variational Inference for Reliable Distribution-lossless Network Pruning"


def analyze(given: dict[str, Any]) -> None:
    """The distribution of one particle's weights before pruning, of the kept part and of the removed part."""
    folder = Path(given["folder"])
    result, _, network = export.open_run(given)
    dense = None
    if (folder / DENSE_FILE).exists():
        dense = network()
        artifacts.read_network(folder / DENSE_FILE, dense)
    report = weight_analysis.analyze(result, given.get("particle", 1) - 1, dense)
    if "json" in given:
        files.write_json(Path(given["json"]), {"folder": str(folder), **report}, named=True)
    if not given.get("quiet"):
        print(weight_analysis.text(report))


def methods(given: dict[str, Any]) -> None:
    """Every method by name, with what it removes, its paper and year, and what the paper states."""
    listed = [
        {
            "name": method.name,
            "removes": f"{method.granularity}s",
            "year": method.year,
            "paper": method.paper,
            "hyperparameters": hyperparameters(method),
            "published": [vars(figure) for figure in method.published],
        }
        for method in METHODS.values()
    ]
    own = {"name": "dllp", "removes": "channels or weights", "year": 2023, "paper": OWN_PAPER}
    own |= {"hyperparameters": {}, "published": []}
    if "json" in given:
        files.write_json(Path(given["json"]), [own, *listed], named=True)
    width = max(len(entry["name"]) for entry in listed)
    for entry in (own, *listed):
        figures = "".join(f"; {f['network']}: {f['drop']:g} lost at -{f['removed']:g}%" for f in entry["published"])
        settings = "".join(f"; {name} {value:g}" for name, value in entry["hyperparameters"].items())
        print(f"{entry['name']:{width}}  {entry['year']}  {entry['paper']} ({entry['removes']}{settings}{figures})")
