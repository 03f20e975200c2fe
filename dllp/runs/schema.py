"""Typed validation of what a file holds: JSON values against annotated types, dataclasses included.

    typed(EpochRecord, value, path)         a dataclass, made of an object
    typed(list[Size], value, path)          a list of them
    typed(dict[str, list[int]], value, path)

Every reader of JSON uses :func:`typed`, after :func:`dllp.files.parse_json` has seen to its form.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from dllp.config import fits, types_of
from dllp.errors import ArtifactError, DllpError

T = TypeVar("T")
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", NoneType: "null"}
TEXT = 4096
"""Most characters of a single setting."""


def typed(hint: type[T], value: Any, place: object, kind: type[DllpError] = ArtifactError) -> T:
    """A JSON value as its annotated type: dataclasses are made of objects, all else is returned as it is.

    Names that a dataclass lacks are ignored: files may hold computed values besides.

    Args:
        place: The file, for the error: `run.json: history[3].loss[0] must be a number`.
        kind: What to raise.
    """
    return _typed(hint, value, "", place, kind)


def _typed(hint: Any, value: Any, name: str, place: object, kind: type[DllpError]) -> Any:
    if fits(value, hint):
        return value
    if is_dataclass(hint) and isinstance(value, dict):
        hints, parts = types_of(hint), {}  # type: ignore[arg-type]
        for field in fields(hint):
            inner = f"{name}.{field.name}".lstrip(".")
            if field.name in value:
                parts[field.name] = _typed(hints[field.name], value[field.name], inner, place, kind)
            elif field.default is MISSING and field.default_factory is MISSING:
                raise kind(f"{place}: {inner} is missing")
        return hint(**parts)  # type: ignore[operator]
    if get_origin(hint) is list and isinstance(value, list):
        (inner,) = get_args(hint)
        return [_typed(inner, part, f"{name}[{i}]", place, kind) for i, part in enumerate(value)]
    if get_origin(hint) is dict and isinstance(value, dict):
        inner = get_args(hint)[1]
        return {key: _typed(inner, part, f"{name}.{key}".lstrip("."), place, kind) for key, part in value.items()}
    raise kind(f"{place}: {name or 'the document'} must be {_wanted(hint)}")


def _wanted(hint: Any) -> str:
    """An annotated type in words of JSON."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_wanted, inner))
    if origin is Literal:
        return " or ".join(map(str, inner))
    if is_dataclass(hint) or origin is dict:
        return "an object"
    return "a list" if origin is list else _WORDS.get(hint, str(hint))


def check_settings(values: Any, place: object, kind: type[DllpError] = ArtifactError) -> dict[str, Any]:
    """Raise unless settings, whoever wrote them, are names with single values or short lists of them."""
    if not isinstance(values, dict):
        raise kind(f"{place} holds no settings")
    for name, value in values.items():
        if not isinstance(name, str) or len(name) > 64:
            raise kind(f"{place}: {str(name)[:64]!r} is no name of a setting")
        entries = value if isinstance(value, list) else [value]
        if len(entries) > 8 or not all(map(_is_setting, entries)):
            raise kind(f"{place}: {name} must be a number, a word, or a short list of them")
    return values


def _is_setting(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= TEXT and (value.isprintable() or not value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return value is None or isinstance(value, float)
