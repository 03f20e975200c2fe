"""The networks of a run that are worth measuring."""

from __future__ import annotations

from typing import Any

from torch import nn

from dllp.api import Result
from dllp.deploy.export import inputs
from dllp.deploy.rows import DENSE, PRUNED, Subject
from dllp.errors import ConfigError
from dllp.structure.groups import FilterFn, chosen_again, discover
from dllp.structure.padding import kept_units, padded, rounded


def subjects(result: Result, shape: tuple[int, ...], *, particle: int = 0, round_to: int = 8) -> list[Subject]:
    """Dense and pruned network of a run; with lost channels also both ways to multiples of `round_to`."""
    if not 0 <= particle < len(result.particles):
        raise ConfigError(f"there is no particle {particle + 1}: the run has {len(result.particles)}")
    chosen = result.particles[particle]
    # counted here: inputs of another shape than the run's cost something else
    both = [
        Subject(name, network, discover(network, inputs(2, shape), channels=False).flops.dense)
        for name, network in ((DENSE, chosen.reference), (PRUNED, chosen.network))
    ]
    if not chosen.recipe:
        return both
    return [*both, *multiples(chosen.reference, chosen.recipe, shape, round_to, chosen_again(result.whole))]


def multiples(
    reference: nn.Module, recipe: Any, shape: tuple[int, ...], round_to: int, filter_fn: FilterFn | None = None
) -> list[Subject]:
    """The pruned network with dead channels added, and with the widths that `round_to` would have chosen.

    `filter_fn` is that of the run.
    """
    if round_to < 1:
        raise ConfigError(f"round_to = {round_to}: a positive number of channels is needed")
    if round_to == 1:
        return []
    structure = discover(reference, inputs(2, shape), filter_fn=filter_fn)
    keep = kept_units(reference, structure, recipe)
    ways = {f"padded to {round_to}": padded, f"rounded to {round_to}": rounded}
    return [Subject(f"{PRUNED}, {name}", *way(reference, structure, keep, round_to)) for name, way in ways.items()]
