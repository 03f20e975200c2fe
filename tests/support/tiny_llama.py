"""A Llama of five small layers with grouped queries and tied embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

hf: Any = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")


def llama() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)
