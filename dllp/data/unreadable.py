"""Unreadable images: skipped and reported while they are few, an error when they are many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dllp.errors import ConfigError, DataError

MAX_BAD = "0.1%"
LISTED = 10  # names that an error lists


class Unreadable(Exception):
    """One image cannot be read; the message is the reason in a few words."""


@dataclass(frozen=True)
class SkippedImage:
    """An unreadable image, the `count`-th of `total` images; as text one line."""

    name: str
    reason: str
    count: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} is left out, {self.count} of {self.total} images so far: {self.reason}"


Report = Callable[[SkippedImage], None]


@dataclass
class UnreadableImages:
    """The unreadable ones of `total` images of a split, of which the fraction `max_bad` may be; each is reported."""

    total: int
    max_bad: str | float = MAX_BAD
    report: Report | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, images: Iterable[tuple[str, str]]) -> None:
        """Count images by name and reason, each once; where there are too many, an error lists all of them."""
        new = {name: reason for name, reason in images if name not in self.reasons}
        known = len(self.reasons)
        self.reasons |= new
        if new and len(self.reasons) > parse_fraction(self.max_bad) * self.total:
            bad = [f"{name} ({reason})" for name, reason in self.reasons.items()]
            more = f" and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
            raise DataError(
                f"cannot read {len(bad)} of {self.total} images, more than max_bad = {self.max_bad} allows: "
                f"replace or remove the image{'s' * (len(bad) > 1)} {', '.join(bad[:LISTED])}{more}"
            )
        if self.report is not None:
            for count, (name, reason) in enumerate(new.items(), known + 1):
                self.report(SkippedImage(name, reason, count, self.total))


def parse_fraction(max_bad: str | float) -> float:
    """`0.1%` or 0.001 -> 0.001."""
    try:
        text = str(max_bad)
        number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise ConfigError(f"max_bad = {max_bad}: give a share of the images from 0 up and below 1, such as 0.1%")
    return number
