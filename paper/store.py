"""The results folder of a table: finished jobs, in a form that a crash cannot spoil.

    runs.jsonl                  one line for each finished job, and marks of superseded ones; only ever appended to
    probabilities/DIGEST.npz    (n, B, C) test probabilities on each version of the test set, and the labels (B,);
                                `ood:NAME` are out-of-distribution inputs, as many as there are and without labels
    figures.jsonl               metrics computed from probabilities, one line for each job
    .lock                       held by the process that appends; without meaning otherwise

A job is named by its digest; what has a line is finished and is never run again. No line is edited or removed: the
latest line of a digest counts, and a mark, `{"superseded": DIGEST, "why": TEXT}`, takes back all lines of that digest
before it, so that the job is unfinished until a line follows.
"""

from __future__ import annotations

import bz2
import io
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock

from dllp import files
from dllp.data import npy
from dllp.errors import ArtifactError
from paper.provenance import now

RUNS, FIGURES, PROBABILITIES, LOCK = "runs.jsonl", "figures.jsonl", "probabilities", ".lock"
CLEAN, OUTSIDE, LABELS = "clean", "ood:", "labels"
"""Arrays of probabilities: those of the clean test set, what names of out-of-distribution inputs begin with, labels."""
RUNS_BYTES, ARRAYS_BYTES, MOST_ARRAYS = 2**28, 2**31, 64
SUPERSEDED, WHY = "superseded", "why"
"""Keys of a mark: the job that no longer counts, by digest and seed, and the reason."""
UNKNOWN = {"commit": None, "dirty": None, "deterministic": None}
"""Provenance of a line that was written before lines had any."""
DIGEST = re.compile(r"\w{1,64}")
"""A digest names a file: nothing else may stand there."""


