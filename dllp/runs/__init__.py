"""Run folders on disk: the only room that knows file names and formats."""
