"""Transformers of Hugging Face as people have them: pruned in heads, neurons and width, loaded again, and decoded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import dllp

transformers: Any = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
WORDS, LENGTH = 50, 12


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def llama() -> nn.Module:
    """Grouped queries: two key and value heads for four query heads."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """One projection for queries, keys and values, which it splits by an attribute; absolute positions."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [bert, llama, gpt2])
def test_a_run_from_start_to_loaded_network(make: Any, tmp_path: Path) -> None:
    tokens = torch.randint(3, WORDS, (64, LENGTH))
    labels = tokens[:, 0] % 3 if make is bert else tokens
    model = make()
    config = dllp.Config(keep_flops=0.4, epochs=1, batch_size=32, optimizer="adamw", device="cpu")
    result = dllp.prune(model, {"input_ids": tokens, "labels": labels}, config, progress=False)
    assert 0.395 * result.dense.macs < result.sizes[0].macs <= 0.4 * result.dense.macs
    kept = {name: counts[0] / counts[-1] for name, counts in result.widths.items()}
    assert min(kept.values()) < 1 and any("attn" in name or "attention" in name for name in kept)
    result.save(tmp_path / "run")
    again = dllp.load(tmp_path / "run", make()).model
    with torch.no_grad():
        assert torch.equal(result.model(input_ids=tokens).logits, again(input_ids=tokens).logits)
    if make is not bert:
        decode(result.model, tokens[:4])
        padded(result.model, tokens[:2])


def test_whole_layers_of_bert_go_and_all_that_follows_works(tmp_path: Path) -> None:
    """Trained, loaded and exported with masks of tokens: several inputs by name."""
    torch.manual_seed(0)
    tokens = torch.randint(3, WORDS, (64, LENGTH))
    inputs = {"input_ids": tokens, "attention_mask": (torch.arange(LENGTH) < 4 + torch.arange(64)[:, None] % 9).long()}
    config = dllp.Config(keep_flops=0.2, units="both", epochs=2, batch_size=16, optimizer="adamw", device="cpu")
    result = dllp.prune(bert(), inputs | {"labels": tokens[:, 0] % 3}, config, progress=False)
    assert 0.195 <= result.sizes[0].macs / result.dense.macs <= 0.2
    gone = {name: e for name, entries in result.particles[0].recipe.items() for e in entries if e.startswith("!")}
    for i, kind in itertools.product(range(2), ("", ".attention")):
        name = f"bert.encoder.layer.{i}{kind}"
        inside = {f"{name}.self": "!returns [0, null]"} if kind else {f"{name}.intermediate": "!identity"}
        inside[f"{name}.output.dense"] = "!zeros"
        closed = result.widths[name] == [0, 1]
        assert {n: e for n, e in gone.items() if n in inside} == (inside if closed else {})
    assert gone
    result.save(tmp_path / "run")
    again = dllp.load(tmp_path / "run", bert())
    with torch.no_grad():
        expected = result.model(**inputs).logits
        assert torch.equal(again.model(**inputs).logits, expected)
    with pytest.raises(dllp.ConfigError, match="give example="):
        again.export(tmp_path / "small.onnx")
    assert again.export(tmp_path / "small.onnx", example=inputs).difference < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)
    assert again.export(tmp_path / "small.pt2", example=inputs).difference < 1e-5


@torch.no_grad()
def decode(model: Any, tokens: torch.Tensor) -> None:
    """A step of decoding with cached keys and values is the last of a whole forward, and greedy words are the same."""
    whole = model(input_ids=tokens, use_cache=False).logits
    past = model(input_ids=tokens[:, :8], use_cache=True).past_key_values
    for i in range(8, LENGTH):
        found = model(input_ids=tokens[:, i : i + 1], past_key_values=past, use_cache=True)
        torch.testing.assert_close(found.logits[:, 0], whole[:, i], rtol=1e-5, atol=1e-6)
        past = found.past_key_values
    words = [model.generate(tokens[:1], max_new_tokens=16, do_sample=False, use_cache=c) for c in (True, False)]
    assert torch.equal(*words) and words[0].shape[1] > LENGTH


@torch.no_grad()
def padded(model: Any, tokens: torch.Tensor) -> None:
    """With a mask keys are repeated by an attribute, which a forward without one does not read."""
    mask = torch.ones_like(tokens)
    mask[:, :4] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=False).logits[:, 4:]
    torch.testing.assert_close(found, model(input_ids=tokens[:, 4:], use_cache=False).logits, rtol=1e-4, atol=1e-5)
