"""From the log-probabilities that engine cores send to those that consumers read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diptych_protocol import Logprob, LogprobsLists, LogprobsTensors

TokenText = Callable[[int], str | None]
"""The text of a token, if there is a tokenizer."""


def of_output(lists: LogprobsLists, count: int, text_of: TokenText) -> list[dict[int, Logprob]]:
    """One row for each of the first `count` tokens, which end of an output may be cut off."""
    rows = zip(
        lists.logprob_token_ids[:count],
        lists.logprobs,
        lists.sampled_token_ranks,
        strict=False,  # `count` may cut the first of them
    )
    return [_row(*row, text_of) for row in rows]


def of_prompt(tensors: LogprobsTensors, text_of: TokenText) -> list[dict[int, Logprob] | None]:
    """One row for each token of a prompt; None for the first, which nothing precedes."""
    rows = zip(
        tensors.logprob_token_ids.tolist(),
        tensors.logprobs.tolist(),
        tensors.selected_token_ranks.tolist(),
        strict=True,
    )
    return [None, *(_row(*row, text_of) for row in rows)]


def _row(
    token_ids: Sequence[int], values: Sequence[float], rank: int, text_of: TokenText
) -> dict[int, Logprob]:
    """The token itself with its rank, then the likeliest ones in their order."""
    row: dict[int, Logprob] = {}
    for position, (token_id, value) in enumerate(zip(token_ids, values, strict=True)):
        if token_id not in row:
            row[token_id] = Logprob(value, position or rank, text_of(token_id))
    return row
