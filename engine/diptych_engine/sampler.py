"""Chooses the next token of each request in a batch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.request import Request, StepResult
from diptych_engine.sampling_math import argmax, describe, draw, keep_floor, penalize, uniforms

LogprobsRow = tuple[list[int], list[float], int]

SEED_MASK = 2**64 - 1


class Sampler:
    """The sampling options of every row of the batch, and the choice itself.

    Penalties and excluded tokens change the logits first; then greedy rows take the largest, others
    scale by temperature, filter, and draw with a number that depends on (seed, position) alone.
    Reported log-probabilities are those of the unchanged logits.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float64)
        self._min_p = np.zeros(num_rows, np.float32)
        self._filtered = np.zeros(num_rows, np.bool_)
        self._seed = np.zeros(num_rows, np.uint64)
        self._special: dict[int, RowOptions] = {}
        """Rows with options beyond those above."""
        self._plain = [True] * num_rows
        """Rows that just take the largest logit."""

    def admit(self, row: int, request: Request) -> None:
        """Take over a row's options; it must be free."""
        params = request.params
        greedy = params.greedy
        self._temperature[row] = 0.0 if greedy else params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._filtered[row] = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._seed[row] = request.seed & SEED_MASK
        options = RowOptions.of(request, self._vocab_size)
        if options is not None:
            self._special[row] = options
        self._plain[row] = greedy and options is None

    def release(self, row: int) -> None:
        """Forget a row's options."""
        self._special.pop(row, None)

    def sample(
        self, logits: Tensor, rows: Sequence[int], requests: Sequence[Request]
    ) -> StepResult:
        """Choose a token for each request from its logits.

        logits: [requests, vocabulary]; may be changed.
        rows: the row that each request was admitted to.
        """
        logits = logits.float()
        if all(map(self._plain.__getitem__, rows)):
            tokens = argmax(logits)
            return StepResult(tokens.tolist(), None, self._count_nans(logits, tokens))
        special = [(i, self._special[row]) for i, row in enumerate(rows) if row in self._special]
        reported = [(i, options.num_logprobs) for i, options in special if options.logprobs]
        unchanged = logits[[i for i, _ in reported]].log_softmax(-1) if reported else None
        self._change(logits, special, requests)
        tokens = argmax(logits)
        nans = self._count_nans(logits, tokens)
        self._draw_random_rows(logits, np.asarray(rows), requests, tokens)
        token_ids: list[int] = tokens.tolist()
        if unchanged is None:
            return StepResult(token_ids, None, nans)
        described = describe(
            unchanged, [token_ids[i] for i, _ in reported], [count for _, count in reported]
        )
        logprobs: list[LogprobsRow | None] = [None] * len(rows)
        for (i, _), row_logprobs in zip(reported, described, strict=True):
            logprobs[i] = row_logprobs
        return StepResult(token_ids, logprobs, nans)

    def _count_nans(self, logits: Tensor, tokens: NDArray[np.int64]) -> list[int] | None:
        """NaNs per row; costs next to nothing while there are none."""
        best = logits.gather(1, self._tensor(tokens, logits).unsqueeze(1))
        if math.isfinite(best.sum()):
            return None
        counts: list[int] = logits.isnan().sum(-1).tolist()
        return counts if any(counts) else None

    def _change(
        self,
        logits: Tensor,
        special: list[tuple[int, RowOptions]],
        requests: Sequence[Request],
    ) -> None:
        """Apply penalties, then exclude tokens, in place."""
        penalized = [(i, options) for i, options in special if options.seen is not None]
        if penalized:
            self._penalize(logits, penalized, requests)
        for i, options in special:
            if options.excluded and requests[i].num_output_tokens < options.min_tokens:
                logits[i, options.excluded] = -torch.inf

    def _penalize(
        self,
        logits: Tensor,
        penalized: list[tuple[int, RowOptions]],
        requests: Sequence[Request],
    ) -> None:
        pieces = []
        for i, options in penalized:
            if options.seen is not None:
                options.seen.advance(requests[i])
                pieces.append((i, options, *options.seen.arrays()))
        lengths = [len(token_ids) for _, _, token_ids, _ in pieces]

        def spread(values: list[float]) -> Tensor:
            return self._tensor(np.repeat(np.array(values, np.float32), lengths), logits)

        penalize(
            logits,
            rows=self._tensor(np.repeat(np.array([i for i, *_ in pieces]), lengths), logits),
            token_ids=self._tensor(np.concatenate([ids for _, _, ids, _ in pieces]), logits),
            counts=self._tensor(np.concatenate([counts for *_, counts in pieces]), logits),
            presence=spread([options.presence for _, options, *_ in pieces]),
            frequency=spread([options.frequency for _, options, *_ in pieces]),
            repetition=spread([options.repetition for _, options, *_ in pieces]),
        )

    def _draw_random_rows(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        requests: Sequence[Request],
        tokens: NDArray[np.int64],
    ) -> None:
        """Replace the tokens of rows with a temperature, except where no distribution exists."""
        largest = logits.gather(1, self._tensor(tokens, logits).unsqueeze(1)).squeeze(1)
        usable = largest.isfinite().cpu().numpy()
        chosen = np.flatnonzero((self._temperature[rows] > 0.0) & usable)
        if not len(chosen):
            return
        rows = rows[chosen]
        positions = np.array([len(request.token_ids) for request in requests], np.uint64)[chosen]
        scaled = logits if len(chosen) == len(logits) else logits[self._tensor(chosen, logits)]
        scaled = scaled / self._tensor(self._temperature[rows], logits).unsqueeze(1)
        self._exclude_unlikely(scaled, rows)
        where = self._tensor(uniforms(self._seed[rows], positions), logits)
        tokens[chosen] = draw(scaled, where).cpu().numpy()

    def _exclude_unlikely(self, scaled: Tensor, rows: NDArray[np.int64]) -> None:
        """Apply top-k, top-p and min-p, in place."""
        filtered = np.flatnonzero(self._filtered[rows])
        if not len(filtered):
            return
        rows = rows[filtered]
        index = self._tensor(filtered, scaled)
        subset = scaled[index]
        floor = keep_floor(
            subset,
            self._tensor(self._top_k[rows], scaled),
            self._tensor(self._top_p[rows], scaled),
            self._tensor(self._min_p[rows], scaled),
        )
        scaled[index] = subset.masked_fill_(subset < floor, -torch.inf)

    @staticmethod
    def _tensor(values: NDArray[np.generic], like: Tensor) -> Tensor:
        return torch.from_numpy(values).to(like.device)


