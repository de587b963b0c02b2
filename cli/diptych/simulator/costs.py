"""What a step of the engine costs: a small model.

A step's seconds are the sum of
- `linear`: matrix products over all tokens of the step, piecewise linear in their number, because
  kernels change with it (a vector times a packed matrix is not a small matrix product);
- `sampled_row_s` for each row whose next token is sampled (output matrix, sampler, its message);
- `pair_s` for each pair of a prompt's token and a token that it attends to;
- `kv_token_s` for each token of context that a decode row reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, as far as its time depends on it."""

    tokens: int
    """Number of tokens, of prompts and decode rows together."""
    sampled: int
    """Number of rows whose next token is sampled."""
    pairs: float = 0.0
    """Number of pairs of a prompt's token and a token that it attends to: itself, or one before
    it."""
    kv_tokens: int = 0
    """Number of tokens in the contexts of all decode rows."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, by what it computes."""

    knots: tuple[tuple[int, float], ...]
    """(tokens, seconds), rising in both; between two of them it is a straight line, and beyond the
    last one the line goes on."""
    sampled_row_s: float
    pair_s: float
    kv_token_s: float
    _table: list[float] = field(default_factory=list, compare=False, repr=False)
    """`linear` by number of tokens, as far as anybody has asked."""

    def seconds(self, shape: StepShape) -> float:
        table = self._table
        if shape.tokens >= len(table):
            table.extend(self._linear(count) for count in range(len(table), shape.tokens + 1))
        return (
            table[shape.tokens]
            + self.sampled_row_s * shape.sampled
            + self.pair_s * shape.pairs
            + self.kv_token_s * shape.kv_tokens
        )

    def _linear(self, tokens: int) -> float:
        weights = hats([count for count, _ in self.knots], tokens)
        return float(weights @ np.array([seconds for _, seconds in self.knots]))


def hats(knots: Sequence[int], tokens: int) -> NDArray[np.float64]:
    """How much each knot's value counts at a number of tokens; sums to one."""
    weights = np.zeros(len(knots))
    if len(knots) == 1 or tokens <= knots[0]:
        weights[0] = 1.0
        return weights
    right = min(bisect_right(knots, tokens), len(knots) - 1)
    part = (tokens - knots[right - 1]) / (knots[right] - knots[right - 1])
    weights[right - 1], weights[right] = 1.0 - part, part
    return weights
