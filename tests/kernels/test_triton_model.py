"""A whole model on the GPU kernels: they take the tensors as the model hands them over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych_engine.models import StepInputs, build_model, llama
from diptych_frontend.model_config import ModelConfig
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_kernels.paged_attention import triton as paged_attention
from diptych_kernels.rms_norm import triton as rms_norm
from diptych_kernels.rope_kv_write import reference as rope_kv_write_reference
from diptych_kernels.rope_kv_write import triton as rope_kv_write
from diptych_kernels.silu_mul import triton as silu_mul

BLOCK_SIZE, NUM_BLOCKS = 8, 16
CPU = torch.device("cpu")
STEPS = [[(0, 21), (0, 5)], [(21, 1), (5, 1)], [(22, 1), (6, 13)], [(19, 1), (23, 1)]]
"""(first position, new tokens) of two sequences, decodes first; in the last step they swap."""
TABLES = np.random.default_rng(0).permutation(NUM_BLOCKS).reshape(2, -1)
FAMILIES = {
    "llama": {},
    "norms of heads, biases, a window": {
        "qk_norm": True,
        "attention_bias": True,
        "sliding_window": 9,
    },
}


def config(**options: bool | int) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=50, hidden_size=24, intermediate_size=40,
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=12,
        max_position_embeddings=64, **options,
    )  # fmt: skip


def inputs(step: int, window: int | None, device: torch.device) -> StepInputs:
    tables = TABLES[::-1] if step == 3 else TABLES
    shares = STEPS[step]
    counts = np.array([new for _, new in shares])
    positions = np.concatenate([np.arange(first, first + new) for first, new in shares])
    sequences = np.repeat([0, 1], counts)
    blocks = tables[sequences, positions // BLOCK_SIZE]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepInputs(
        token_ids=tensor((7 * positions + 3 * sequences + step) % 50),
        positions=tensor(positions),
        slot_blocks=tensor(blocks),
        slot_offsets=tensor(positions % BLOCK_SIZE),
        attention=AttentionMetadata(
            query_starts=np.concatenate(([0], counts.cumsum())),
            context_lens=np.array([first + new for first, new in shares]),
            block_tables=np.ascontiguousarray(tables),
            num_decodes=int((counts == 1).sum()),
            block_size=BLOCK_SIZE,
            window=window,
            device=device,
        ),
    )


def hidden_states(model_config: ModelConfig, device: torch.device) -> list[Tensor]:
    """Of every step, one after the other on the same cache."""
    torch.manual_seed(0)
    model = build_model(model_config, 64, torch.float32, device)
    for tensor in model.parameters():
        tensor.copy_(torch.randn(tensor.shape) / tensor.shape[0] ** 0.5)
    shape = (NUM_BLOCKS, 2, 2, BLOCK_SIZE, 2, 12)
    layers = torch.zeros(shape, device=device).unbind(1)
    steps = [inputs(step, model_config.sliding_window, device) for step in range(len(STEPS))]
    with torch.inference_mode():
        return [model.normed(model.forward(step, layers)).cpu() for step in steps]


def attend(*args: Any, may_round: bool) -> Tensor:
    """Triton's kernel rounds nothing but what it is given in."""
    return paged_attention.paged_attention(*args)


@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_a_model_computes_the_same_on_the_kernels(
    options: dict[str, bool | int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hidden_states(config(**options), CPU)
    if device == CPU:  # where the model would not choose them by itself
        for name, module in (
            ("rms_norm", rms_norm),
            ("silu_mul", silu_mul),
            ("rope_kv_write", rope_kv_write),
        ):
            monkeypatch.setattr(llama, name, getattr(module, name))
        monkeypatch.setattr(rope_kv_write_reference, "rms_norm", rms_norm.rms_norm)  # of heads
        monkeypatch.setattr(llama, "paged_attention", attend)
    actual = hidden_states(config(**options), device)
    # float32 sums in other orders, through two layers and the norm of the last.
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
