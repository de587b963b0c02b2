"""A model that vLLM loads in seconds: SmolLM2's tokenizer, and random weights."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers  # its classes are imported when they are used
from benchmarks.peers.checkpoint import model_file

VOCABULARY = 49152
CONTEXT = 1024


def save_tiny_model(folder: Path) -> str:
    """Write a checkpoint of two layers; returns its path."""
    source = model_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
