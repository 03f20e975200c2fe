"""The command line: one file a command."""

from dllp.runs.signals import while_loading

while_loading()  # before what takes seconds to load
