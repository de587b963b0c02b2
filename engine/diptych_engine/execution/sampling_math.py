"""The arithmetic of sampling, except the draw itself: pure functions over a batch of logits.

Every function computes each row by itself: its result depends neither on its neighbours nor on its
place in the batch. That, and random numbers that are a function of (seed, position), is why a
request gives the same tokens after preemption, on another engine, and after a hand-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_UNIFORM_BITS: Final = 40
"""Few enough that a uniform times a float64 sum stays below the sum after rounding."""


def find_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token of the first largest logit of each row, where NaN counts as the largest, and
    that logit: [rows, vocabulary] float32 -> [rows] int64, [rows] float32."""
    if logits.device.type == "cpu":
        # NumPy's is vectorised, unlike torch's on a CPU: 10 times as fast.
        on_cpu = logits.numpy()
        tokens = on_cpu.argmax(-1)
        largest = on_cpu[np.arange(len(tokens)), tokens]
        return torch.from_numpy(tokens), torch.from_numpy(largest)
    indices = logits.argmax(-1, keepdim=True)
    largest = logits.gather(1, indices)
    return indices.squeeze(1), largest.squeeze(1)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position): element `position` of splitmix64's
    stream that starts at the hash of `seed`."""
    bits = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    shift = np.uint64(64 - _UNIFORM_BITS)
    return (bits >> shift).astype(np.float64) / (1 << _UNIFORM_BITS)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit flips every output bit with even odds."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def penalize(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Lower the logits of tokens that were seen, in place.

    The other tensors run over (row, seen token) pairs, each at most once; `counts` is how often the
    token stands in the output (0: only in the prompt, where presence and frequency do not look).
    """
    seen = logits[rows, token_ids]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen = seen - frequency * counts - presence * (counts > 0)
    logits[rows, token_ids] = seen


def token_logprobs(
    log_probabilities: Tensor, targets: Tensor, num_alternatives: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Return the target of each row and the `num_alternatives` likeliest tokens after it.

    log_probabilities: [rows, vocabulary]; targets: [rows] int64. Returns their ids [rows,
    num_alternatives + 1], their log-probabilities in the same shape, and the ranks of the targets
    [rows], where 1 is the most likely.
    """
    of_targets = log_probabilities.gather(1, targets.unsqueeze(1))
    ranks = (log_probabilities > of_targets).sum(-1) + 1
    best = log_probabilities.topk(num_alternatives, dim=-1)
    token_ids = torch.cat((targets.unsqueeze(1), best.indices), 1)
    values = torch.cat((of_targets, best.values), 1)
    return (
        token_ids.to(torch.int32).numpy(force=True),
        values.numpy(force=True),
        ranks.to(torch.int32).numpy(force=True),
    )


def describe(
    log_probabilities: Tensor, chosen: Sequence[int], num_alternatives: Sequence[int]
) -> list[tuple[list[int], list[float], int]]:
    """Return, per row, the chosen token and the most likely ones, their log-probabilities, and the
    rank of the chosen token, where 1 is the most likely.

    log_probabilities: [rows, vocabulary]. The chosen token comes first, then `num_alternatives`.
    """
    picks = torch.tensor(chosen, device=log_probabilities.device).unsqueeze(1)
    of_picks = log_probabilities.gather(1, picks)
    ranks = ((log_probabilities > of_picks).sum(-1) + 1).tolist()
    width = min(max(num_alternatives), log_probabilities.shape[1])
    best = log_probabilities.topk(width, dim=-1)
    best_values, best_tokens = best.values.tolist(), best.indices.tolist()
    return [
        ([token, *tokens[:count]], [value, *values[:count]], rank)
        for token, value, tokens, values, count, rank in zip(
            chosen,
            of_picks.squeeze(1).tolist(),
            best_tokens,
            best_values,
            num_alternatives,
            ranks,
            strict=True,
        )
    ]
