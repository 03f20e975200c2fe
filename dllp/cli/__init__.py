"""The command line: main, parser, displays, run folders, and the commands."""
