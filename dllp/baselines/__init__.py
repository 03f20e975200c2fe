"""Methods of pruning to compare with, each written from its paper's description; one file for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dllp.baselines.chance import Random
from dllp.baselines.cp import ChannelPruning
from dllp.baselines.deephoyer import DeepHoyer
from dllp.baselines.filters import L1Filters
from dllp.baselines.fpgm import GeometricMedian
from dllp.baselines.magnitude import MagnitudeL1, MagnitudeL2
from dllp.baselines.polarization import Polarization
from dllp.baselines.protocol import Method
from dllp.baselines.slimming import Slimming
from dllp.baselines.soft import SoftFilters
from dllp.baselines.sss import SparseStructures
from dllp.baselines.thinet import ThiNet
from dllp.errors import ConfigError

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Random(),
            MagnitudeL2(),
            MagnitudeL1(),
            L1Filters(),
            ThiNet(),
            ChannelPruning(),
            Slimming(),
            SoftFilters(),
            SparseStructures(),
            GeometricMedian(),
            Polarization(),
            DeepHoyer(),
        )
    }
)


def find(name: str) -> Method:
    """A method by name."""
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}: choose from dllp, {', '.join(METHODS)}")
    return METHODS[name]
