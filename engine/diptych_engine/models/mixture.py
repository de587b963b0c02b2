"""A mixture of experts: a router gives each token to a few of many MLPs.

After Shazeer et al., "Outrageously Large Neural Networks" (2017). Shapes: T tokens of the step, K
experts a token, E experts of a layer.

What a token gets does not depend on who else is in the step: each of its K results is computed into
a row of its own, and a token's rows are added up in the order in which its router named them. Only
how many rows one matrix product has changes with the neighbours, as in every other layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych_engine.models.layer import Expert
from diptych_kernels.silu_mul import silu_mul


def route(x: Tensor, router: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Which experts each token goes to, and what their results count.

    x: [T, hidden]. router: [hidden, E]. renormalise: the K weights of a token add up to one.
    Returns [T, K] int64, the likeliest first, and [T, K] of x's type.
    """
    likely = torch.softmax(x.mm(router), dim=-1, dtype=torch.float32)
    weights, chosen = torch.topk(likely, top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights.to(x.dtype)


def mixture(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Expert], num_decodes: int
) -> Tensor:
    """What the chosen experts make of x [T, hidden], weighted and added up: [T, hidden].

    The first `num_decodes` of the tokens are decodes. Waits for the device once, to learn how many
    tokens each expert has.
    """
    top_k = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)  # by expert; the tokens of one stay in their order
    of_decodes = flat[: num_decodes * top_k]
    counts = [each.bincount(minlength=len(experts)) for each in (flat, of_decodes)]
    num_rows, num_early = torch.stack(counts).tolist()
    gathered = x.index_select(0, order // top_k)
    results = torch.empty_like(gathered)
    start = 0
    for expert, rows, decodes in zip(experts, num_rows, num_early, strict=True):
        if rows:
            own = gathered[start : start + rows]
            gated = silu_mul(expert.gate_up.product(own, decodes))
            results.index_copy_(0, order[start : start + rows], expert.down.product(gated, decodes))
            start += rows
    of_tokens = results.view(-1, top_k, x.shape[1])
    sums = of_tokens[:, 0] * weights[:, :1]
    for place in range(1, top_k):
        sums.addcmul_(of_tokens[:, place], weights[:, place : place + 1])
    return sums
