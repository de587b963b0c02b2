"""Converts the log-probabilities of engine cores to those for consumers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import overload

from diptych_protocol import Logprob, LogprobsLists, LogprobsTensors

TokenWords = Callable[[int], tuple[str, bytes] | tuple[None, None]]
"""A function to the text of a token and to its bytes; None without a tokenizer."""


def of_output(lists: LogprobsLists, count: int, words_of: TokenWords) -> list[dict[int, Logprob]]:
    """Return one row for each of the first `count` tokens, which the end of an output
    may cut off."""
    rows = zip(
        lists.logprob_token_ids[:count],
        lists.logprobs,
        lists.sampled_token_ranks,
        strict=False,  # `count` may cut the first of them
    )
    return [_row(*row, words_of) for row in rows]


Row = dict[int, Logprob] | None


class PromptLogprobs(Sequence[Row]):
    """One row for each token of a prompt; None for the first, which nothing precedes.

    A row is made each time that it is read. All rows of a long prompt take a second, too long for
    an event loop, so the reader has to choose where to read them.
    """

    def __init__(self, tensors: LogprobsTensors, words_of: TokenWords) -> None:
        self._tensors = tensors
        self._words_of = words_of

    def __len__(self) -> int:
        return 1 + self._tensors.selected_token_ranks.shape[0]

    @cached_property
    def _columns(self) -> tuple[list[list[int]], list[list[float]], list[int]]:
        """Token ids, values and ranks, a row for each token from the second on."""
        tensors = self._tensors
        return (
            tensors.logprob_token_ids.tolist(),
            tensors.logprobs.tolist(),
            tensors.selected_token_ranks.tolist(),
        )

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index] - 1  # raises IndexError
        if at < 0:
            return None
        token_ids, values, ranks = self._columns
        return _row(token_ids[at], values[at], ranks[at], self._words_of)


def _row(
    token_ids: Sequence[int], values: Sequence[float], rank: int, words_of: TokenWords
) -> dict[int, Logprob]:
    """The token itself with its rank, then the likeliest ones in their order."""
    row: dict[int, Logprob] = {}
    for position, (token_id, value) in enumerate(zip(token_ids, values, strict=True)):
        if token_id not in row:
            row[token_id] = Logprob(value, position or rank, *words_of(token_id))
    return row
