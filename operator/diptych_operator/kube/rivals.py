"""Finds namespaces with an operator of their own, which the cluster's operator leaves alone.

The operator of the cluster checks a namespace's Lease before and during each pass, and stops a pass
if another operator has taken the Lease. The other operator begins RETRY_S after taking a Lease that
it has not watched before, and by then this one has noticed it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeVar

from diptych_operator.api.base import Raw
from diptych_operator.kube.client import ApiError, Kube
from diptych_operator.kube.leader import ABANDONED_S, LEASE_NAME, RETRY_S, Sighting, release_of

T = TypeVar("T")
LOOK_S: Final = RETRY_S / 2
"""How long a check is valid before another begins. The new one has as long again to be answered."""
LONG_AGO_S: Final = 600.0
"""A Lease that was last renewed this long ago is free at first sight. The times are the API
server's; the clocks of a cluster's API servers may differ by less than this."""


class ServedByRivalError(Exception):
    """The namespace has an operator of its own."""

    def __init__(self, rival: str) -> None:
        super().__init__(rival)
        self.rival = rival
        """The installation that it belongs to."""


@dataclass(slots=True)
class _Looked:
    at: float = float("-inf")
    """When the API server was last asked, by the monotonic clock."""
    rival: str = ""
    seen: Sighting = field(default_factory=Sighting)


class Rivals:
    """Knows which namespaces have an operator of their own, as far as somebody has asked."""

    def __init__(self, kube: Kube, *, serves_cluster: bool) -> None:
        self._kube = kube
        self._serves_cluster = serves_cluster
        self._looked: dict[str, _Looked] = {}

    async def unless_served(self, namespace: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run the work and return its result; cancel it as soon as the namespace may belong to
        another operator.

        Raises `ServedByRivalError`, `ApiError`, and whatever the work raises.
        """
        if not self._serves_cluster:
            return await work()
        await self._look(namespace)
        working = asyncio.ensure_future(work())
        try:
            while not working.done():
                looked_at = self._looked[namespace].at
                await asyncio.wait((working,), timeout=looked_at + LOOK_S - time.monotonic())
                if not working.done():
                    # A rival that has appeared since the last look begins RETRY_S after it.
                    await self._look(namespace, until=looked_at + RETRY_S)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        return working.result()

    async def _look(self, namespace: str, until: float | None = None) -> None:
        """Look who serves the namespace, unless it is known; `until` is by the monotonic clock.

        Raises `ServedByRivalError`, and `ApiError` also for an answer that is late.
        """
        known = self._looked.setdefault(namespace, _Looked())
        now = time.monotonic()
        if now - known.at >= LOOK_S:
            api = ("coordination.k8s.io/v1", "Lease")
            try:
                async with asyncio.timeout(None if until is None else until - now):
                    lease = await self._kube.get(*api, namespace, LEASE_NAME)
            except TimeoutError as exc:
                words = f"it is not known whether the namespace {namespace} is another operator's"
                raise ApiError(0, "Unreachable", words) from exc
            abandoned = (
                lease is None
                or known.seen.unchanged_s(lease, now) >= ABANDONED_S
                or _renewed_ago_s(lease, self._kube.time) >= LONG_AGO_S
            )
            known.rival = "" if lease is None or abandoned else release_of(lease)
            known.at = now
        if known.rival:
            raise ServedByRivalError(known.rival)


def _renewed_ago_s(lease: Raw, now: datetime | None) -> float:
    """How long ago a Lease was renewed; both times are the API server's, which may not tell it."""
    try:
        renewed = datetime.fromisoformat((lease.get("spec") or {}).get("renewTime", ""))
        return (now - renewed).total_seconds() if now else 0.0
    except (TypeError, ValueError):
        return 0.0
