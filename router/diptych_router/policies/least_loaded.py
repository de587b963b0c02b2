"""The engines with the least open work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diptych_router.policy import EngineView, RequestView, Role


class LeastLoaded:
    """An engine's score is the tokens that the router has open there."""

    reason = "least loaded"

    def scores(
        self, request: RequestView, role: Role, engines: Sequence[EngineView]
    ) -> Sequence[float]:
        """See `Policy.scores`."""
        return [engine.load for engine in engines]


POLICY: Final = LeastLoaded()
