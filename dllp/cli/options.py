"""Options and settings files: every name and type checked, every mistake one line in the user's words."""

from dllp.cli.commands import OUT, ROUND_TO, TASK
from dllp.cli.parser import parse
from dllp.runs.settings import read, write

__all__ = ["OUT", "ROUND_TO", "TASK", "parse", "read", "write"]
