"""A mixture of experts: a router gives each token to a few of many MLPs.

After Shazeer et al., "Outrageously Large Neural Networks" (2017). Shapes: T tokens of the step, K
experts a token, E experts of a layer.

A token's result does not depend on the other tokens of the step: each of its K results is computed
into a row of its own, and its rows are added up in the router's order. Only the number of rows in
one matrix product depends on the others, as in every other layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych_engine.models.layer import Expert, ExpertStacks
from diptych_engine.models.linear import gated
from diptych_frontend.model_files.family_spec import Gate
from diptych_frontend.model_files.model_config import ModelConfig

ROW_UNIT_BYTES = 16


def route(
    x: Tensor, router: Tensor, top_k: int, *, renormalise: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, and the weights of their results.

    x: [T, hidden]. router: [hidden, E]. bias: [E]. renormalise: the K weights of a token add up to
    one.
    Returns [T, K] int64, the likeliest first, and [T, K] of x's type.
    """
    scores = x.mm(router) if bias is None else torch.addmm(bias, x, router)
    likely = torch.softmax(scores, dim=-1, dtype=torch.float32)
    weights, chosen = torch.topk(likely, top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights.to(x.dtype)


def stacks_pay(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all experts' products can be one launch, for which the host does not wait.

    config: of this rank.

    torch supports this for bfloat16 on GPUs of the generations Hopper and data centre Blackwell,
    for rows of a multiple of 16 bytes. On others its grouped product reads the counts on the host,
    as `mixture` does.
    """
    rows = config.hidden_size, config.moe_intermediate_size
    if any(row * dtype.itemsize % ROW_UNIT_BYTES for row in rows):
        return False
    if device.type != "cuda":
        return device.type != "cpu"
    return dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


def stacked_mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    stacks: ExpertStacks,
    bias: Tensor | None = None,
    gate: Gate = "silu",
) -> Tensor:
    """Do the same as `mixture`. Every shape follows from x's, so that a CUDA graph
    may record it."""
    top_k, num_experts = chosen.shape[1], len(stacks.down)
    by_expert, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    gathered = x.index_select(0, order // top_k)
    gate_up = F.grouped_mm(gathered, stacks.gate_up, offs=ends)
    if bias is not None:
        gate_up += bias.index_select(0, by_expert)
    own = gated(gate_up, gate)
    results = torch.empty_like(gathered)
    results.index_copy_(0, order, F.grouped_mm(own, stacks.down, offs=ends))
    return _summed(results, weights)


def add_chosen_bias_(sums: Tensor, chosen: Tensor, weights: Tensor, bias: Tensor) -> None:
    """sums [T, hidden] += the chosen experts' biases, out of [E, hidden], by their weights."""
    shares = weights.new_zeros(len(chosen), len(bias)).scatter_(1, chosen, weights)
    sums.addmm_(shares, bias)


def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Sequence[Expert],
    num_decodes: int,
    bias: Tensor | None = None,
    gate: Gate = "silu",
) -> Tensor:
    """Compute the chosen experts for x [T, hidden], weighted and added up: [T, hidden].

    The first `num_decodes` of the tokens are decodes. bias: [E, 2 inner]. Waits for the device
    once, to learn how many tokens each expert has.
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
    for number, (rows, decodes) in enumerate(zip(num_rows, num_early, strict=True)):
        if rows:
            expert, own = experts[number], gathered[start : start + rows]
            gate_up = expert.gate_up.product(own, decodes)
            if bias is not None:
                gate_up += bias[number]
            part = expert.down.product(gated(gate_up, gate), decodes)
            results.index_copy_(0, order[start : start + rows], part)
            start += rows
    return _summed(results, weights)


def _summed(results: Tensor, weights: Tensor) -> Tensor:
    """A token's results, [T * K, hidden], times its weights [T, K], in the order of its choice."""
    top_k = weights.shape[1]
    of_tokens = results.view(-1, top_k, results.shape[1])
    sums = of_tokens[:, 0] * weights[:, :1]
    for place in range(1, top_k):
        sums.addcmul_(of_tokens[:, place], weights[:, place : place + 1])
    return sums
