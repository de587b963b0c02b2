"""Chooses one engine after the other."""

from __future__ import annotations

from typing import Final

from diptych_router.choosing.policy import Duty, PoolView, RequestView, Terms


class RoundRobin:
    """An engine's cost is the number of requests that this router has given to it so far."""

    reason = "next"
    compares_duties = False
    reads_prefixes = False

    def equal_within(self, duty: Duty) -> float:
        """See `Policy.equal_within`."""
        return 0.0

    def costs(self, request: RequestView, duty: Duty, engines: PoolView) -> Terms:
        """See `Policy.costs`."""
        return {"given": engines.table.column["given"].copy()}


POLICY: Final = RoundRobin()
