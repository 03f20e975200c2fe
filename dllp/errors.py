"""Errors a user can cause: one line that names the mistake, the place and the way out."""

import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

LONGEST = 2000


def one_line(text: object, longest: int) -> str:
    """Text, maybe out of a stranger's file, as one line of limited length without control or direction characters."""
    line = " ".join(str(text).split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in line)
    return line if len(line) <= longest else line[: longest - 1] + "…"


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The way out after an unknown name: the known one that is most like it."""
    bare = {each.lstrip("-"): each for each in known}  # the dashes that all options have make none of them alike
    found = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    return f"did you mean {bare[found[0]]}?" if found else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class DllpError(Exception):
    """Base of every error a user of this package can cause.

    The message may quote names out of files: it is made one line by :func:`one_line`.

    Attributes:
        reported_elsewhere: Rank 0 prints this error; this rank stays silent.
    """

    reported_elsewhere = False

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(message, LONGEST))


class ConfigError(DllpError):
    """A configuration value is out of range or contradicts another one."""


def check_count(**named: Any) -> None:
    """Raise unless every argument, given by its name, is a whole number of at least 1."""
    for name, value in named.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} = {value!r:.60}: a whole number is needed, at least 1")


def check_callable(**named: Any) -> None:
    """Raise unless every argument, given by its name, is a function or None."""
    for name, value in named.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} is a {type(value).__name__}: give a function")


class DataError(DllpError):
    """The data cannot be used: missing, damaged, of the wrong shape, or with labels out of range."""


class StructureError(DllpError):
    """The network cannot be pruned safely; names the layer and the reason."""


class ArtifactError(DllpError):
    """A run folder or one of its files cannot be read or written."""


class NumericsError(DllpError):
    """A number broke: NaN or infinity; names the step, the tensor, the particle and the layer.

    Attributes:
        in_data: The data held it already: no other learning rate helps.
    """

    in_data = False


class ExportError(DllpError):
    """A network cannot be exported: the exporter refuses it, its file is wrong, or an extra is not installed."""


class RankError(DllpError):
    """A process of a run on several is lost, or does not fit the others."""


class WorkerError(DllpError):
    """A worker of a bench was lost, cannot take part, or broke down over a job."""


class Interrupted(BaseException):
    """A run was asked to stop; it has written a checkpoint. `signal` is the number of the signal that asked.

    No `Exception`: a signal that arrives while a network is tried out is not the network's fault.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(f"interrupted by signal {signal}")
        self.signal = signal
