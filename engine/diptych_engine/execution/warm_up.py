"""Artificial requests with which a runner makes its first calls."""

from __future__ import annotations

from typing import Final

from diptych_engine.scheduling.request import Request
from diptych_protocol import SamplingParams

WARM_UP_TOKENS: Final = 8


def warm_up_request(
    index: int, num_prompt: int, block_ids: list[int], min_p: float = 0.0
) -> Request:
    """Return a prompt of this many tokens, and one more. All such requests write to the same
    blocks; nobody reads the results."""
    return Request(
        request_id=f"warm-up {index}",
        client=b"",
        params=SamplingParams(temperature=1.0, min_p=min_p),
        token_ids=[0] * (num_prompt + 1),
        num_prompt_tokens=num_prompt,
        eos_token_id=None,
        max_total_tokens=num_prompt + 1,
        seed=0,
        block_ids=block_ids,
    )
