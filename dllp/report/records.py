"""Records out of JSON files by anyone, as the dataclasses that wrote them: every field of the right kind."""

from __future__ import annotations

import math
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dllp.errors import ArtifactError

T = TypeVar("T")


def records(cls: type[T], values: Any, path: Path, drop: tuple[str, ...] = ()) -> list[T]:
    """A list of records without the fields in `drop`, or an ArtifactError that names the file and the field."""
    if not isinstance(values, list):
        raise ArtifactError(f"{path}: a list of records is needed")
    return [_record(cls, value, path, drop) for value in values]


def _record(cls: type[T], value: Any, path: Path, drop: tuple[str, ...]) -> T:
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: a record is no mapping")
    try:
        made = cls(**{name: part for name, part in value.items() if name not in drop})
    except TypeError as error:
        raise ArtifactError(f"{path}: a record is not of this version ({error})") from None
    for name, hint in get_type_hints(cls).items():
        if not fits(getattr(made, name), hint):
            raise ArtifactError(f"{path}: {name!r} of a record is of the wrong kind")
    return made


def fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has an annotated type; whole numbers are floats too, and every number is finite."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(fits(value, part) for part in inner)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(fits(part, inner[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(k, str) and fits(v, inner[1]) for k, v in value.items())
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint
