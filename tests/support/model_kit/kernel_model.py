"""A small Llama on the GPU kernels, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych_engine.models import CausalLM, build_model, linear, llama
from diptych_frontend.model_files.model_config import ModelConfig
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_kernels.paged_attention import triton as paged_attention
from diptych_kernels.rms_norm import triton as rms_norm
from diptych_kernels.rope_kv_write import reference as rope_kv_write_reference
from diptych_kernels.rope_kv_write import triton as rope_kv_write
from diptych_kernels.silu_mul import triton as silu_mul

BLOCK_SIZE = 8
CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "architecture": "gemma3_text",
        "qk_norm": True,
        "sliding_window": 9,
        "full_layers": (1,),
        "window_rope_theta": 1000.0,
        "attention_scale": 0.2,
        "embedding_scale": 5.0,
    },
    "gemma2": {"architecture": "gemma2", "attention_softcap": 2.0, "logits_softcap": 1.0},
    "gpt_oss": {
        "architecture": "gpt_oss",
        "attention_bias": True,
        "sliding_window": 9,
        "full_layers": (1,),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "parts of heads, a layer without RoPE": {"rotary_dim": 6, "unrotated_layers": (1,)},
    "norms of heads, biases, a window": {
        "qk_norm": True,
        "attention_bias": True,
        "sliding_window": 9,
    },
}


def config(**options: Any) -> ModelConfig:
    return ModelConfig(
        **{"architecture": "llama", **options}, vocab_size=50, hidden_size=24, intermediate_size=40,
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=12,
        max_position_embeddings=64,
    )  # fmt: skip


def make_model(
    model_config: ModelConfig,
    device: torch.device,
    positions: int,
    group_of: Sequence[int] = (),
) -> CausalLM:
    torch.manual_seed(0)
    model = build_model(model_config, positions, torch.float32, device, group_of=group_of)
    for tensor in dict(model.named_parameters()).values():
        tensor.copy_(torch.randn(tensor.shape) / tensor.shape[0] ** 0.5)
    return model


def make_cache(device: torch.device, num_blocks: int) -> tuple[Tensor, ...]:
    """The caches of two layers."""
    return torch.zeros(num_blocks, 2, 2, BLOCK_SIZE, 2, 12, device=device).unbind(1)


def attend(
    queries: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    *,
    may_round: bool,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    """Triton's kernel rounds nothing but what it is given in."""
    return paged_attention.paged_attention(
        queries, kv_layer, metadata, sinks=sinks, softcap=softcap
    )


def choose_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model use them where it would not by itself."""
    if device != CPU:
        return
    for name, module in (
        ("rms_norm", rms_norm),
        ("rope_kv_write", rope_kv_write),
    ):
        monkeypatch.setattr(llama, name, getattr(module, name))
    monkeypatch.setattr(linear, "silu_mul", silu_mul.silu_mul)
    monkeypatch.setattr(rope_kv_write_reference, "rms_norm", rms_norm.rms_norm)  # of heads
    monkeypatch.setattr(llama, "paged_attention", attend)
