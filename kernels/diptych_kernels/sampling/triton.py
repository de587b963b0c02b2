"""Sampling without a sort: a program searches for the smallest logit that its row keeps.

That a threshold which leaves the right count or mass can be found by bisection, each step one pass
over the row, is how FlashInfer samples (Ye et al., 2025). Here the search ends at the exact
threshold: it runs on the bit patterns of the floats, whose order is that of the numbers, and after
each pass both ends move to logits that stand in the row.

Probabilities are integers, 2^40 for a row's likeliest token, so that sums do not depend on the
order in which they are made, and cumulative sums never fall.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych_kernels.sampling.reference import Filters

BLOCK = 8192
NUM_WARPS = 32
"""A program computes one row. This many warps keep all threads of a multiprocessor busy, so that
they hide each other's waits for L2."""


@triton.jit
def load_scaled(logits_ptr, start, vocabulary, temperature, BLOCK: tl.constexpr):
    """Load logits over temperature, from token `start` on; -inf past the vocabulary."""
    tokens = start + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + tokens, mask=tokens < vocabulary, other=-float("inf"))
    return logits / temperature


@triton.jit
def order(x):
    """Return int32 keys in the order of the float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def fixed(scaled, largest):
    """Return unnormalised probabilities, in units of 2^-40 of the likeliest."""
    return (tl.exp(scaled - largest) * 1099511627776.0).to(tl.int64)


@triton.jit
def lowest_kept(
    logits_ptr, vocabulary, temperature, largest, low, limit,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the smallest key, `low` or more, such that tokens of larger keys are fewer than
    `limit`, or with MASS have a probability below it. The largest logit's key always qualifies."""
    high = order(largest)
    while low < high:
        # Rounds down, also below zero: `low` <= middle < `high`. Their distance needs 33 bits.
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        # Each lane keeps its own, because a reduction is a barrier: one a pass, not one a block.
        above = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
        next_above = tl.zeros([BLOCK], tl.int32) + high
        next_below = tl.zeros([BLOCK], tl.int32) + low
        for start in range(0, vocabulary, BLOCK):
            scaled = load_scaled(logits_ptr, start, vocabulary, temperature, BLOCK)
            keys = order(scaled)
            larger = keys > middle
            if MASS:
                above += tl.where(larger, fixed(scaled, largest), 0)
            else:
                above += larger.to(tl.int32)
            next_above = tl.where(larger, tl.minimum(next_above, keys), next_above)
            next_below = tl.where(larger, next_below, tl.maximum(next_below, keys))
        if tl.sum(above, 0) < limit:
            high = tl.max(next_below, 0)
        else:
            low = tl.min(next_above, 0)
    return low


@triton.jit
def kept(logits_ptr, vocabulary, temperature, largest, floor, BLOCK: tl.constexpr):
    """Return how many tokens have keys from `floor` on, and their probability."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocabulary, BLOCK):
        scaled = load_scaled(logits_ptr, start, vocabulary, temperature, BLOCK)
        stays = (order(scaled) >= floor) & (scaled > -float("inf"))
        count += stays.to(tl.int32)
        mass += tl.where(stays, fixed(scaled, largest), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def sample_kernel(
    logits_ptr, temperature_ptr, where_ptr, top_k_ptr, top_p_ptr, min_p_ptr, tokens_ptr,
    row_stride, vocabulary, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: rows."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    temperature = tl.load(temperature_ptr + row)
    peaks = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        scaled = load_scaled(logits_ptr, start, vocabulary, temperature, BLOCK)
        peaks = tl.maximum(peaks, scaled)
    largest = tl.max(peaks, 0)

    floor = order(tl.full([], -float("inf"), tl.float32))
    if FILTERED:
        floor = order(largest + tl.log(tl.load(min_p_ptr + row)))
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        count, mass = kept(logits_ptr, vocabulary, temperature, largest, floor, BLOCK)
        if (top_k > 0) & (top_k < count):
            floor = lowest_kept(
                logits_ptr, vocabulary, temperature, largest, floor, top_k, False, BLOCK
            )
            # Of tokens that tie for the last place only as many count as there are places.
            count, mass = kept(logits_ptr, vocabulary, temperature, largest, floor, BLOCK)
            lowest = (floor ^ ((floor >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            mass -= (count - top_k) * fixed(lowest, largest)
        if top_p < 1.0:
            limit = tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
            floor = lowest_kept(
                logits_ptr, vocabulary, temperature, largest, floor, limit, True, BLOCK
            )
    _, mass = kept(logits_ptr, vocabulary, temperature, largest, floor, BLOCK)

    # 40 bits of `where` times a sum from 2^40 on: below the sum, however it is rounded.
    target = (tl.load(where_ptr + row) * mass.to(tl.float64)).to(tl.int64)
    token = tl.zeros([], tl.int64)
    before = tl.zeros([], tl.int64)
    start = 0
    while (before <= target) & (start < vocabulary):
        scaled = load_scaled(logits_ptr, start, vocabulary, temperature, BLOCK)
        weights = tl.where(order(scaled) >= floor, fixed(scaled, largest), 0)
        cumulative = before + tl.cumsum(weights, 0)
        token += tl.sum((cumulative <= target).to(tl.int64), 0)
        before += tl.sum(weights, 0)
        start += BLOCK
    tl.store(tokens_ptr + row, token)


def sample(logits: Tensor, temperature: Tensor, where: Tensor, filters: Filters | None) -> Tensor:
    """As `diptych_kernels.sampling.sample`."""
    num_rows, vocabulary = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    # The kernel without filters does not touch them.
    top_k, top_p, min_p = filters or (tokens, where, temperature)
    sample_kernel[(num_rows,)](
        logits, temperature, where, top_k, top_p, min_p, tokens, logits.stride(0), vocabulary,
        FILTERED=filters is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return tokens
