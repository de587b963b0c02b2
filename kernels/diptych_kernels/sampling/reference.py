"""Draws tokens in torch: applies the filters, then inverts the cumulative distribution.

The filters use the few hundred largest logits where these suffice, or else all logits in order.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

NARROW: Final = 256
"""The number of largest logits that are tried before a row's whole vocabulary is sorted, which
costs 40 times as much."""


class Filters(NamedTuple):
    """The filters of each row. Min-p applies first, then top-k, then top-p, each to the tokens that
    remain."""

    top_k: Tensor
    """[rows] int64: how many tokens, 0 for all."""
    top_p: Tensor
    """[rows] float64: the share of the probability that the likeliest tokens must reach."""
    min_p: Tensor
    """[rows] float32: the least probability, as a share of the likeliest token's."""


def sample(logits: Tensor, temperature: Tensor, where: Tensor, filters: Filters | None) -> Tensor:
    """As `diptych_kernels.sampling.sample`."""
    scaled = logits / temperature.unsqueeze(1)
    if filters is not None:
        scaled = scaled.masked_fill_(scaled < keep_floor(scaled, *filters), -torch.inf)
    return draw(scaled, where)


def draw(scaled: Tensor, where: Tensor) -> Tensor:
    """Draw a token from each row's softmax by inverting its cumulative distribution.

    scaled: [rows, vocabulary] float32 logits, -inf where a token is excluded.
    where: [rows] float64 in [0, 1), the point of the distribution to take.
    Returns [rows] int64. A token of probability 0 is never drawn.
    """
    cumulative = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    target = where.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def keep_floor(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the smallest logit of each row that min-p, then top-k, then top-p keep.

    Top-p takes its share of what min-p and top-k leave. Tokens with equal logits are kept too.

    scaled: [rows, vocabulary] float32 logits over temperature. top_k: [rows] int64, 0 for all;
    top_p: [rows] float64; min_p: [rows] float32. Returns [rows, 1] float32.
    """
    floor = scaled.amax(-1, keepdim=True) + min_p.log().unsqueeze(1)
    scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    vocabulary = scaled.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    pending = ((top_k < vocabulary) | (top_p < 1.0)).nonzero().squeeze(1)
    for width in (min(NARROW, vocabulary), vocabulary):
        if len(pending):
            arguments = scaled[pending], top_k[pending], top_p[pending]
            floor[pending], found = _floor_among(*arguments, width)
            pending = pending[~found]
    return floor


def _floor_among(scaled: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The floors of top-k and top-p, as far as the `width` largest logits tell.

    Returns the floors [rows, 1] and whether each is certain [rows].
    """
    vocabulary = scaled.shape[1]
    ordered = scaled.topk(width, dim=-1).values
    ranks = torch.arange(width, device=scaled.device)
    ordered = ordered.masked_fill(ranks >= top_k.unsqueeze(1), -torch.inf)
    uncut = top_k == vocabulary
    total = torch.where(uncut, scaled.logsumexp(-1), ordered.logsumexp(-1)).unsqueeze(1)
    mass_before = (ordered - total).double().exp().cumsum(-1).roll(1, -1)
    mass_before[:, 0] = 0.0
    # A top-p of 1 must keep everything, however the sum was rounded.
    share = top_p.masked_fill(top_p >= 1.0, torch.inf).unsqueeze(1)
    num_kept = ((mass_before < share) & (ordered > -torch.inf)).sum(-1)
    floor = ordered.gather(1, (num_kept - 1).clamp(min=0).unsqueeze(1))
    return floor, (top_k <= width) | (uncut & (num_kept < width))
