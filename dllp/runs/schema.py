"""Typed validation of what a file holds: JSON values against annotated types, dataclasses included.

    typed(EpochRecord, value, path)         a dataclass, made of an object
    typed(list[Size], value, path)          a list of them
    typed(dict[str, list[int]], value, path)

Every reader of JSON uses :func:`typed`, after :func:`dllp.files.parse_json` has seen to its form.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin

from dllp.config import fits, in_words, types_of
from dllp.errors import ArtifactError, DllpError

T = TypeVar("T")


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
    raise kind(f"{place}: {name or 'the document'} must be {in_words(hint)}")