@dataclass(slots=True)
class RowOptions:
    """What few requests ask for."""

    logprobs: bool
    num_logprobs: int
    min_tokens: int
    excluded: list[int]
    """Tokens that would end the output, kept out until it has `min_tokens`."""
    presence: float
    frequency: float
    repetition: float
    seen: SeenTokens | None
    """None without penalties."""

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> RowOptions | None:
        """The request's special options; None if it has none."""
        params = request.params
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        penalized = penalties != (0.0, 0.0, 1.0)
        if params.logprobs is None and params.min_tokens == 0 and not penalized:
            return None
        ends = set(params.stop_token_ids)
        if request.eos_token_id is not None and not params.ignore_eos:
            ends.add(request.eos_token_id)
        return cls(
            params.logprobs is not None,
            params.logprobs or 0,
            params.min_tokens,
            [token for token in sorted(ends) if 0 <= token < vocab_size],
            *penalties,
            SeenTokens() if penalized else None,
        )


class SeenTokens:
    """The distinct tokens of a growing sequence; each step looks only at the new ones."""

    def __init__(self) -> None:
        self._token_ids = array("q")
        self._counts = array("q")
        """How often each stands in the output."""
        self._places: dict[int, int] = {}
        self._num_looked_at = 0

    def advance(self, request: Request) -> None:
        """Look at the request's tokens since the last call."""
        token_ids = request.token_ids
        for position in range(self._num_looked_at, len(token_ids)):
            place = self._places.setdefault(token_ids[position], len(self._places))
            if place == len(self._token_ids):
                self._token_ids.append(token_ids[position])
                self._counts.append(0)
            self._counts[place] += position >= request.num_prompt_tokens
        self._num_looked_at = len(token_ids)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and output counts; views that must be dropped before the next `advance`."""
        return np.frombuffer(self._token_ids, np.int64), np.frombuffer(self._counts, np.int64)
