"""A router whose requests fetch prefixes, whether or not that is worth it.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.engines.known_prefixes import BlockNaming
from diptych_router.requests.pools.pools import Pools

MAX_REMEMBERED = 1000
RASH = 0.1
"""Share of the other requests that fetch from an engine of which nothing is known."""


def order_fetches(pools: Pools, rng: random.Random, block_size: int) -> None:
    """Have requests fetch what another engine had of their prompts once. It may have forgotten that
    since, or have died."""
    honest = pools.choose
    had: OrderedDict[int, set[str]] = OrderedDict()
    """The key of a prompt's first block -> keys of engines that got it."""

    def choose(request: RequestView, full: Collection[str] = ()) -> Decision | None:
        decision = honest(request, full)
        if decision is None or request.keys is None:
            return decision
        keys = request.keys(BlockNaming(block_size))
        others = {key for key, link in pools.links.items() if link.up}
        others.discard(decision.prefill or decision.decode)
        holders = had.setdefault(int(keys[0]), set()) if len(keys) else set()
        chosen = sorted(holders & others) or (sorted(others) if rng.random() < RASH else [])
        holders |= {decision.prefill or decision.decode, decision.decode}
        while len(had) > MAX_REMEMBERED:
            had.popitem(last=False)
        if not chosen:
            return decision
        return replace(decision, fetch=rng.choice(chosen), fetch_tokens=request.prompt_tokens)

    pools.choose = choose  # type: ignore[method-assign]
