"""Computes how much memory an engine uses for KV."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych_engine.execution.prompt_logprobs import ROWS_AT_ONCE
from diptych_engine.models.vision import TILES_AT_ONCE
from diptych_frontend.model_files.model_source import ModelConfig
from diptych_frontend.model_files.vision_config import VisionConfig
from diptych_protocol import EngineConfig, InvalidRequestError

BYTES_ON_A_CPU = 1 << 30
"""The default on a CPU, whose memory processes share without any natural part for an engine."""
BESIDE_TENSORS = 768 << 20
"""The part of a GPU for what is no tensor of a step: recorded launches, compiled kernels,
libraries' work spaces, the window of a hand-off, and what torch's allocator cannot use."""
GIB = 1 << 30


class GpuMemory(NamedTuple):
    """The memory of a GPU in bytes, when the weights are loaded."""

    free: int
    total: int


def bytes_for_kv(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int,
    spare: int = 0,
) -> int:
    """Return the bytes for KV by the configuration, in an engine that has loaded its weights.

    model: a rank's part. spare: bytes that a step takes whatever its tokens. Raises
    `InvalidRequestError` when a GPU has no room.
    """
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type != "cuda":
        return BYTES_ON_A_CPU
    if ranks > 1:
        raise InvalidRequestError(
            "kv_cache_bytes must be set where several ranks share a model: all need as many blocks",
            param="kv_cache_bytes",
        )
    torch.cuda.empty_cache()  # what loading has left
    memory = GpuMemory(*torch.cuda.mem_get_info(device))
    peak = peak_of_a_step(model, config.max_num_batched_tokens, config.max_num_seqs, dtype.itemsize)
    peak += spare
    if model.vision is not None:
        peak += peak_of_images(model.vision, dtype.itemsize)
        peak += config.encoder_cache_tokens * model.hidden_size * dtype.itemsize
    return bytes_that_fit(memory, config.gpu_memory_utilization, peak)


def blocks_in(num_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks. Raises `InvalidRequestError` for fewer than two."""
    if num_bytes < 2 * block_bytes:
        raise InvalidRequestError(
            f"kv_cache_bytes must hold two blocks of {block_bytes} bytes, not {num_bytes} bytes",
            param="kv_cache_bytes",
        )
    return num_bytes // block_bytes


def bytes_that_fit(memory: GpuMemory, utilization: float, peak: int) -> int:
    """Return the bytes that remain for KV in the engine's share of a GPU.

    All used memory counts as the engine's, whether weights or another process's. peak: what a step
    takes beside weights and KV, in bytes.

    Raises `InvalidRequestError` when nothing remains.
    """
    allowed = int(memory.total * utilization)
    used = memory.total - memory.free
    left = allowed - used - peak
    if left <= 0:
        raise InvalidRequestError(
            f"gpu_memory_utilization {utilization:g} allows {allowed / GIB:.1f} GiB of this GPU's "
            f"{memory.total / GIB:.1f}; {used / GIB:.1f} are used when the weights are loaded, and "
            f"a step takes {peak / GIB:.1f}: nothing is left for KV. Raise it, lower "
            "max_num_batched_tokens or max_num_seqs, or see who else uses this GPU",
            param="gpu_memory_utilization",
        )
    return left


def peak_of_a_step(model: ModelConfig, max_tokens: int, max_seqs: int, itemsize: int) -> int:
    """Return an upper bound, in bytes, of a step's GPU memory beside weights and KV.

    A step has the tensors of one layer, and logits. The bound is computed, not measured, as if none
    of them were freed before the next.
    """
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    # Twice the residual and its norm; queries, keys and values, and twice what attention makes of
    # them; gate and up, and their product; of each expert of a token also what goes in and out.
    of_expert = 2 * model.hidden_size + 3 * model.moe_intermediate_size
    inner = max(3 * model.intermediate_size, model.num_experts_per_tok * of_expert)
    per_token = 4 * model.hidden_size + 3 * queries + 2 * keys + inner
    # As computed and in float32; log-probabilities and what sampling sorts.
    per_row = model.vocab_size * (itemsize + 4 * 4)
    rows = max(max_seqs, ROWS_AT_ONCE)
    # Split contexts: each split's output and its weights, in float32.
    splits = max_seqs * queries * 4 * 16
    return BESIDE_TENSORS + max_tokens * per_token * itemsize + rows * per_row + splits


def peak_of_images(vision: VisionConfig, itemsize: int) -> int:
    """Return an upper bound, in bytes, of the GPU memory for encoding an image, computed in the
    same way."""
    patches = TILES_AT_ONCE * vision.patches_per_edge**2
    # The residual and its norms; queries, keys and values, and what attention makes of them; the
    # inner layer before and after its activation.
    per_patch = 9 * vision.hidden_size + 2 * vision.intermediate_size
    pixels = TILES_AT_ONCE * 3 * vision.image_size**2
    return patches * per_patch * itemsize + pixels * (1 + 3 * 4)
