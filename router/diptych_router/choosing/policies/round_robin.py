"""Chooses one engine after the other."""

from __future__ import annotations

from typing import Final

from diptych_router.choosing.policy import EXACTLY, Duty, PoolView, RequestView, Terms


class RoundRobin:
    """An engine's cost is the number of requests that this router has given to it so far."""

    reason = "next"
    compares_duties = False
    reads_prefixes = False
    equal_within = EXACTLY

    def costs(self, request: RequestView, duty: Duty, engines: PoolView) -> Terms:
        return {"given": engines.table.column["given"].copy()}


POLICY: Final = RoundRobin()
