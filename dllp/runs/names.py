"""The names of the files of a run folder.

.lock                         held by the process that works here; without meaning once that is gone
config.yaml                   every setting, written before the first step
checkpoints/TRAINING/step-*   the last two of each training, while it goes on
log.jsonl                     a line for each image that is left out, and for each epoch
particle-K.safetensors        M_p of particle K; single pruned weights are stored as positions and values
reference-K.safetensors       M_0 of particle K
gates.safetensors             gate logits, decisions, slab precisions, noise
dense.safetensors             the dense network that the run is compared with
evaluation.json               metrics of every network
examples.safetensors          predictions for single test examples
run.json                      format, configuration, recipes, costs, history; written last: the run is finished
speed.json, corruptions.json, report.html, tensorboard/    added by other commands
"""

from __future__ import annotations

from pathlib import Path

from dllp import files

LOCK, SETTINGS, CHECKPOINTS, LOG, RUN = ".lock", "config.yaml", "checkpoints", "log.jsonl", "run.json"
GATES, DENSE, EXAMPLES = "gates.safetensors", "dense.safetensors", "examples.safetensors"
EVALUATION, SPEED, CORRUPTIONS = "evaluation.json", "speed.json", "corruptions.json"
PAGE, TENSORBOARD = "report.html", "tensorboard"
OWN = (
    LOCK, SETTINGS, CHECKPOINTS, LOG, RUN, GATES, DENSE, EXAMPLES, EVALUATION, SPEED, CORRUPTIONS, PAGE, TENSORBOARD,
    "particle-*.safetensors", "reference-*.safetensors", ".*.tmp",
)  # fmt: skip
"""Patterns of all of them; an unfinished run's folder with any other file in it is never replaced."""


def particle(k: int) -> str:
    """File of M_p, the extracted network of particle k."""
    return f"particle-{k}.safetensors"


def reference(k: int) -> str:
    """File of M_0, particle k in its full shape."""
    return f"reference-{k}.safetensors"


def member(folder: Path, name: str) -> Path:
    """A file of a run folder; a link that leads out of the folder is an error."""
    return files.contained(folder, folder / name)
