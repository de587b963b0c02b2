"""Namespaces that an operator of their own serves: one that serves the cluster leaves them alone.

The operator of the cluster looks at a namespace's Lease before each pass, at most every `LOOK_S`;
the other begins RETRY_S after it has taken a Lease that it has not watched before, and by then has
been seen.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from diptych_operator.kube.client import Kube
from diptych_operator.kube.leader import LEASE_NAME, LEASE_S, RETRY_S, Sighting, release_of

LOOK_S: Final = RETRY_S - 1.0
ABANDONED_S: Final = 3 * LEASE_S
"""A Lease that nobody has renewed for so long is nobody's. The replicas of its own installation,
which wait for LEASE_S, come before."""


@dataclass(slots=True)
class _Looked:
    at: float
    rival: str
    seen: Sighting = field(default_factory=Sighting)


class Rivals:
    """Who serves which namespace by itself, as far as somebody has asked."""

    def __init__(self, kube: Kube, *, serves_cluster: bool) -> None:
        self._kube = kube
        self._serves_cluster = serves_cluster
        self._looked: dict[str, _Looked] = {}

    async def of(self, namespace: str) -> str:
        """The installation that serves this namespace by itself; empty if there is none.

        Raises `ApiError`.
        """
        if not self._serves_cluster:
            return ""
        now = time.monotonic()
        known = self._looked.setdefault(namespace, _Looked(float("-inf"), ""))
        if now - known.at >= LOOK_S:
            api = ("coordination.k8s.io/v1", "Lease")
            lease = await self._kube.get(*api, namespace, LEASE_NAME)
            unchanged = known.seen.unchanged_s(lease, now) if lease is not None else ABANDONED_S
            known.rival = release_of(lease) if lease and unchanged < ABANDONED_S else ""
            known.at = now
        return known.rival
