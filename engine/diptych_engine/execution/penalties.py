"""Penalties on tokens that a sequence already has."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.execution.sampling_math import penalize
from diptych_engine.scheduling.request import Request
from diptych_kernels.host_arrays import to_device
from diptych_protocol import SamplingParams


class SeenTokens:
    """The distinct tokens of a growing sequence. Each step reads only the new ones."""

    def __init__(self) -> None:
        self._token_ids = array("q")
        self._counts = array("q")
        """How often each stands in the output."""
        self._places: dict[int, int] = {}
        self._num_looked_at = 0

    def advance(self, request: Request) -> None:
        """Read the request's tokens since the last call."""
        token_ids = request.token_ids
        for position in range(self._num_looked_at, len(token_ids)):
            place = self._places.setdefault(token_ids[position], len(self._places))
            if place == len(self._token_ids):
                self._token_ids.append(token_ids[position])
                self._counts.append(0)
            self._counts[place] += position >= request.num_prompt_tokens
        self._num_looked_at = len(token_ids)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return token ids and output counts, as views that must be dropped before the next
        `advance`."""
        return np.frombuffer(self._token_ids, np.int64), np.frombuffer(self._counts, np.int64)


class Penalties:
    """The penalties of one row."""

    def __init__(self, presence: float, frequency: float, repetition: float) -> None:
        self.presence = presence
        self.frequency = frequency
        self.repetition = repetition
        self.seen = SeenTokens()

    @classmethod
    def of(cls, params: SamplingParams) -> Penalties | None:
        """Return the penalties of a request; None if its parameters change nothing."""
        asked = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        return None if asked == (0.0, 0.0, 1.0) else cls(*asked)


def apply_penalties(
    logits: Tensor, penalized: Sequence[tuple[int, Penalties]], requests: Sequence[Request]
) -> None:
    """Lower the logits of seen tokens, in place.

    logits: [requests, vocabulary].
    penalized: rows of `logits` with their penalties, at least one.
    """
    pieces = []
    for row, penalties in penalized:
        penalties.seen.advance(requests[row])
        pieces.append((row, penalties, *penalties.seen.arrays()))
    lengths = [len(token_ids) for _, _, token_ids, _ in pieces]

    def spread(values: list[float]) -> Tensor:
        return to_device(np.repeat(np.array(values, np.float32), lengths), logits.device)

    penalize(
        logits,
        rows=to_device(np.repeat(np.array([row for row, *_ in pieces]), lengths), logits.device),
        token_ids=to_device(np.concatenate([ids for _, _, ids, _ in pieces]), logits.device),
        counts=to_device(np.concatenate([counts for *_, counts in pieces]), logits.device),
        presence=spread([penalties.presence for _, penalties, *_ in pieces]),
        frequency=spread([penalties.frequency for _, penalties, *_ in pieces]),
        repetition=spread([penalties.repetition for _, penalties, *_ in pieces]),
    )
