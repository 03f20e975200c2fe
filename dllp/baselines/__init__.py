"""Pruning methods to compare with, each written from its paper's description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType

from dllp.baselines.automl import AutoCompression
from dllp.baselines.collaborative import CollaborativePruning
from dllp.baselines.discrimination import DiscriminationAware
from dllp.baselines.dynamic import Dynamic
from dllp.baselines.fbs import BoostingAndSuppression
from dllp.baselines.liws import InstanceSparsity
from dllp.baselines.magnitude import L1Filters, MagnitudeL1, MagnitudeL2, Random
from dllp.baselines.protocol import Method
from dllp.baselines.reconstruction import ChannelPruning, ThiNet
from dllp.baselines.rnp import RuntimePruning
from dllp.baselines.scaling_factors import DeepHoyer, Polarization, Slimming, SparseStructures
from dllp.baselines.soft import GeometricMedian, SoftFilters
from dllp.errors import ConfigError

_ALL = (
    Random(), MagnitudeL2(), MagnitudeL1(), L1Filters(), ThiNet(), ChannelPruning(), Slimming(), SoftFilters(),
    SparseStructures(), GeometricMedian(), Polarization(), DeepHoyer(), CollaborativePruning(),
    DiscriminationAware(), AutoCompression(),
)  # fmt: skip
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ALL})
_BY_IMAGE = (RuntimePruning(), BoostingAndSuppression(), InstanceSparsity())
DYNAMIC: Mapping[str, Dynamic] = MappingProxyType({method.name: method for method in _BY_IMAGE})
"""Methods that choose channels for each image, and leave nothing to extract."""


def find(text: str) -> Method:
    """A method by name, with other hyperparameters than its own where given: `polarization:strength=1e-4,t=1.1`."""
    found = find_any(text)
    if isinstance(found, Dynamic):
        raise ConfigError(
            f"method {found.name} chooses channels for each image, which leaves no smaller network to extract: "
            f"measure it by dllp bench table2 --rows 'dynamic-{found.name}-*' in a source checkout"
        )
    return found


def find_any(text: str) -> Method | Dynamic:
    """As :func:`find`, for methods too that choose by image."""
    name, _, given = text.partition(":")
    if name == "dllp":  # without any it never comes here
        raise ConfigError(f"method {text}: dllp has no hyperparameters behind its name: give them as options")
    every: dict[str, Method | Dynamic] = {**METHODS, **DYNAMIC}
    if name not in every:
        raise ConfigError(f"there is no method {name!r}: choose from dllp, {', '.join(METHODS)}")
    method, values = every[name], {}
    known = hyperparameters(method)
    for part in given.split(",") if ":" in text else ():
        key, _, value = part.partition("=")
        if key not in known:
            raise ConfigError(f"method {name} has no hyperparameter {key!r}: it has {', '.join(known) or 'none'}")
        try:
            values[key] = float(value)
        except ValueError:
            raise ConfigError(f"{key} = {value!r}: a number is needed, such as {name}:{key}={known[key]:g}") from None
    return replace(method, **values)


def hyperparameters(method: Method | Dynamic) -> dict[str, float]:
    """The hyperparameters of a method by name."""
    return {entry.name: getattr(method, entry.name) for entry in fields(method)}
