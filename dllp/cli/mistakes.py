"""One line for every mistake, in the user's words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from dllp.cli.commands import COMMANDS
from dllp.runs.pretrained import SUFFIXES

_KINDS = {
    "<class 'int'>": "a whole number", "<class 'float'>": "a number", "<class 'str'>": "text",
    "<class 'tuple'>": "two numbers such as [0.3,30]",
}  # fmt: skip


def plain(message: str, command: str = "prune") -> str:
    """A parser's message about a command as one line in the user's words; settings files are those of `prune`."""
    unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
    if unknown:
        options = {name: list(parser()._option_string_actions) for name, (parser, _) in COMMANDS.items()}
        owners = [name for name, flags in options.items() if unknown[1] in flags]
        if owners:
            return f"{unknown[1]} is an option of dllp {', '.join(owners)}, not of this command: leave it out"
        return f"unknown option {unknown[1]}{near(unknown[1], options[command], command)}"
    if message.startswith("unrecognized arguments: "):
        return f"{message.removeprefix('unrecognized arguments: ')} is too much: see the command with --help"
    key = re.match(r'Parser key "(\w+)"(?: element \d+)?:', message)
    if not key:
        message = re.sub(r"(evaluate|analyze|report|export|speed)\.folders?", "the run folder", message)
        return message.replace("bench.name", "the table's name").replace("export.out", "--out FILE")
    kinds: list[str] = re.findall(r"Expected (?:an? )?(typing\.Literal\[.*?\]|<class '\w+'>)", message)
    words = [_KINDS.get(kind) or kind.removeprefix("typing.Literal").strip("[]").replace("'", "") for kind in kinds]
    wanted = [word for word in words if not word.startswith("<")]
    if key[1] == "init":
        wanted.append(f"a file of trained weights ({', '.join(SUFFIXES)}; in a settings file that is `weights`)")
    value = re.search(r"(?:Got|Given) value: (.*)\Z", message)
    return f"{key[1]} = {value[1] if value else '?'}: expected {' or '.join(dict.fromkeys(wanted))}"


def near(name: str, known: Sequence[str], command: str = "prune") -> str:
    """What ends a message about an unknown name: the known one that it may have been meant for, or where all are."""
    bare = {each.lstrip("-"): each for each in known}  # the dashes that all options have make none of them alike
    found = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    return f": did you mean {bare[found[0]]}?" if found else f": see dllp {command} --help"
