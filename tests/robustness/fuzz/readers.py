"""Every reader of files from strangers, with whole files to start from."""

from __future__ import annotations

from pathlib import Path

import torch
from data_readers import arrays, cifar, images, shards
from reader import Reader
from run_readers import reports, results, run_folders
from start_readers import restarts, settings, starts


def readers(root: Path) -> list[Reader]:
    """All of them, with their files under `root`."""
    torch.manual_seed(0)
    return [
        *run_folders(root / "runs"), *settings(root / "settings"), *arrays(root / "arrays"), *cifar(root / "cifar"),
        *images(root / "images"), *shards(root / "shards"), *starts(root / "weights"),
        *results(root / "results"), *restarts(root / "checkpoints"),
        *reports(root / "reports"),
    ]  # fmt: skip
