"""The command `dllp structure`: the units of a network that can be removed, what they cost, and what stays whole."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dllp import files
from dllp.cli import progress
from dllp.cli.open_run import build_network, read_data
from dllp.errors import ConfigError
from dllp.runs import settings
from dllp.runs.settings import Task
from dllp.structure.groups import Structure, discover

CLASSES = 10  # outputs of a network by name where no data say how many


def run(args: Namespace) -> None:
    """Trace one forward, verify the cut, and print costs by kind of unit; nothing is trained."""
    task, _ = settings.split(args.chosen)
    model, example = subject(task, args)
    report = {"model": task.model, **summary(discover(model, example, units="both"))}
    if args.json is not None:
        files.write_json(Path(args.json), report, named=True)
    if not args.quiet:
        progress.show_structure(report)


def subject(task: Task, args: Namespace, classes: int = CLASSES) -> tuple[nn.Module, Tensor]:
    """The network and one example: zeros of the shape that the data or the options give."""
    given = [name for name in ("data", "shape", "tokens") if args.chosen.get(name) or getattr(args, name, None)]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} both describe an input: give one of them")
    if args.tokens:
        if not task.is_code:
            raise ConfigError(f"model {task.model} takes no tokens: leave out --tokens")
        return build_network(task, CLASSES, 1, 1), torch.zeros(1, args.tokens, dtype=torch.int64)
    if args.shape:
        channels, *sides = args.shape
        return build_network(task, classes, channels, min(sides, default=1)), torch.zeros(1, *args.shape)
    data = read_data(task, 0, quiet=args.quiet)
    model = build_network(task, data.num_classes, data.in_channels, data.image_size)
    return model, torch.zeros(1, *data.train.shape)


def summary(structure: Structure) -> dict[str, Any]:
    """Costs, groups with what is left where each keeps one unit (branches none), the same by kind, what stays whole."""

    def least(groups: Iterable[int]) -> dict[str, float]:
        """Fractions of the dense cost that are left where these groups keep one unit each, branches none."""
        gates = torch.ones(structure.units, dtype=torch.float64)
        for g in groups:
            here = structure.slices[g]
            gates[here.start + (not structure.groups[g].gone) : here.stop] = 0
        costs = {"macs": structure.flops, "params": structure.params}
        return {name: float(cost.expected(gates)) / cost.dense for name, cost in costs.items()}

    kinds: dict[str, list[int]] = {}
    groups = []
    for g, group in enumerate(structure.groups):
        kinds.setdefault(group.kind, []).append(g)
        about = {name: getattr(group, name) for name in ("name", "kind", "units", "width")}
        groups.append({**about, "least": least([g])})
    by_kind = {
        kind: {"groups": len(found), "units": sum(structure.groups[g].units for g in found), "least": least(found)}
        for kind, found in kinds.items()
    }
    costs = {"macs": structure.flops.dense, "params": round(structure.params.dense)}
    every = least(range(len(structure.groups)))
    return {**costs, "groups": groups, "kinds": by_kind, "least": every, "whole": structure.whole}
