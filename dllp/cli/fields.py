"""Parsers, and options for the fields of a dataclass, explained by its docstring."""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from jsonargparse import ActionYesNo, ArgumentParser, DefaultHelpFormatter

from dllp import __version__
from dllp.config import types_of

SUITED = ("epochs", "batch_size", "init", "task")
"""Fields of Config whose default depends on data and network."""


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines; types are left to the examples, and defaults stand where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = any(action.default is value for value in (None, False, argparse.SUPPRESS)) or text.endswith("*)")
        return text if silent else text + " (default: %(default)s)"


def new_parser(command: str, description: str, epilog: str, **options: Any) -> ArgumentParser:
    options = {"version": __version__, **options} if "prog" in options else options
    return ArgumentParser(
        usage=f"dllp {command} [options]", description=description, epilog=epilog, formatter_class=_Help,
        exit_on_error=False, allow_abbrev=False, **options,
    )  # fmt: skip


def add_fields(group: Any, cls: type, names: Sequence[str], **override: Any) -> None:
    """An option for each named field of a dataclass, explained by its docstring."""
    types, texts = types_of(cls), _texts(cls)
    for field in fields(cls):
        if field.name not in names:
            continue
        text = texts[field.name] + (" (default: *)" if field.name in SUITED else "")
        options = {"default": field.default, "help": text, **override}
        flag, kind = "--" + field.name.replace("_", "-"), types[field.name]
        if is_switch(kind):
            group.add_argument(flag, action=ActionYesNo(no_prefix="no-"), **options)
        else:
            group.add_argument(flag, type=kind, metavar=_metavar(kind), **options)


def is_switch(kind: Any) -> bool:
    """Whether an option says yes or no, by its name alone, where something is said at all."""
    return kind is bool or bool in typing.get_args(kind)


def _metavar(kind: Any) -> str:
    """Choices as they are typed, and what kind of value anything else is."""
    words = {int: "N", float: "NUMBER", str: "TEXT", tuple[float, float]: "[LOW,HIGH]", type(None): ""}
    if isinstance(kind, str):
        return kind
    return words[kind] if kind in words else "|".join(filter(None, map(_metavar, typing.get_args(kind))))


def _texts(cls: type) -> dict[str, str]:
    """Field name -> its text in the docstring's Args; a field explained beside another one points there."""
    entries = re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12}.*)*)", cls.__doc__ or "", re.MULTILINE)
    own = {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
    for field in fields(cls):
        if field.name not in own:
            owner = next((name for name, text in own.items() if f"`{field.name}`" in text), "")
            own[field.name] = f"See --{owner.replace('_', '-')}."
    return own
