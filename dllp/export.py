"""The public home of :func:`export`, which lives in :mod:`dllp.deploy.export`."""

from dllp.deploy.export import Exported, export

__all__ = ["Exported", "export"]
