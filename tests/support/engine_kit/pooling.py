"""Hidden states computed without an engine's scheduling: what pooling is measured by.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diptych_engine.control.core import EngineCore
from diptych_engine.execution.runner import ModelRunner
from diptych_engine.models import StepInputs
from diptych_kernels.paged_attention import AttentionMetadata


def runner_of(core: EngineCore) -> ModelRunner:
    assert isinstance(core.runner, ModelRunner)
    return core.runner


def hidden_states(core: EngineCore, prompt: list[int]) -> Tensor:
    """[tokens, hidden] after the final norm: one forward over the whole prompt, in a cache of its
    own."""
    runner = runner_of(core)
    block_size = core.description.block_size
    count = len(prompt)
    num_blocks = -(-count // block_size)
    cache = torch.zeros(num_blocks, *runner.kv_cache.shape[1:])
    positions = torch.arange(count)
    inputs = StepInputs(
        token_ids=torch.tensor(prompt),
        positions=positions,
        slot_blocks=positions // block_size,
        slot_offsets=positions % block_size,
        attention=AttentionMetadata(
            query_starts=np.array([0, count]),
            context_lens=np.array([count]),
            block_tables=np.arange(num_blocks)[None],
            num_decodes=0,
            block_size=block_size,
            window=None,
        ),
    )
    with torch.inference_mode():
        return runner.model.normed(runner.model.forward(inputs, cache.unbind(1)))
