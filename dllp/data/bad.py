"""Images that cannot be read: named once each, left out while they are few, an error when they are many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dllp.errors import ConfigError, DataError

MAX_BAD = "0.1%"
Tell = Callable[[str], None]


class Unreadable(Exception):
    """One image cannot be used; says why in a few words."""


@dataclass
class Tally:
    """What could not be read of one split.

    Args:
        total: Images of the split.
        max_bad: The share of them that may be bad, as :func:`share` takes it.
        tell: Called with one line for each bad image.
    """

    total: int
    max_bad: str | float = MAX_BAD
    tell: Tell | None = None
    found: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, reason: str) -> None:
        """Count an image, once however often it is met; raise when there are too many."""
        if name in self.found:
            return
        self.found[name] = reason
        if len(self.found) > share(self.max_bad) * self.total:
            listed = ", ".join(f"{name} ({reason})" for name, reason in self.found.items())
            several = "s" * (len(self.found) > 1)
            raise DataError(
                f"cannot read {len(self.found)} of {self.total} images, more than max_bad = {self.max_bad} allows: "
                f"replace or remove the image{several} {listed}"
            )
        if self.tell is not None:
            self.tell(f"{name} is left out, {len(self.found)} of {self.total} images so far: {reason}")


def share(value: str | float) -> float:
    """`0.1%` or 0.001 -> 0.001."""
    try:
        number = float(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise ConfigError(f"max_bad = {value}: give a share of the images from 0 up and below 1, such as 0.1%")
    return number
