"""Options and settings files: every name and type checked, every mistake one line in the user's words."""

from dllp.options.commands import OUT, ROUND_TO, TASK
from dllp.options.settings import read, write
from dllp.options.words import parse

__all__ = ["OUT", "ROUND_TO", "TASK", "parse", "read", "write"]
