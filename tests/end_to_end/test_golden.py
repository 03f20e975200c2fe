"""Names and files that outlive every change of the code: digests, stored runs, the public API, help texts.

`python -m tests.end_to_end.test_golden` writes `golden/` again; a difference there is a decision, never an accident.
The run folder and the checkpoint in it were written by version 0.1.0 and are never made anew.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shutil
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dllp
from dllp import data as datasets
from dllp import zoo
from dllp.cli import main
from dllp.cli.parser import COMMANDS
from dllp.training.snapshot import fingerprint
from paper.tables import TABLES

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
OLD_RUN, OLD_CHECKPOINT = GOLDEN / "run-0.1.0", GOLDEN / "stopped-0.1.0"
DEMO = ["prune", "--data", "digits", "--model", "mlp", "--keep-flops", "0.3", "--epochs", "3", "--device", "cpu",
        "--particles", "2"]  # fmt: skip


def published_digests() -> dict[str, str]:
    """The digest of every job of every table, by table, row and seed."""
    return {f"{name}/{p.row.name}/{p.job.seed}": p.job.digest for name, table in TABLES.items() for p in table.plan()}


def public_names() -> list[str]:
    """The names that docs/reference.md promises."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    return re.findall(r"^### (dllp\.[\w.]+)$", text, re.MULTILINE)


def help_texts() -> dict[str, str]:
    """The --help of every command, in 100 columns."""
    found = {}
    for command in ("", *COMMANDS):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main.main([*([command] if command else []), "--help"])
        found[command] = out.getvalue()
    return found


def checkpoint_fingerprint() -> str:
    """The fingerprint of a run's checkpoints: configuration, shapes and size of the data."""
    found: list[str] = []
    config = dllp.Config(keep_flops=0.3, epochs=1, batch_size=16, particles=2, device="cpu")
    x, y = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    model = zoo.build("small_cnn", num_classes=10, in_channels=1)
    dllp.prune(model, (x, y), config, on_start=lambda run: found.append(fingerprint(run)))
    return found[0]


def outline(value: Any) -> Any:
    """A JSON value with numbers and lists replaced by their kind: machines differ in the last digits."""
    if isinstance(value, dict):
        return {key: outline(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [outline(value[0]), "..."] if value and not isinstance(value[0], str) else ["str"] if value else []
    return value if isinstance(value, bool) or value is None else type(value).__name__


def demo_files(folder: Path) -> dict[str, Any]:
    """config.yaml of a short run as it is written, and the outline of its run.json."""
    assert main.main([*DEMO, "--out", str(folder), "--quiet"]) == 0
    settings = (folder / "config.yaml").read_text(encoding="utf-8")
    return {"config.yaml": settings, "run.json": outline(json.loads((folder / "run.json").read_text(encoding="utf-8")))}


def read(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def test_the_digests_of_published_jobs_are_what_they_were() -> None:
    found = published_digests()
    assert {name: found.get(name) for name in read("digests.json")} == read("digests.json")


def test_a_checkpoints_fingerprint_is_what_it_was() -> None:
    assert checkpoint_fingerprint() == read("fingerprint.json")


def test_settings_and_record_of_a_run_are_what_they_were(tmp_path: Path) -> None:
    assert demo_files(tmp_path / "run") == read("demo.json")


def test_every_public_name_is_still_there() -> None:
    for name in read("names.json"):
        parts = name.split(".")
        module = next(size for size in range(len(parts), 0, -1) if _is_module(".".join(parts[:size])))
        assert callable(reduce(getattr, parts[module:], importlib.import_module(".".join(parts[:module]))))


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_help_texts_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert help_texts() == read("help.json")


def test_a_run_folder_of_version_0_1_0_is_read() -> None:
    settings = yaml.safe_load((OLD_RUN / "config.yaml").read_text(encoding="utf-8"))
    network = zoo.build(settings["model"], num_classes=10, in_channels=1, image_size=8)
    result = dllp.load(OLD_RUN, network)
    data = datasets.load("digits").test
    answers = result.posterior.predict(data.inputs(slice(0, 16))).mean.argmax(1)
    known = yaml.safe_load((OLD_RUN / "answers.json").read_text(encoding="utf-8"))
    assert answers.tolist() == known


def test_a_checkpoint_of_version_0_1_0_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(OLD_CHECKPOINT, tmp_path / "run"))
    assert main.main(["prune", "--resume", "--out", str(folder), "--quiet"]) == 0
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert len(run["history"]) == 4  # two of them from the checkpoint


def write() -> None:
    """Write all that can be made anew."""
    import os
    import tempfile

    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as folder:
        demo = demo_files(Path(folder) / "run")
    made = {
        "digests": published_digests(), "fingerprint": checkpoint_fingerprint(), "demo": demo,
        "help": help_texts(), "names": sorted({*read("names.json"), *public_names()}, key=str.lower),
    }  # fmt: skip
    for name, value in made.items():
        (GOLDEN / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
