"""Predicts when the first token of a request comes, and how much of the wait is due to its own
tenant.

An engine serves tenants in turns (docs/fairness.md). So a request waits for the other prompts of
its own tenant, and for each other tenant for no more tokens than its own tenant then has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych_router.choosing.policy import FETCH, READ

WAIT: Final = "wait_s"
COMPUTE: Final = "compute_s"
"""The terms of a policy that predict a first token; see docs/routing.md."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Expected seconds from now."""

    wait_s: float
    """For prompts that the engine computes before this one."""
    wait_for_others_s: float
    """The same, if its tenant had no other request there."""
    compute_s: float
    """For the part of the prompt that the engine lacks."""


def expected(
    terms: Mapping[str, float], queued: int, of_tenants: Mapping[str, int], tenant: str, own: float
) -> FirstToken | None:
    """Return the prediction; None if the policy that named the terms gives none.

    queued: tokens of prompts that wait at the engine. of_tenants: how many of them belong to each
    tenant; the rest belongs to none. own: tokens that the engine would compute for the request.
    """
    if WAIT not in terms or COMPUTE not in terms:
        return None
    compute_s = terms[COMPUTE] + terms.get(FETCH, 0.0) + terms.get(READ, 0.0)
    named = sum(of_tenants.values())
    total = max(queued, named)
    if not total:
        return FirstToken(terms[WAIT], terms[WAIT], compute_s)
    token_s = terms[WAIT] / total
    mine = of_tenants.get(tenant, 0)
    others = [tokens for name, tokens in of_tenants.items() if name != tenant]
    rest = total - named

    def ahead(backlog: float) -> float:
        return rest + sum(min(tokens, backlog + own) for tokens in others)

    return FirstToken((mine + ahead(mine)) * token_s, ahead(0) * token_s, compute_s)
