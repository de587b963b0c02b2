"""Tiny random models of each family give the logits of their Hugging Face class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # its classes are imported when they are used

from diptych_frontend.model_files.families import FAMILIES
from diptych_frontend.model_files.model_source import resolve_model

NUM_TOKENS = 70
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "llama wide heads": ("LlamaConfig", SIZES | {"head_dim": 16}),
    "llama no sharing": ("LlamaConfig", SIZES | {"num_key_value_heads": 6}),
    "llama3 rope": ("LlamaConfig", SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("LlamaConfig", SIZES | {"rope_parameters": LINEAR_ROPE}),
    "yarn rope": ("Qwen3Config", SIZES | {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    "yarn rope of its own kind": (
        "LlamaConfig",
        SIZES
        | {"head_dim": 32}
        | {
            "rope_parameters": YARN_ROPE
            | {"beta_fast": 8, "beta_slow": 0.5, "truncate": False}
            | {"mscale": 1.5, "mscale_all_dim": 0.5}
        },
    ),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": None}),
    "mistral window": ("MistralConfig", SIZES | {"sliding_window": 20}),
    "qwen2": ("Qwen2Config", SIZES | {"rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | EXPERTS),
    "qwen3_moe mixed layers": (
        "Qwen3MoeConfig",
        SIZES
        | EXPERTS
        | {"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    ),
}


def config_of(name: str) -> transformers.PretrainedConfig:
    """transformers' own configuration of one model."""
    kind, sizes = CONFIGS[name]
    config: transformers.PretrainedConfig = getattr(transformers, kind)(**sizes)
    return config


def published(name: str, folder: Path, **options: Any) -> Any:
    """A random model whose norms and biases matter too, saved under `folder`."""
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config_of(name), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder, **options)
    return model


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, token ids, expected logits) of one family."""
    folder = tmp_path_factory.mktemp("model")
    model = published(request.param, folder)
    token_ids = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,))
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    return folder, token_ids.tolist(), expected


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([NUM_TOKENS], id="whole"),
        pytest.param([1, 15, 30, 24], id="chunks"),
        pytest.param([32] + [1] * (NUM_TOKENS - 32), id="prefill and decodes"),
    ],
)
def test_logits_equal_transformers(
    family: Any, sizes: list[int], lone_sequence: Callable[..., Any]
) -> None:
    folder, token_ids, expected = family
    actual = lone_sequence(resolve_model(str(folder)), 96).logits_in_chunks(token_ids, sizes)
    assert expected.std() > 0.5  # else the tolerance would prove nothing
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_every_family_is_compared() -> None:
    """Those that see are compared in `test_models_that_see.py`."""
    blind = {name for name, family in FAMILIES.items() if not family.sees}
    assert {config_of(name).model_type for name in CONFIGS} == blind


def test_weights_in_shards(tmp_path: Path, lone_sequence: Callable[..., Any]) -> None:
    model = published("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.inference_mode():
        expected = model(torch.arange(10)[None]).logits[0]
    actual = lone_sequence(resolve_model(str(tmp_path)), 16).logits(list(range(10)))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
