"""A Q4_K_M file of each family goes through two engines with the tokens of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.gguf_files import mixture, requantised
from engine_kit.handoff import LocalRouter, engines, request
from gguf import GGMLQuantizationType as Kind
from model_kit.families import published
from model_kit.family_gguf import ARCHITECTURES, save_family_gguf
from model_kit.mixture import published_mixture, save_mixture_gguf
from model_kit.quantised import quantise

from diptych_frontend.model_files.gguf_header import read_header
from diptych_kernels.cpu_level import CpuLevel

LAYERS = 2
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "head_dim": 64,
}
"""Rows that K-quants can have, and heads that kernels are compiled for in advance."""
CHANGES: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 4},
    "gemma3_text": {"sliding_window_pattern": 6, "query_pre_attn_scalar": 64},
}
"""What a file does not say is as llama.cpp has it for the architecture."""
FAMILIES = (*ARCHITECTURES, "qwen3_moe")
PROMPT = [1 + 7 * at * at % 61 for at in range(41)]


def saved(family: str, folder: Path) -> str:
    """A random model's file in Q4_K_M."""
    plain = folder / "plain.gguf"
    if family == "qwen3_moe":
        moe = {"moe_intermediate_size": 256, "num_experts": 4}
        save_mixture_gguf(plain, published_mixture(folder / "published", **WIDE | moe))
    else:
        sizes = WIDE | CHANGES.get(family, {})
        save_family_gguf(plain, published(family, folder / "published", sizes))
    return requantised(plain, folder / "model.gguf", mixture(Kind.Q4_K, LAYERS), quantise)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_q4_k_m_file_goes_through_two_engines_with_the_tokens_of_one(
    family: str, level: CpuLevel, tmp_path: Path
) -> None:
    path = saved(family, tmp_path)
    kinds = {tensor.type for tensor in read_header(Path(path)).tensors().values()}
    assert kinds == {Kind.F32, Kind.Q4_K, Kind.Q6_K}
    options = {"weight_packing": "auto", "cpu_level": level.word}
    message = request("one", PROMPT, max_tokens=12, ignore_eos=True)
    with engines(path, prefill=options, decode=options) as (prefill, decode):
        [expected] = LocalRouter(None, decode=[prefill]).run(message)
        assert prefill.core.call("reset_prefix_cache", []), "it computes the prompt again"
        [found] = LocalRouter(None, prefill=[prefill], decode=[decode]).run(message)
        assert len(expected[-1].outputs[0].token_ids) == 12
        assert found[-1].outputs[0].token_ids == expected[-1].outputs[0].token_ids
        assert decode.hinge.loads_completed == 1
