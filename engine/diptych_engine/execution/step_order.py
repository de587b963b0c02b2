"""The order in which a step's tokens are computed."""

from __future__ import annotations

from collections.abc import Sequence

from diptych_engine.scheduling.request import ScheduledRequest

Shares = Sequence[ScheduledRequest]


def order_of(planned: Shares) -> tuple[Shares, int]:
    """Return shares in the model's order, and how many of them, from the first on, are decodes.

    A decode is one generated token; a chunk is some tokens of a prompt. Attention of the two sums
    up in different orders, which round differently. So the kind of a token decides, not the number
    of tokens that its request computes at once. Generated tokens that are computed again, after a
    preemption or by another engine, are decodes again and yield the same bits.
    """
    for share in planned:
        if share.num_tokens > 1 or share.start < share.request.num_prompt_tokens:
            break
    else:  # decodes only, as in most steps
        return planned, len(planned)
    decodes: list[ScheduledRequest] = []
    chunks: list[ScheduledRequest] = []
    for share in planned:
        request, start = share.request, share.start
        end, end_of_prompt = start + share.num_tokens, request.num_prompt_tokens
        if end <= end_of_prompt:
            chunks.append(share)
            continue
        if start < end_of_prompt:
            chunks.append(ScheduledRequest(request, start, end_of_prompt - start, samples=False))
            start = end_of_prompt
        decodes += [ScheduledRequest(request, i, 1, samples=False) for i in range(start, end - 1)]
        if share.guess is None:
            share = ScheduledRequest(request, end - 1, 1, share.samples)
        decodes.append(share)
    return decodes + chunks, len(decodes)
