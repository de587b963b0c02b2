"""Decides when a request has enough tokens."""

from __future__ import annotations

from diptych_engine.scheduling.request import Request
from diptych_protocol import FinishReason


def stop_condition(request: Request, token: int) -> tuple[FinishReason, int | str | None] | None:
    """Return whether the newest token ends the request, and why."""
    params, num_tokens = request.params, len(request.token_ids)
    if num_tokens - request.num_prompt_tokens >= params.min_tokens:
        if token == request.eos_token_id and not params.ignore_eos:
            return FinishReason.STOP, None
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
    if num_tokens >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    return None
