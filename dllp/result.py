"""The public home of :class:`Result` and :class:`Size` in version 0.1.0; :mod:`dllp` itself offers both."""

from dllp.api import Result, load
from dllp.records import Size

__all__ = ["Result", "Size", "load"]
