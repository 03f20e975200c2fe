"""Cut networks of Hugging Face: plain folders that `from_pretrained` reads, and ONNX files with PyTorch's answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import dllp
from dllp.deploy import export, hugging_face
from dllp.errors import ConfigError, ExportError
from dllp.structure.groups import discover
from dllp.structure.select import select
from dllp.structure.slicing import cut, recipe
from tests.support import networks
from tests.support.particles import random_keep

transformers: Any = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
TOKENS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
SIZES = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


def bert(layers: int = 2) -> nn.Module:
    config = transformers.BertConfig(**SIZES | {"num_hidden_layers": layers}, max_position_embeddings=16)
    return transformers.BertForSequenceClassification(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def phi3() -> nn.Module:
    """Queries, keys and values in one projection, whose parts are computed from the configuration."""
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0))


def gpt2() -> nn.Module:
    """The width of its neurons is four times its own unless the configuration gives another."""
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"} | {"num_hidden_layers": 1}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))


def evenly_cut(make: Callable[[], nn.Module], keep: float = 0.5) -> tuple[nn.Module, nn.Module]:
    """A network and its even cut."""
    model = make().eval()
    structure = discover(model, TOKENS, even=True)
    logits = torch.randn(structure.units, generator=torch.Generator().manual_seed(1))
    kept = select(structure, logits, cost=structure.flops, keep=keep)
    return model, cut(model, recipe(model, structure.groups, kept)).eval()


@pytest.mark.parametrize("make", [bert, llama, phi3, gpt2])
@torch.no_grad()
def test_an_even_cut_is_a_folder_that_from_pretrained_reads(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, small = evenly_cut(make)
    size = hugging_face.write(small, model, tmp_path / "small", TOKENS)
    assert size == sum(file.stat().st_size for file in (tmp_path / "small").iterdir())
    loaded = type(model).from_pretrained(tmp_path / "small").eval()  # type: ignore[attr-defined]
    assert torch.equal(loaded(TOKENS).logits, small(TOKENS).logits)
    config = loaded.config
    assert 8 * config.num_attention_heads == config.hidden_size < 32
    assert config.num_hidden_layers == 2  # though the width that was cut can be divided by it as by the heads
    assert config.eos_token_id == model.config.eos_token_id  # type: ignore[union-attr]


def test_an_uneven_cut_is_refused_by_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    model = bert()
    structure = discover(model, TOKENS)
    small = cut(model, recipe(model, structure.groups, random_keep(structure.groups, 0))).eval()
    with pytest.raises(ExportError, match=r"no single config\.json.*dllp\.load.*even = True"):
        hugging_face.write(small, model, tmp_path / "small", TOKENS)
    assert not list(tmp_path.iterdir())


def test_other_networks_have_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Linear has no save_pretrained"):
        hugging_face.write(nn.Linear(2, 2), nn.Linear(2, 2), tmp_path / "small", torch.zeros(1, 2))


def test_a_run_is_exported_by_its_result(tmp_path: Path) -> None:
    config = dllp.Config(keep_flops=0.6, epochs=0, batch_size=2, device="cpu", even=True, optimizer="adamw")
    result = dllp.prune(bert(1), {"input_ids": TOKENS, "labels": torch.tensor([0, 1])}, config, progress=False)
    done = result.export(tmp_path / "small", format="huggingface")
    assert (done.format, done.difference, done.path) == ("huggingface", 0.0, tmp_path / "small")
    with pytest.raises(dllp.ArtifactError, match="holds other files"):
        result.export(tmp_path / "small", format="huggingface")
    with pytest.raises(ConfigError, match="as it is"):
        result.export(tmp_path / "other", format="huggingface", pad_to=8)


# ---- ONNX


def cases() -> dict[str, tuple[Callable[[], nn.Module], Tensor]]:
    return {
        "bert": (lambda: bert(1), TOKENS),
        "vit": (vit, torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))),
        "shuffled": (
            lambda: networks.between(networks.shuffle),
            torch.randn(2, 3, 8, 8),
        ),  # a view with sizes of its own
    }


@pytest.mark.parametrize("name", cases())
@torch.no_grad()
def test_a_cut_network_answers_in_onnxruntime_as_in_pytorch(name: str, tmp_path: Path) -> None:
    make, x = cases()[name]
    model = make().eval()
    structure = discover(model, x)
    small = cut(model, recipe(model, structure.groups, random_keep(structure.groups, 1))).eval()
    path = tmp_path / "small.onnx"
    export.write(small, path, x, "onnx")
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    for inputs in (x, x[:1]):
        (found,) = session.run(None, {export.INPUT: inputs.numpy()})
        wanted = small(inputs)
        torch.testing.assert_close(torch.from_numpy(found), getattr(wanted, "logits", wanted), atol=1e-5, rtol=1e-4)
