"""A model driven by hand: one sequence, chunk by chunk, all logits visible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych_engine.models import StepInputs, build_model, load_weights
from diptych_engine.models.interface import GivenEmbeddings
from diptych_frontend.model_files.model_source import ModelSource
from diptych_kernels.paged_attention import AttentionMetadata

BLOCK_SIZE = 16


class LoneSequence:
    """A loaded model and a cache for one sequence, its blocks in no particular order."""

    def __init__(self, source: ModelSource, max_tokens: int, *, packs: bool = False) -> None:
        cpu = torch.device("cpu")
        config = source.config
        self.model = build_model(config, max_tokens, torch.float32, cpu)
        packables = self.model.packables if packs else ()
        load_weights(self.model.slots, source, packables=packables)
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        self.cache = torch.zeros(
            num_blocks, config.num_hidden_layers, 2, BLOCK_SIZE, config.num_key_value_heads,
            config.head_dim, dtype=torch.bfloat16 if packs else torch.float32,
        )  # fmt: skip
        self.blocks = np.random.default_rng(0).permutation(num_blocks)

    def logits(
        self, token_ids: list[int], start: int = 0, given: GivenEmbeddings | None = None
    ) -> Tensor:
        """Compute `token_ids` from position `start` on; what precedes stands in the cache."""
        end = start + len(token_ids)
        positions = np.arange(start, end)
        inputs = StepInputs(
            token_ids=torch.tensor(token_ids),
            positions=torch.from_numpy(positions),
            slot_blocks=torch.from_numpy(self.blocks[positions // BLOCK_SIZE]),
            slot_offsets=torch.from_numpy(positions % BLOCK_SIZE),
            attention=AttentionMetadata(
                query_starts=np.array([0, len(token_ids)]),
                context_lens=np.array([end]),
                block_tables=self.blocks[None, : -(-end // BLOCK_SIZE)],
                num_decodes=int(len(token_ids) == 1),
                block_size=BLOCK_SIZE,
            ),
            given=given,
        )
        with torch.inference_mode():
            hidden = self.model.forward(inputs, self.cache.unbind(1))
            return self.model.logits(hidden)

    def logits_in_chunks(self, token_ids: list[int], sizes: list[int]) -> Tensor:
        """The same in chunks of the given sizes, which add up to all of it."""
        pieces = []
        start = 0
        for size in sizes:
            pieces.append(self.logits(token_ids[start : start + size], start))
            start += size
        return torch.cat(pieces)


@pytest.fixture(scope="session")
def lone_sequence() -> type[LoneSequence]:
    """Load a model for one sequence of at most so many tokens."""
    return LoneSequence
