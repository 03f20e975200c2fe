"""Images that cannot be read: named once each, left out while they are few, an error when they are many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dllp.errors import ConfigError, DataError

MAX_BAD = "0.1%"
LISTED = 10
"""Names that an error lists."""


@dataclass(frozen=True)
class LeftOut:
    """An image that cannot be read and is done without, `count` of `total` by then; as text one line."""

    name: str
    reason: str
    count: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} is left out, {self.count} of {self.total} images so far: {self.reason}"


Tell = Callable[[LeftOut], None]


class Unreadable(Exception):
    """One image cannot be used; says why in a few words."""


@dataclass
class Tally:
    """What could not be read of one split.

    Args:
        total: Images of the split.
        max_bad: The share of them that may be bad, as :func:`share` takes it.
        tell: Called with each bad image.
    """

    total: int
    max_bad: str | float = MAX_BAD
    tell: Tell | None = None
    found: dict[str, str] = field(default_factory=dict)

    def add(self, bad: Iterable[tuple[str, str]]) -> None:
        """Count images by name and reason, each once however often it is met; raise where there are too many.

        All of `bad` are counted first: the error is to name what a user has to repair, not the first file of it.
        """
        new = {name: reason for name, reason in bad if name not in self.found}
        known = len(self.found)
        self.found |= new
        if new and len(self.found) > share(self.max_bad) * self.total:
            listed = shortened([f"{name} ({reason})" for name, reason in self.found.items()])
            several = "s" * (len(self.found) > 1)
            raise DataError(
                f"cannot read {len(self.found)} of {self.total} images, more than max_bad = {self.max_bad} allows: "
                f"replace or remove the image{several} {listed}"
            )
        if self.tell is not None:
            for count, (name, reason) in enumerate(new.items(), known + 1):
                self.tell(LeftOut(name, reason, count, self.total))


def shortened(names: Sequence[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def share(value: str | float) -> float:
    """`0.1%` or 0.001 -> 0.001."""
    try:
        number = float(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise ConfigError(f"max_bad = {value}: give a share of the images from 0 up and below 1, such as 0.1%")
    return number
