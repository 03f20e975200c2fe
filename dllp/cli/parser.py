"""The words of a command line as a command and what was given for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from dllp import files
from dllp.cli.commands import COMMANDS
from dllp.cli.fields import new_parser
from dllp.cli.mistakes import plain
from dllp.errors import ConfigError
from dllp.runs.pretrained import SUFFIXES

ABOUT = "Neural networks made small by Bayesian pruning, with a posterior that says how far to trust what is left."


def parse(words: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """The command, and what the user gave for it; nothing that was not given."""
    words = list(words)
    for word in words:
        files.check_name(word)
    parser = new_parser(
        ", ".join(COMMANDS), ABOUT, "`dllp COMMAND --help` explains a command and shows examples.", prog="dllp"
    )
    commands = parser.add_subcommands(dest="command", metavar="COMMAND", title="commands")
    for name, (command, about) in COMMANDS.items():
        commands.add_subcommand(name, command(), help=about)
    try:
        given = parser.parse_args(_weights([_dashed(word) for word in words]), defaults=False)
    except argparse.ArgumentError as error:
        named = next((word for word in words if word in COMMANDS), "prune")
        raise ConfigError(plain(str(error), named)) from None
    return given["command"], vars(given[given["command"]])


def _dashed(word: str) -> str:
    """--keep_flops=0.5 -> --keep-flops=0.5."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _weights(words: list[str]) -> list[str]:
    """--init FILE -> --weights FILE."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--init" and (value if equals else " ".join(words[i + 1 : i + 2])).endswith(SUFFIXES):
            words[i] = "--weights" + equals + value
    return words
