"""Numbers as people read them."""

from __future__ import annotations


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f}%"


def short_number(value: float | None, unit: str = "") -> str:
    """1234567 -> 1.23 M."""
    if value is None:
        return "–"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def metric(name: str, value: float | None) -> str:
    """Accuracy and calibration error in percent, all others as they are."""
    if value is None:
        return "–"
    return percent(value) if name in ("accuracy", "ece") else f"{value:.4f}"
