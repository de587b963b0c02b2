"""A whole model on the GPU kernels: they take the tensors as the model hands them over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_kit.kernel_model import (
    BLOCK_SIZE,
    CPU,
    FAMILIES,
    choose_kernels,
    config,
    make_cache,
    make_model,
)
from torch import Tensor

from diptych_engine.models import StepInputs
from diptych_frontend.model_files.model_config import ModelConfig
from diptych_kernels.paged_attention import AttentionMetadata

NUM_BLOCKS, POSITIONS = 16, 64
STEPS = [[(0, 21), (0, 5)], [(21, 1), (5, 1)], [(22, 1), (6, 13)], [(19, 1), (23, 1)]]
"""(first position, new tokens) of two sequences, decodes first; in the last step they swap."""
TABLES = np.random.default_rng(0).permutation(NUM_BLOCKS).reshape(2, -1)


def inputs(step: int, device: torch.device) -> StepInputs:
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
            device=device,
        ),
    )


def hidden_states(model_config: ModelConfig, device: torch.device) -> list[Tensor]:
    """The hidden states of every step, one after the other on the same cache."""
    model, layers = make_model(model_config, device, POSITIONS), make_cache(device, NUM_BLOCKS)
    steps = [inputs(step, device) for step in range(len(STEPS))]
    with torch.inference_mode():
        return [model.normed(model.forward(step, layers)).cpu() for step in steps]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_a_model_computes_the_same_on_the_kernels(
    options: dict[str, bool | int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hidden_states(config(**options), CPU)
    choose_kernels(device, monkeypatch)
    actual = hidden_states(config(**options), device)
    # float32 sums in other orders, through two layers and the norm of the last.
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
