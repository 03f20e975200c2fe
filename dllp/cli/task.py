"""Names of files that are moving to `dllp.runs`."""

SETTINGS, DENSE_FILE = "config.yaml", "dense.safetensors"
