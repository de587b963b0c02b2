"""Chooses a model's device and dtypes, and the shape of a KV block."""

from __future__ import annotations

import math

import torch

from diptych_engine.models.rounding import BITS
from diptych_frontend.model_files.model_source import ModelConfig
from diptych_kernels.rope_kv_write.reference import FLOAT8
from diptych_protocol import EngineConfig, InvalidRequestError

ENOUGH_ON_A_CPU = 256
"""The number of prompt tokens that is enough for one step on a CPU. From about 64 tokens on, each
takes the same time. With fewer prompt tokens per step there would be more steps, for each of which
the weights have to be read."""
SPARE_ROWS_ON_A_CPU, SPARE_ROWS_ON_A_GPU = 3.0, 64.0
"""The time of a step without any decode, as the number of decodes that take as long: on a CPU as
`python -m benchmarks speculation` shows for the demo's model; on a GPU a step takes about the same
time until there are some dozens."""
LOST_ROWS_ON_A_GPU = 32.0
"""See `guesses.pay`: an estimate for a small model, which loses most. Without steps ahead it was
up to a seventh slower (benchmarks/results/gpu.md), and the host looks for guesses meanwhile."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOAT8_SINCE = (8, 9)
"""The compute capability from which on Triton converts 8-bit floats (e4m3)."""


def choose_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Return the CPU, or the GPU of a rank.

    Raises `InvalidRequestError` if the configuration names a GPU that does not exist.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise InvalidRequestError("device is cuda, but torch finds no GPU", param="device")
    if not available or config.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", gpu_of(config, rank, torch.cuda.device_count()))


def gpu_of(config: EngineConfig, rank: int, num_visible: int) -> int:
    """Return which of the GPUs that a process sees belongs to a rank.

    All ranks of all replicas on a machine see the same GPUs. A pod that has only the GPUs of one
    replica sees them as the first.
    """
    return (config.data_parallel_rank * config.tensor_parallel_size + rank) % num_visible


def enough_prompt_tokens(config: EngineConfig, device: torch.device) -> int:
    """Return the number of prompt tokens that is enough for one step: more would be no faster per
    token."""
    if config.enough_prompt_tokens is not None:
        return config.enough_prompt_tokens
    return ENOUGH_ON_A_CPU if device.type == "cpu" else config.max_num_batched_tokens


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and activations."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[config.dtype]


def choose_bits(config: EngineConfig, *, can_round: bool) -> int | None:
    """Return the bits that weights are rounded to; None: they are as in the file.

    Raises `InvalidRequestError` where nothing computes with rounded ones.
    """
    bits = BITS.get(config.weight_packing)
    if bits is not None and not can_round:
        raise InvalidRequestError(
            f"weight_packing {config.weight_packing} needs float32 on a CPU: leave it auto, or "
            "leave dtype to the engine",
            param="weight_packing",
        )
    return bits


def choose_kv_dtype(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, *, quantised: bool
) -> torch.dtype:
    """Return the dtype of keys and values in the cache, for a model of this dtype whose file may be
    quantised.

    Raises `InvalidRequestError` for a dtype that no attention kernel reads.
    """
    if config.kv_cache_dtype == "auto":
        return torch.bfloat16 if quantised else dtype
    if config.kv_cache_dtype == "fp8":
        _check_float8(device)
        return FLOAT8
    wanted = DTYPES[config.kv_cache_dtype]
    halved = device.type == "cpu" and (dtype, wanted) == (torch.float32, torch.bfloat16)
    if wanted is not dtype and not halved:
        raise InvalidRequestError(
            f"a model in {dtype} on {device.type} keeps its KV in that: leave kv_cache_dtype auto",
            param="kv_cache_dtype",
        )
    return wanted


def _check_float8(device: torch.device) -> None:
    """Raises `InvalidRequestError` where no kernel reads 8-bit floats."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_SINCE
    if device.type == "cpu" or old:
        raise InvalidRequestError(
            "kv_cache_dtype fp8 needs a GPU of the generation Ada, Hopper or later",
            param="kv_cache_dtype",
        )


def block_shape(model: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    """Return [num_layers, 2, block_size, kv_heads, head_dim], the shape of one KV block."""
    return (
        model.num_hidden_layers, 2, block_size, model.num_key_value_heads, model.head_dim,
    )  # fmt: skip


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one KV block with all layers."""
    return math.prod(block_shape(model, block_size)) * dtype.itemsize
