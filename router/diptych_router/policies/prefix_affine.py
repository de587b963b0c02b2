"""Prompts with a common prefix go to the same prefill engine, unless that has too much to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diptych_router.policy import EngineView, RequestView, Role

OVERLOAD_FACTOR: Final = 2.0
"""Times the average load of the pool, beside the prompt itself: with more, an engine has too much
to do."""
SPREAD: Final = 0x9E3779B1
"""An odd number without a pattern: neighbors among prefixes have engines far from each other."""
PREFERENCE: Final = 1e12
"""More tokens than any engine has open."""


class PrefixAffine:
    """The load decides, but for the one prefill engine that a prefix belongs to."""

    reason = "least loaded, prefixes at home"

    def scores(
        self, request: RequestView, role: Role, engines: Sequence[EngineView]
    ) -> Sequence[float]:
        """See `Policy.scores`."""
        scores: list[float] = [engine.load for engine in engines]
        if role == "prefill" and request.prefix is not None and engines:
            # Engines are numbered in the order of their names, so that routers agree.
            places = sorted(range(len(engines)), key=lambda at: _number(engines[at].key))
            home = places[request.prefix * SPREAD % len(engines)]
            average = sum(scores) / len(scores)
            if scores[home] <= OVERLOAD_FACTOR * average + request.prompt_tokens:
                scores[home] -= PREFERENCE
        return scores


def _number(key: str) -> tuple[int, str]:
    """Orders `prefill-2` before `prefill-10`."""
    return len(key), key


POLICY: Final = PrefixAffine()
