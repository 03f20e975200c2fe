"""Damage led by coverage: atheris mutates the files of one reader and keeps whatever reaches new code.

python tests/robustness/fuzz/harness.py READER FOLDER -runs=2000
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atheris

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

with atheris.instrument_imports(include=["dllp", "yaml", "json", "tarfile", "zipfile"]):
    from readers import readers


def main() -> None:
    name, folder, *options = sys.argv[1:]
    reader = next(r for r in readers(Path(folder) / "files") if r.name == name)
    corpus = Path(folder) / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(reader.seeds):
        (corpus / str(i)).write_bytes(seed)

    def one(content: bytes) -> None:
        reader.check(content)

    limits = ["-timeout=20", "-rss_limit_mb=4096", "-max_len=20000", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], str(corpus), *limits, *options], one)
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
