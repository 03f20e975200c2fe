"""dllp: neural networks made small, with a posterior that says how far to trust what is left."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dllp.api import Result, load, prune, train_dense
    from dllp.config import Config
    from dllp.errors import ArtifactError, ConfigError, DataError, DllpError, StructureError
    from dllp.evaluation.sampling import sample_gates
    from dllp.posterior import Posterior, Prediction
    from dllp.pruner import Pruner
    from dllp.records import EpochRecord

__all__ = [
    "ArtifactError",
    "Config",
    "ConfigError",
    "DataError",
    "DllpError",
    "EpochRecord",
    "Posterior",
    "Prediction",
    "Pruner",
    "Result",
    "StructureError",
    "__version__",
    "load",
    "prune",
    "sample_gates",
    "train_dense",
]
_HOMES = {
    "dllp.api": ("Result", "load", "prune", "train_dense"),
    "dllp.config": ("Config",),
    "dllp.errors": ("ArtifactError", "ConfigError", "DataError", "DllpError", "StructureError"),
    "dllp.evaluation.sampling": ("sample_gates",),
    "dllp.posterior": ("Posterior", "Prediction"),
    "dllp.pruner": ("Pruner",),
    "dllp.records": ("EpochRecord",),
}
_MODULES = ("baselines", "checkpoints", "data", "export", "result", "zoo")
"""Those with public names."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: `dllp --help` must not wait for PyTorch."""
    if name in _MODULES:
        return import_module(f"dllp.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module 'dllp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