class Store:
    """Finished jobs of one table; several processes may share it.

    Args:
        folder: Where they lie.
        sources: Other tables' stores, whose jobs need not be run again here.
        note: Provenance of metrics and marks, added to their lines; a job's line brings its own.
    """

    def __init__(self, folder: Path, sources: Sequence[Store] = (), note: Mapping[str, Any] | None = None) -> None:
        self.folder, self.sources, self.note = folder, sources, note or {}
        self.runs, self.measured = folder / RUNS, folder / FIGURES

    def lines(self) -> list[dict[str, Any]]:
        """Every finished job by its latest line, in the order of finishing; a torn last line is none."""
        return [line for line in latest(_lines(self.runs)).values() if line is not None]

    def digests(self) -> set[str]:
        """Names of the finished jobs."""
        return {line["digest"] for line in self.lines()}

    def adoptable(self) -> set[str]:
        """Names of the jobs that a source has finished, without those that are superseded here."""
        superseded = {digest for digest, line in latest(_lines(self.runs)).items() if line is None}
        return {digest for source in self.sources for digest in source.digests()} - superseded

    def adopt(self, wanted: Mapping[str, bool]) -> None:
        """Take over the lines of such jobs that a source has and this table lacks; their arrays stay where they are.

        Args:
            wanted: Digest -> whether what the job predicted is needed too, as arrays or as figures.
        """
        adoptable = self.adoptable()
        for source in self.sources:
            missing = (wanted.keys() & adoptable) - self.digests()
            for line in source.lines() if missing else ():
                digest = line["digest"]
                if digest in missing and (not wanted[digest] or source._predicted(digest)):
                    self.add({**UNKNOWN, **line, "from": source.folder.name})

    def supersede(self, digest: str, why: str) -> None:
        """Take back what is known of a job, so that it runs again; its lines stay in the file."""
        self._append(self.runs, {SUPERSEDED: digest, WHY: why, "date": now(), **self.note})

    def add(self, line: Mapping[str, Any], probabilities: Mapping[str, np.ndarray] | None = None) -> bool:
        """A job is finished. Its probabilities are stored first: the line says that everything is there.

        Returns False, and leaves everything as it is, where another process has finished the same job meanwhile.

        Args:
            line: Plain values with the job's `digest`; numbers that are not finite become null.
            probabilities: (n, B, C) by version of the test set, and `labels` (B,).
        """
        place, arrays = self._arrays(line["digest"]), pack(probabilities) if probabilities else None
        return self._append(self.runs, line, (lambda: files.write_bytes(place, arrays)) if arrays else None, once=True)

    def figures(self, digest: str, date: str | None) -> dict[str, Any] | None:
        """The metrics of a job's probabilities, here or in a source; None where there are none.

        `date` tells runs of the same job apart.
        """
        for store in (self, *self.sources):
            for line in reversed(_lines(store.measured)):
                if (line.get("digest"), line.get("date")) == (digest, date):
                    return line
        return None

    def add_figures(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Append the metrics of a job's probabilities."""
        self._append(self.measured, {**line, **self.note})
        return dict(_finite(line))

    def forget(self, digest: str) -> None:
        """Remove a job's probabilities."""
        self._arrays(digest).unlink(missing_ok=True)

    def _append(
        self, path: Path, line: Mapping[str, Any], first: Callable[[], None] | None = None, *, once: bool = False
    ) -> bool:
        """Add a line to a file, `once` for each digest; `first` is done before, so that both are of one run."""
        text = json.dumps(_finite(line), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / LOCK), open(path, "a+b") as file:
                present = _mend(file)
                if once and latest(present).get(line["digest"]) is not None:
                    return False
                if first is not None:
                    first()
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                return True
        except OSError as error:
            raise ArtifactError(f"cannot write {path}: {error.strerror}; free some space and go on") from None

    def _predicted(self, digest: str) -> bool:
        return self._arrays(digest).exists() or any(line.get("digest") == digest for line in _lines(self.measured))

    def probabilities(self, digest: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """(n, B, C) float64 probabilities by version of the test set, each summing to 1, and labels (B,)."""
        held = [store._arrays(digest) for store in (self, *self.sources)]
        path = next((path for path in held if path.exists()), None)
        if path is None:
            where = f"{self.measured} holds no figures of that run either"
            raise ArtifactError(f"{held[0]} is missing, and {where}: {_way(digest)}")
        with files.open_plain(path) as file:
            try:
                stored = unpack(file)
                labels = stored.pop(LABELS)
                labelled = [value for name, value in stored.items() if not name.startswith(OUTSIDE)]
                if not labelled or any(value.shape[1] != len(labels) for value in labelled):
                    raise ValueError("no probabilities for the labels")
            except Exception as error:  # a damaged archive can raise almost anything
                raise ArtifactError(f"{path} is damaged ({error}): {_way(digest)}") from None
        wide = {name: value.astype(np.float64) for name, value in stored.items()}
        return {name: value / value.sum(-1, keepdims=True) for name, value in wide.items()}, labels.copy()

    def _arrays(self, digest: str) -> Path:
        return self.folder / PROBABILITIES / f"{digest}.npz"


def latest(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """Lines in the order of a file -> the one that counts of each digest, in that order; None after a mark."""
    found: dict[str, dict[str, Any] | None] = {}
    for line in lines:
        marked = line.get(SUPERSEDED)
        found.pop(marked or line["digest"], None)
        found[marked or line["digest"]] = None if marked else line
    return found


def _way(digest: str) -> str:
    mark = json.dumps({SUPERSEDED: digest, WHY: "its predictions are lost"})
    return f"append the line {mark} to {RUNS}, and its job runs again"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, marks included; a torn last line is none."""
    if not path.exists():
        return []
    found = []
    *whole, last = files.read_bytes(path, RUNS_BYTES).split(b"\n")
    for number, text in enumerate(whole, start=1):
        line = _parse(text)
        if line is not None:
            found.append(line)
        elif text.strip():
            raise ArtifactError(f"{path}, line {number} is damaged: remove the line, and its job runs again")
    line = _parse(last)
    return found if line is None else [*found, line]


def pack(probabilities: Mapping[str, np.ndarray]) -> bytes:
    """An .npz that numpy.load reads: bzip2 in place of deflate, a fifth smaller on such numbers; no dates in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_BZIP2) as archive:
        for name, value in probabilities.items():
            member = io.BytesIO()
            if name == LABELS:  # in as few bytes as they need: one for up to 256 classes
                value = value.astype(np.min_scalar_type(int(value.max(initial=0))))
            np.lib.format.write_array(member, value if name == LABELS else shortened(value))
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = zipfile.ZIP_BZIP2
            archive.writestr(entry, member.getvalue())
    return buffer.getvalue()


def unpack(file: BinaryIO) -> dict[str, np.ndarray]:
    """Inverse of :func:`pack` for files by anyone: sizes and shapes are checked before a member is unpacked."""
    result: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > MOST_ARRAYS or sum(member.file_size for member in members) > min(ARRAYS_BYTES, files.cap()):
            raise ValueError("too many arrays, or too large ones")
        for member in members:
            name = member.filename.removesuffix(".npy")
            content = _unpacked(file, member)
            stream = io.BytesIO(content)
            shape, dtype, fortran = npy.read_header(stream, len(content), name)
            wanted = ("u", 1) if name == LABELS else ("f", 3)
            if (dtype.kind, len(shape)) != wanted or name in result or fortran or 0 in shape:
                raise ValueError(f"{name} holds {dtype} of shape {shape}")
            result[name] = np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape)
            if not np.isfinite(result[name]).all() or (name != LABELS and result[name].min() <= 0):
                raise ValueError(f"{name} holds numbers that are no probabilities")
    return result


def _unpacked(file: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """A member's content; zipfile itself would unpack whatever comes, and only then look at the size."""
    file.seek(member.header_offset)
    start = file.read(30)
    if len(start) != 30 or start[:4] != b"PK\x03\x04" or member.compress_type != zipfile.ZIP_BZIP2:
        raise ValueError("not an archive of ours")
    file.seek(int.from_bytes(start[26:28], "little") + int.from_bytes(start[28:30], "little"), os.SEEK_CUR)
    content = bz2.BZ2Decompressor().decompress(file.read(member.compress_size), member.file_size + 1)
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise ValueError("its content does not fit its checksum")
    return content


def shortened(probabilities: np.ndarray) -> np.ndarray:
    """float16 with only the bits that a metric feels: all from 1/16 up, two below, one below 1/256; at least 2^-22.

    That takes half the space of plain float16. Rounding errors of small probabilities are random and average out over
    a test set: NLL, ECE and mutual information of 10,000 clean images move by 1e-4 to 5e-4, accuracy by an image
    or none, whose best classes are nearly equal.
    """
    wide = probabilities.astype(np.float64)
    mantissa, exponent = np.frexp(wide)
    levels = np.where(wide < 1 / 256, 4, 8)
    rounded = np.where(wide < 1 / 16, np.ldexp(np.rint(mantissa * levels) / levels, exponent), wide)
    return np.maximum(rounded, 2.0**-22).astype(np.float16)


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = files.parse_json(text, RUNS)
    except ArtifactError:
        return None
    if not isinstance(line, dict) or not _printable(line):
        return None
    mark, why, digest, seed = (line.get(name) for name in (SUPERSEDED, WHY, "digest", "seed"))
    if mark is not None:
        return line if isinstance(mark, str) and isinstance(why, str) and DIGEST.fullmatch(mark) else None
    fits = isinstance(digest, str) and DIGEST.fullmatch(digest) and type(seed) is int and -(2**63) <= seed < 2**63
    return line if fits else None


def _printable(value: Any) -> bool:
    """No control character in any text, which tables show on a terminal."""
    if isinstance(value, str):
        return value.isprintable()
    parts = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_printable, parts))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _mend(file: BinaryIO) -> list[dict[str, Any]]:
    """Make the file end at the end of a line; returns its lines."""
    file.seek(0)
    content = file.read()
    last = content[content.rfind(b"\n") + 1 :]
    if last and _parse(last) is None:
        file.truncate(len(content) - len(last))
    elif last:
        file.write(b"\n")
        file.flush()
    return [line for text in content.split(b"\n") if (line := _parse(text)) is not None]
