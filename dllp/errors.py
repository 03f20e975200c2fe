"""Errors a user can cause: one line that names the mistake, the place and the way out."""


class DllpError(Exception):
    """Base of every error a user of this package can cause."""


class ConfigError(DllpError):
    """A configuration value is out of range or contradicts another one."""


class DataError(DllpError):
    """The data cannot be used: missing, damaged, of the wrong shape, or with labels out of range."""


class StructureError(DllpError):
    """The network cannot be pruned safely; names the layer and the reason."""


class ArtifactError(DllpError):
    """A run folder or one of its files cannot be read or written."""
