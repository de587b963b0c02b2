"""How long a router waits for the first token that an engine is to bring. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych_router.policy import FETCH

LEAST_S: Final = 30.0
"""No deadline is shorter: an engine may compile kernels, or load an adapter."""
MARGIN: Final = 8.0
"""What is expected may take so many times as long."""
SLOW_TOKEN_S: Final = 0.02
"""Where the policy says nothing of seconds: a token of a prompt may take so long."""
BEFORE_TOKEN: Final = ("wait_s", "compute_s", "transfer_s", "room_s", "adapter_s", FETCH)
"""Terms of a decision that a request waits for before a token comes."""


def patience_s(terms: Mapping[str, float], prompt_tokens: int, least_s: float = LEAST_S) -> float:
    """Seconds for each engine of an attempt.

    terms: `Decision.terms`. prompt_tokens: of the request.
    """
    if "compute_s" in terms:
        expected = 0.0
        for name in BEFORE_TOKEN:
            if name in terms:
                expected += terms[name]
        return least_s + MARGIN * expected
    return least_s + SLOW_TOKEN_S * (prompt_tokens + terms.get("open_tokens", 0.0))
