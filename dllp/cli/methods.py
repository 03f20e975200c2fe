"""`dllp methods`: the methods of pruning by name."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from dllp import files
from dllp.baselines import METHODS, hyperparameters

OWN_PAPER = "Efficient Stein Variational Inference for Reliable Distribution-lossless Network Pruning"


def run(args: Namespace) -> None:
    """List every method with what it removes, its paper and year, and the figures that the paper states."""
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
    if args.json is not None:
        files.write_json(Path(args.json), [own, *listed], named=True)
    width = max(len(entry["name"]) for entry in listed)
    for entry in (own, *listed):
        figures = "".join(f"; {f['network']}: {f['drop']:g} lost at -{f['removed']:g}%" for f in entry["published"])
        settings = "".join(f"; {name} {value:g}" for name, value in entry["hyperparameters"].items())
        print(f"{entry['name']:{width}}  {entry['year']}  {entry['paper']} ({entry['removes']}{settings}{figures})")
