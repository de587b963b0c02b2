"""Log-probabilities of the tokens of prompts, gathered while the prompts are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.execution.sampling_math import token_logprobs
from diptych_engine.scheduling.request import Request, ScheduledRequest
from diptych_protocol import Array, LogprobsTensors

ROWS_AT_ONCE: Final = 128
"""Positions whose logits are computed together, because a whole prompt's would not
fit into memory."""

ToLogits = Callable[[Tensor], Tensor]
"""Hidden states to logits: [positions, hidden] -> [positions, vocabulary]."""


class PromptLogprobs:
    """The unfinished prompts that want log-probabilities.

    If a prompt is interrupted, it is gathered from its beginning again: its request reads no cached
    prefix.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._begun: dict[str, _Prompt] = {}

    def admit(self, share: ScheduledRequest) -> None:
        """Begin to gather a request's log-probabilities, if it wants those of its prompt."""
        if share.start == 0 and share.request.wants_prompt_logprobs:
            self._begun[share.request.request_id] = _Prompt(share.request, self._vocab_size)

    def release(self, request_id: str) -> None:
        self._begun.pop(request_id, None)

    def gather(
        self,
        shares: Sequence[ScheduledRequest],
        query_starts: NDArray[np.int64],
        hidden: Tensor,
        to_logits: ToLogits,
    ) -> dict[str, LogprobsTensors] | None:
        """Gather a step's shares, and return the prompts that are complete, by request id.

        query_starts: where each share begins in `hidden`. hidden: [tokens of the step, hidden].
        """
        if not self._begun:
            return None
        complete = {}
        for share, first in zip(shares, query_starts, strict=False):  # which has one end more
            prompt = self._begun.get(share.request.request_id)
            if prompt is None:
                continue
            prompt.take(hidden[first : first + share.num_tokens], share.start, to_logits)
            if share.samples:
                complete[share.request.request_id] = prompt.tensors()
                self.release(share.request.request_id)
        return complete


class _Prompt:
    """One prompt, of which some part is done."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        self._targets = torch.tensor(request.token_ids[1 : request.num_prompt_tokens])
        """What follows position i: [prompt tokens - 1]."""
        self._num_alternatives = min(request.params.prompt_logprobs or 0, vocab_size)
        shape = len(self._targets), self._num_alternatives + 1
        self._token_ids = np.zeros(shape, np.int32)
        self._logprobs = np.zeros(shape, np.float32)
        self._ranks = np.zeros(shape[:1], np.int32)

    def take(self, hidden: Tensor, start: int, to_logits: ToLogits) -> None:
        """Describe what follows the positions from `start` on, of which the last may be the last
        of the prompt, which nothing follows."""
        end = min(start + len(hidden), len(self._targets))
        for first in range(start, end, ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, end))
            logits = to_logits(hidden[rows.start - start : rows.stop - start]).float()
            self._token_ids[rows], self._logprobs[rows], self._ranks[rows] = token_logprobs(
                logits.log_softmax(-1),
                self._targets[rows].to(hidden.device),
                self._num_alternatives,
            )

    def tensors(self) -> LogprobsTensors:
        return LogprobsTensors(
            Array("int32", self._token_ids.shape, self._token_ids.tobytes()),
            Array("float32", self._logprobs.shape, self._logprobs.tobytes()),
            Array("int32", self._ranks.shape, self._ranks.tobytes()),
        )
