"""The engines with the least work, if they had the request: of its prompt only what they lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diptych_router.policy import EngineView, RequestView, Role


class PrefixAware:
    """An engine's score is the tokens that the router has open there, and those of the prompt whose
    KV it would have to compute or to fetch."""

    reason = "least loaded with what is cached"

    def scores(
        self, request: RequestView, role: Role, engines: Sequence[EngineView]
    ) -> Sequence[float]:
        """See `Policy.scores`."""
        return [engine.load + max(0, request.prompt_tokens - engine.cached) for engine in engines]


POLICY: Final = PrefixAware()
