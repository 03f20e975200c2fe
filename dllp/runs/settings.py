"""Settings files, such as a run folder's config.yaml: every name and type checked."""

from __future__ import annotations

import argparse
import re
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from dllp import files
from dllp.cli.commands import TASK, prune
from dllp.cli.fields import is_switch
from dllp.cli.mistakes import near, plain
from dllp.cli.task import Task
from dllp.config import Config, types_of
from dllp.errors import ConfigError

FREE = ("data", "data_root", "model", "weights", "device", "leave_out", "method")
"""Settings whose text may hold anything; all others are words and numbers."""
SETTINGS_BYTES = 2**16


def read(path: Path) -> dict[str, Any]:
    """A settings file such as a run folder's config.yaml: fields of Task and Config by name."""
    content = files.read_bytes(path, SETTINGS_BYTES, ConfigError)
    try:
        values = yaml.load(content, _PlainLoader)  # noqa: S506 # nosec B506
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is not plain YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: lines such as `epochs: 60` are needed")
    files.check_settings(values, path, ConfigError)
    named = {name.replace("-", "_"): value for name, value in values.items()}
    for name, value in named.items():
        if isinstance(value, str) and name not in FREE and not re.fullmatch(r"[\w.+%-]{0,64}", value):
            raise ConfigError(f"{path}: {name} = {value[:64]!r} is neither a word nor a number")
    known = (*TASK, *(field.name for field in fields(Config)))
    for name in named:
        if name not in known:
            raise ConfigError(f"{path}: unknown name {name!r}{near(name, known)}")
    hints = {**types_of(Task), **types_of(Config)}
    for name, value in named.items():
        if is_switch(hints[name]) and value is not None and not isinstance(value, bool):
            raise ConfigError(f"{path}: {name} = {value}: expected true or false")
    try:
        read = vars(prune().parse_object(named, defaults=False))
        for name, value in read.items():
            if value is None and type(None) not in typing.get_args(hints[name]):  # the parser takes it for "not given"
                raise ConfigError(f"{name} has no value")
        own = {name: read[name] for name in TASK if name in read}
        Task(**own).config({name: value for name, value in read.items() if name not in TASK})
    except (argparse.ArgumentError, ConfigError) as error:
        raise ConfigError(f"{path}: {plain(str(error))}") from None
    return read


class _PlainLoader(yaml.SafeLoader):
    """Less than a SafeLoader: no tags, nothing that repeats or merges other parts, little nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor or getattr(event, "tag", None):
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has a tag, an anchor or an alias")
        self.depth += 1
        if self.depth > 4:
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} is nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name == "<<":
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} merges another part")
            if name in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} gives {name[:64]} a second time")
            seen.add(name)
        return super().construct_mapping(node, deep)


def write(task: dict[str, Any], config: Config) -> bytes:
    """The text of a settings file that makes the same run again."""
    return yaml.safe_dump(task | config.as_dict(), sort_keys=False).encode()
