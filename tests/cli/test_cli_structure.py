"""`dllp structure`: costs by kind of unit, against closed forms, for images, tables and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor, nn

from dllp.cli.main import main
from tests.support.commands import one_line


class TokenMixer(nn.Module):
    """Two heads of four dimensions over embeddings that a layer norm precedes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.heads = 2
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(x.mean(1))


def token_mixer() -> nn.Module:
    return TokenMixer()


def test_costs_by_kind_are_those_of_the_cut_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "structure.json"
    assert main(["structure", "--model", "small_cnn", "--data", "digits", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    report = json.loads(out.read_text())
    # 3x3 convolutions of 1-32-64-64 channels on 8x8 pixels, the last after a pooling, and a classifier of 10 outputs
    assert report["macs"] == 9 * (64 * 32 + 64 * 32 * 64 + 16 * 64 * 64) + 640
    assert report["least"]["macs"] * report["macs"] == pytest.approx(9 * (64 + 64 + 16) + 10)
    assert [group["units"] for group in report["groups"]] == [32, 64, 64] and list(report["kinds"]) == ["channel"]
    assert report["groups"][0]["least"]["macs"] * report["macs"] == report["macs"] - 9 * 31 * (64 + 64 * 64)
    assert list(report["whole"]) == ["classifier"] and "the network's outputs" in shown and "99.9%" in shown


def test_heads_and_widths_of_a_network_on_tokens(tmp_path: Path) -> None:
    out = tmp_path / "structure.json"
    words = ["--model", f"{__name__}:token_mixer", "--tokens", "5", "--json", str(out), "--quiet"]
    assert main(["structure", *words]) == 0
    report = json.loads(out.read_text())
    # four 8x8 maps of five tokens, two products of 5x5 scores with 8 dimensions, and 3 outputs
    assert report["macs"] == 5 * 4 * 64 + 2 * 25 * 8 + 24
    kinds = {kind: (found["groups"], found["units"]) for kind, found in report["kinds"].items()}
    assert kinds["head"] == (1, 2) and kinds["width"] == (1, 8)
    assert report["kinds"]["head"]["least"]["macs"] * report["macs"] == 5 * 4 * 32 + 25 * 8 + 24


def test_an_input_is_described_once_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--shape", "3", "8", "8", "--data", "digits"], "give one of them"),
        (["--tokens", "4"], "small_cnn takes no tokens"),
        (["--model", f"{__name__}:token_mixer", "--shape", "3", "8", "8"], "cannot take inputs of shape"),
    ):
        assert main(["structure", *words]) == 2
        one_line(capsys, said)


def test_branches_are_a_kind_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "structure.json"
    assert main(["structure", "--model", "resnet20", "--shape", "3", "32", "32", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    # three blocks in each of three stages, of which the first in two of them changes the shape: 7 of two convolutions
    macs = 9 * 2 * (3 * 16 * 16 * 32**2 + 2 * 32 * 32 * 16**2 + 2 * 64 * 64 * 8**2)
    assert report["kinds"]["branch"]["groups"] == 7
    assert (1 - report["kinds"]["branch"]["least"]["macs"]) * report["macs"] == pytest.approx(macs)
    assert "branch" in capsys.readouterr().out
