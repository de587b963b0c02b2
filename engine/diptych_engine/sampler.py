"""Chooses the next token of each request in a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.request import Request, StepResult
from diptych_engine.row_options import RowOptions, change_logits
from diptych_engine.sampling_math import describe, find_largest, to_tensor, uniforms
from diptych_kernels.sampling import Filters, sample

LogprobsRow = tuple[list[int], list[float], int]

SEED_MASK = 2**64 - 1


class Sampler:
    """The sampling options of every row of the batch, and the choice itself.

    Biases, penalties and excluded tokens change the logits first; then greedy rows take the
    largest, others scale by temperature, filter, and draw with a number that depends on (seed,
    position) alone.
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
        self._top_k[row] = min(max(params.top_k, 0), self._vocab_size)
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
            tokens, largest = find_largest(logits)
            return StepResult(tokens.tolist(), None, _count_nans(logits, largest))
        special = [(i, self._special[row]) for i, row in enumerate(rows) if row in self._special]
        reported = [(i, options.num_logprobs) for i, options in special if options.logprobs]
        unchanged = logits[[i for i, _ in reported]].log_softmax(-1) if reported else None
        failed = change_logits(logits, special, requests)
        tokens, largest = find_largest(logits)
        nans = _count_nans(logits, largest)
        usable = np.isfinite(largest)
        self._draw_random_rows(logits, np.asarray(rows), requests, usable, tokens)
        token_ids: list[int] = tokens.tolist()
        if unchanged is None:
            return StepResult(token_ids, None, nans, failed=failed)
        described = describe(
            unchanged, [token_ids[i] for i, _ in reported], [count for _, count in reported]
        )
        logprobs: list[LogprobsRow | None] = [None] * len(rows)
        for (i, _), row_logprobs in zip(reported, described, strict=True):
            logprobs[i] = row_logprobs
        return StepResult(token_ids, logprobs, nans, failed=failed)

    def _draw_random_rows(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        requests: Sequence[Request],
        usable: NDArray[np.bool_],
        tokens: NDArray[np.int64],
    ) -> None:
        """Replace the tokens of rows with a temperature, where `usable`: elsewhere no distribution
        exists."""
        chosen = np.flatnonzero((self._temperature[rows] > 0.0) & usable)
        if not len(chosen):
            return
        rows = rows[chosen]
        positions = np.array([len(request.token_ids) for request in requests], np.uint64)[chosen]
        subset = logits if len(chosen) == len(logits) else logits[to_tensor(chosen, logits)]
        drawn = sample(
            subset,
            to_tensor(self._temperature[rows], logits),
            to_tensor(uniforms(self._seed[rows], positions), logits),
            self._filters(rows, logits),
        )
        tokens[chosen] = drawn.cpu().numpy()

    def _filters(self, rows: NDArray[np.int64], like: Tensor) -> Filters | None:
        """Top-k, top-p and min-p of the rows, where `like` is."""
        if not self._filtered[rows].any():
            return None
        options = (self._top_k[rows], self._top_p[rows], self._min_p[rows])
        return Filters(*[to_tensor(option, like) for option in options])


def _count_nans(logits: Tensor, largest: NDArray[np.float32]) -> list[int] | None:
    """NaNs per row; costs next to nothing while each row's largest logit is finite."""
    if math.isfinite(sum(largest.tolist())):
        return None
    counts: list[int] = logits.isnan().sum(-1).tolist()
    return counts if any(counts) else None
