"""The share of known networks that can be cut, as the tables of results/structure/."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dllp.structure.groups import Structure, discover
from dllp.structure.verification import verify
from tests.known_networks.networks import NETWORKS
from tests.support.particles import random_keep

RESULTS = Path(__file__).parents[2] / "results" / "structure"
SEEDS = (11, 12)


@dataclass(frozen=True)
class Row:
    """What was found in a network: shares of multiply-accumulates that can go, and the largest difference of a cut.

    Attributes:
        half: Share that goes with half of the units of every group.
        most: Share that goes where one unit of every group stays.
        difference: Of gated and cut network in float64, relative to the largest output, over random cuts of its own.
        seconds: CPU time of the discovery.
    """

    name: str
    kind: str
    half: float
    most: float
    groups: dict[str, int]
    difference: float
    seconds: float
    whole: list[str]


def examine(name: str) -> Row:
    """Discover a network's units and verify random cuts of them."""
    known = NETWORKS[name]
    torch.manual_seed(0)
    model, example = known.build().eval(), known.example()
    start = time.process_time()
    structure = discover(model, example)
    seconds = time.process_time() - start
    cuts = [random_keep(structure.groups, seed) for seed in SEEDS]
    difference = max(verify(model, structure.groups, keep, example) for keep in cuts)
    kinds = dict(Counter(group.kind for group in structure.groups))
    reasons = sorted({reason for reason in structure.whole.values() if "outputs" not in reason})
    return Row(name, known.kind, share(structure, 0.5), share(structure, 0), kinds, difference, seconds, reasons)


def share(structure: Structure, fraction: float) -> float:
    """The share of multiply-accumulates that goes with all but a fraction of each group's units, at least one."""
    counts = [max(1, -int(-group.units * fraction // 1)) for group in structure.groups]
    keep = torch.cat([torch.arange(g.units) < n for g, n in zip(structure.groups, counts, strict=True)])
    return 1 - structure.flops.expected(keep.double()).item() / structure.flops.dense


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| network | half of the units | one unit each | groups | largest difference |",
        "|---|---:|---:|---|---:|",
    ]
    for row in rows:
        kinds = ", ".join(f"{count} of {kind}s" for kind, count in row.groups.items())
        lines.append(f"| {row.name} | {row.half:.0%} | {row.most:.0%} | {kinds} | {row.difference:.0e} |")
    return "\n".join(lines) + "\n"


def write(rows: Iterable[Row]) -> None:
    """Put rows in the place of earlier ones in networks.json, and write the tables anew."""
    path = RESULTS / "networks.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "versions": {}}
    known = {row["name"]: row for row in before["rows"]} | {row.name: asdict(row) for row in rows}
    libraries = [name for name in ("torch", "timm", "transformers", "torchvision") if name in sys.modules]
    versions = before["versions"] | {name: sys.modules[name].__version__ for name in libraries}
    ordered = [known[name] for name in NETWORKS if name in known]
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"versions": versions, "rows": ordered}, indent=1) + "\n")
    for kind in ("convolutional", "transformer"):
        chosen = [Row(**row) for row in ordered if row["kind"] == kind]
        (RESULTS / f"{kind}.md").write_text(table(chosen))
