"""The order in which a step's tokens are computed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diptych_engine.request import ScheduledRequest

DECODE, AGAIN, PROMPT = range(3)
"""A token that was generated; several that were, whose KV is gone or elsewhere; prompt tokens."""

Shares = Sequence[ScheduledRequest]


@dataclass(slots=True, frozen=True)
class StepOrder:
    """Shares of a step in the order in which the model gets them: generated tokens first."""

    shares: Shares
    """A planned share that goes on behind its prompt is two of these, first what was generated."""
    num_decodes: int
    """The first so many shares are of one generated token each."""
    num_generated: int
    """The first so many shares are of generated tokens."""


def order_of(planned: Shares) -> StepOrder:
    """The planned shares themselves if all of them are decodes, as in most steps."""
    kinds = [_kind(share) for share in planned]
    if kinds.count(DECODE) == len(planned):
        return StepOrder(planned, len(planned), len(planned))
    if PROMPT in kinds:
        planned = [part for share in planned for part in _parts(share)]
        kinds = [_kind(share) for share in planned]
    num_decodes = kinds.count(DECODE)
    num_generated = num_decodes + kinds.count(AGAIN)
    return StepOrder(sorted(planned, key=_kind), num_decodes, num_generated)


def _kind(share: ScheduledRequest) -> int:
    if share.start < share.request.num_prompt_tokens:
        return PROMPT
    return DECODE if share.num_tokens == 1 else AGAIN


def _parts(share: ScheduledRequest) -> Iterator[ScheduledRequest]:
    """A share as it is, or its prompt tokens and its generated ones."""
    request, start = share.request, share.start
    num_generated = start + share.num_tokens - request.num_prompt_tokens
    if start >= request.num_prompt_tokens or num_generated <= 0:
        yield share
        return
    yield ScheduledRequest(request, start, share.num_tokens - num_generated, samples=False)
    yield ScheduledRequest(request, request.num_prompt_tokens, num_generated, share.samples)
