"""Networks by name, as the tables use them. Any other `nn.Module` works as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from dllp.errors import ConfigError, nearest
from dllp.structure.initialise import initialise, reinitialise
from dllp.zoo.networks import mlp, resnet20, resnet50, resnet56, small_cnn, small_resnet, vgg11_bn, vgg16_bn

__all__ = ["build", "initialise", "names", "reinitialise"]


class _Entry(NamedTuple):
    make: Callable[..., nn.Module]
    smallest: int  # image side that the network's poolings can take
    any_shape: bool = True  # images need not be square


_REGISTRY = {
    "mlp": _Entry(mlp, 1, any_shape=False),
    "resnet20": _Entry(resnet20, 4),
    "resnet50": _Entry(resnet50, 32),
    "resnet56": _Entry(resnet56, 4),
    "small_cnn": _Entry(small_cnn, 2),
    "small_resnet": _Entry(small_resnet, 4),
    "vgg11_bn": _Entry(vgg11_bn, 32),
    "vgg16_bn": _Entry(vgg16_bn, 32),
}


def names() -> tuple[str, ...]:
    """Names that :func:`build` knows."""
    return tuple(_REGISTRY)


def check_name(name: object) -> None:
    """Raise for a name that no network has."""
    if name not in _REGISTRY:
        hint = nearest(str(name), _REGISTRY, f"choose one of {', '.join(_REGISTRY)}")
        raise ConfigError(f"unknown model {name!r}: {hint} (or give your own as package.module:factory)")


def build(
    name: str, num_classes: int, in_channels: int = 3, *, image_size: int | None = None, **options: Any
) -> nn.Module:
    """A freshly initialised network.

    Args:
        name: One of :func:`names`.
        num_classes: Width of the output.
        in_channels: Channels of the images, or columns of a table.
        image_size: Side of the images (1 for a table): checked against what the network can take, and given to
            networks that depend on it.
        options: Arguments of the network's own function, such as `shortcut="projection"`.
    """
    check_name(name)
    entry = _REGISTRY[name]
    if image_size is not None:
        check_images(name, (image_size, image_size))
        if entry.make is mlp:
            options["image_size"] = image_size
    return entry.make(num_classes=num_classes, in_channels=in_channels, **options)


def check_images(name: str, sides: tuple[int, ...]) -> None:
    """Raise unless the network takes images of these sides, (height, width); () is a row of a table."""
    side, square = min(sides, default=1), len(set(sides)) < 2
    fitting = [other for other, entry in _REGISTRY.items() if entry.smallest <= side and (square or entry.any_shape)]
    if name not in _REGISTRY or name in fitting:
        return
    least, found = _REGISTRY[name].smallest, "x".join(map(str, sides)) or "rows of a table"
    if side < least:
        ways = " or ".join([*fitting, *(["larger images"] if sides else [])])
        raise ConfigError(f"{name} needs images of at least {least}x{least}, not {found}: choose {ways}")
    raise ConfigError(f"{name} needs square images, not {found}: choose {' or '.join([*fitting, 'such images'])}")
