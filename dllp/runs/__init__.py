"""Run folders on disk, the only room that knows file names and formats; and many runs handed out to workers."""
