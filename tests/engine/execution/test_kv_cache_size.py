"""How many KV blocks an engine gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych_engine.execution.kv_cache_size import (
    BESIDE_TENSORS,
    BYTES_ON_A_CPU,
    GIB,
    GpuMemory,
    blocks_in,
    bytes_for_kv,
    bytes_that_fit,
    peak_of_a_step,
    peak_of_images,
)
from diptych_engine.execution.placement import block_bytes
from diptych_frontend.model_files.model_source import ModelConfig
from diptych_frontend.model_files.vision_config import VisionConfig
from diptych_protocol import EngineConfig, InvalidRequestError

LLAMA_8B = ModelConfig(
    architecture="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=131072,
)  # fmt: skip
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("total", "free", "utilization", "peak", "expected"),
    [
        (80, 64, 0.9, 2, 54),  # 72 allowed, 16 of weights
        (80, 64, 1.0, 2, 62),
        (80, 34, 0.9, 2, 24),  # another process has 30
        (24, 8, 0.9, 2, 3.6),
    ],
)
def test_kv_gets_what_weights_and_steps_leave_of_the_share(
    total: float, free: float, utilization: float, peak: float, expected: float
) -> None:
    memory = GpuMemory(int(free * GIB), int(total * GIB))
    found = bytes_that_fit(memory, utilization, int(peak * GIB))
    assert found == pytest.approx(expected * GIB, abs=2)


@pytest.mark.parametrize(
    ("total", "free", "utilization", "peak"),
    [(16, 1, 0.9, 1), (80, 64, 0.1, 1), (24, 8, 0.9, 5.6001)],
    ids=["a small GPU", "a small share", "a large step"],
)
def test_no_room_names_what_to_change(
    total: float, free: float, utilization: float, peak: float
) -> None:
    memory = GpuMemory(int(free * GIB), int(total * GIB))
    with pytest.raises(InvalidRequestError, match="nothing is left for KV") as caught:
        bytes_that_fit(memory, utilization, int(peak * GIB))
    assert caught.value.param == "gpu_memory_utilization"
    for field in ("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs"):
        assert field in str(caught.value)


def test_a_step_of_a_model_of_8_billion_weights_takes_little_beside_them() -> None:
    peak = peak_of_a_step(LLAMA_8B, max_tokens=512, max_seqs=64, itemsize=2)
    assert 0.9 * GIB < peak < 2 * GIB
    more = peak_of_a_step(LLAMA_8B, max_tokens=8192, max_seqs=256, itemsize=2)
    assert 2 * GIB < more < 4 * GIB
    assert BESIDE_TENSORS < GIB


def test_what_that_is_for_a_gpu_of_80_gib() -> None:
    weights = 15 * GIB
    peak = peak_of_a_step(LLAMA_8B, max_tokens=512, max_seqs=64, itemsize=2)
    room = bytes_that_fit(GpuMemory(80 * GIB - weights, 80 * GIB), 0.9, peak)
    blocks = blocks_in(room, block_bytes(LLAMA_8B, 16, torch.bfloat16))
    assert 440_000 < 16 * blocks < 470_000, "tokens"


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, CPU, 1 << 30),
        ({}, GPU, 1 << 30),
        ({"kv_cache_bytes": None}, CPU, BYTES_ON_A_CPU),
        ({"kv_cache_bytes": 5 << 30}, GPU, 5 << 30),
    ],
)
def test_what_was_asked_for_counts(
    options: dict[str, Any], device: torch.device, expected: int
) -> None:
    config = EngineConfig(model="m", **options)
    config.check()
    assert bytes_for_kv(config, LLAMA_8B, device, torch.bfloat16, 1) == expected


def test_several_ranks_must_be_told() -> None:
    config = EngineConfig(model="m", kv_cache_bytes=None, tensor_parallel_size=2)
    with pytest.raises(InvalidRequestError, match="kv_cache_bytes must be set"):
        bytes_for_kv(config, LLAMA_8B, GPU, torch.bfloat16, 2)
    assert bytes_for_kv(config, LLAMA_8B, CPU, torch.bfloat16, 2) == BYTES_ON_A_CPU


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"between 0\.05 and 1"):
        EngineConfig(model="m", gpu_memory_utilization=share).check()


def test_two_blocks_are_the_least() -> None:
    assert blocks_in(200, 100) == 2
    with pytest.raises(InvalidRequestError, match="kv_cache_bytes must hold two blocks of 100"):
        blocks_in(199, 100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_asked_what_it_has() -> None:
    config = EngineConfig(model="m", kv_cache_bytes=None)
    found = bytes_for_kv(config, LLAMA_8B, GPU, torch.bfloat16, 1)
    assert 0 < found < torch.cuda.mem_get_info(GPU)[1]


def test_encoding_an_image_takes_some_hundred_megabytes() -> None:
    smolvlm = VisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        image_size=512, patch_size=16, scale_factor=4, image_token_id=49190, longest_edge=2048,
    )  # fmt: skip
    inner_layer = 8 * 1024 * 3072 * 4
    assert 2 * inner_layer < peak_of_images(smolvlm, itemsize=4) < GIB
    assert smolvlm.tokens_per_tile == 64
