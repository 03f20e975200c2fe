"""dllp: neural networks made small, with a posterior that says how far to trust what is left."""

# ruff: noqa: E402
from dllp.signals import while_loading

while_loading()  # before what takes seconds to load

from dllp.api import prune, train_dense
from dllp.config import Config
from dllp.errors import ArtifactError, ConfigError, DataError, DllpError, StructureError
from dllp.evaluation.sampling import sample_gates
from dllp.posterior import Posterior, Prediction
from dllp.result import Result, load
from dllp.training.trainer import EpochRecord
from dllp.version import __version__

__all__ = [
    "ArtifactError",
    "Config",
    "ConfigError",
    "DataError",
    "DllpError",
    "EpochRecord",
    "Posterior",
    "Prediction",
    "Result",
    "StructureError",
    "__version__",
    "load",
    "prune",
    "sample_gates",
    "train_dense",
]
