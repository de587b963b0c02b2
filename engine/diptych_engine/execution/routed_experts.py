"""Records which experts the layers chose for each token, by the slots of the KV cache.

A request that finds a prefix in the cache, or computes its tokens again after a preemption, finds
their experts with their KV. They are kept on the host: the runner copies a step's with the sampled
tokens, and no step waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.execution.batch_rows import BatchRows
from diptych_engine.execution.sampler import Readback
from diptych_engine.models import StepInputs
from diptych_engine.scheduling.request import Request, ScheduledRequest
from diptych_frontend.model_files.model_source import ModelConfig
from diptych_protocol import Array, InvalidRequestError
from diptych_protocol.wire import MAX_MESSAGE_BYTES

UNKNOWN = -1
ITEM_BYTES = 2


class _Wanted(NamedTuple):
    """A request that a step samples for."""

    request: Request
    first_block: int
    """The index of the first of its blocks in `blocks`."""
    blocks: NDArray[np.int64]
    end: int
    """The number of its tokens that are computed then."""
    start: int | None
    """The first token to report, if it is a guess; else the first that was not reported."""


def check_routed(model: ModelConfig, max_tokens: int) -> None:
    """Raise `InvalidRequestError` unless the experts of this many tokens can be reported."""
    if not model.num_experts:
        raise InvalidRequestError(
            f"enable_return_routed_experts needs experts, and this {model.architecture} "
            "model has none: leave it out",
            param="enable_return_routed_experts",
        )
    num_bytes = max_tokens * model.num_hidden_layers * model.num_experts_per_tok * ITEM_BYTES
    if num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"max_model_len {max_tokens} is too long for enable_return_routed_experts: the experts "
            f"of so many tokens take {num_bytes} bytes, and a message {MAX_MESSAGE_BYTES}",
            param="max_model_len",
        )


class RoutedExperts:
    """The experts of all tokens in the cache."""

    def __init__(self, model: ModelConfig, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._shape = model.num_hidden_layers, model.num_experts_per_tok
        # Zeros, because such memory is taken on first use: what stands here is one more.
        self._one_more = np.zeros((num_blocks, block_size, *self._shape), np.int16)
        self._under_way: deque[Readback] = deque()
        """Steps that were launched and not written down, in their order."""

    def room_for(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return `StepInputs.routed` for a step."""
        return torch.full((num_tokens, *self._shape), UNKNOWN, dtype=torch.int16, device=device)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Forget the experts of blocks that get KV from other engines, which do not
        report experts."""
        self._one_more[list(block_ids)] = UNKNOWN + 1

    def take(
        self, inputs: StepInputs, shares: Sequence[ScheduledRequest], rows: BatchRows
    ) -> Callable[[], dict[tuple[str, int], Array]]:
        """Record the choices of a launched step's layers.

        Returns a function that waits for them and returns the experts for clients, by the id of the
        request and the end of its share.
        It may be called again, and before that of an earlier step: it is right when the results of
        all steps before are applied.
        """
        if inputs.routed is None:
            raise ValueError("the step had no room for experts")
        copies = Readback(inputs.routed, inputs.slot_blocks, inputs.slot_offsets)
        self._under_way.append(copies)
        wanted = [self._want(share, rows) for share in shares if share.samples]

        def told() -> dict[tuple[str, int], Array]:
            self._keep(copies)
            return {(each.request.request_id, each.end): self._of(each) for each in wanted}

        return told

    def _keep(self, newest: Readback) -> None:
        """Write down a step and those before it, each once: blocks may be others' later."""
        while newest in self._under_way:
            chosen, blocks, offsets = (x.numpy() for x in self._under_way.popleft().read())
            self._one_more[blocks, offsets] = chosen + 1

    def _want(self, share: ScheduledRequest, rows: BatchRows) -> _Wanted:
        request, end = share.request, share.start + share.num_tokens
        first = request.num_routed // self._block_size
        table = rows.block_tables[rows.row_of[request.request_id]]
        blocks = table[first : -(-end // self._block_size)].copy()
        return _Wanted(request, first, blocks, end, None if share.guess is None else share.start)

    def _of(self, wanted: _Wanted) -> Array:
        """The experts of the tokens that the client was not told of."""
        start = wanted.request.num_routed if wanted.start is None else wanted.start
        places = np.arange(start, wanted.end)
        blocks = wanted.blocks[places // self._block_size - wanted.first_block]
        chosen = self._one_more[blocks, places % self._block_size] - 1
        return Array("int16", chosen.shape, chosen.tobytes())
