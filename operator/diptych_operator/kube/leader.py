"""One of several operators leads, by a Lease; the others wait.

As client-go does it: who renews the Lease leads; a Lease that nobody renewed for its duration, by
the clock of the one who watches it, is free. Clocks of two machines are never compared. A leader
that cannot renew gives up before others may take over, and one that leaves in order frees the
Lease, so that its successor need not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from diptych_operator.kube.client import ApiError, Kube, Raw
from diptych_protocol import DiptychError

log = logging.getLogger(__name__)

LEASE_S, RENEW_DEADLINE_S, RETRY_S = 20.0, 10.0, 4.0
"""A dead leader is replaced within LEASE_S + RETRY_S; one that left, within RETRY_S.

One that cannot renew ends RENEW_DEADLINE_S + RETRY_S after its last success at the latest.
"""
_API = ("coordination.k8s.io/v1", "Lease")


class LeadershipLostError(DiptychError):
    """The Lease could not be renewed in time; the process must end."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who stands for election, and for what."""

    identity: str
    """Unique: the pod's name."""
    namespace: str
    lease: str


@dataclass(slots=True)
class Sighting:
    """What a candidate has seen of a Lease, and since when it has not changed."""

    version: str = ""
    since: float = 0.0

    def is_free(self, lease: Raw, identity: str, now: float) -> bool:
        """Whether the Lease may be taken: nobody's, one's own, or not renewed for too long."""
        version = lease["metadata"]["resourceVersion"]
        if version != self.version:
            self.version, self.since = version, now
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        duration = spec.get("leaseDurationSeconds") or LEASE_S
        return holder in ("", identity) or now - self.since > duration


async def lead(
    kube: Kube,
    candidate: Candidate,
    work: Callable[[], Coroutine[Any, Any, None]],
    stop: asyncio.Event,
) -> None:
    """Wait for leadership, then run `work` to its end, or until leadership is lost.

    Returns at once if `stop` is set while waiting; `work` minds it itself. Raises
    `LeadershipLostError`, and whatever `work` raises.
    """
    try:
        lease = await _unless(stop, _acquire(kube, candidate))
        if lease is not None:
            await _work_while_leading(kube, candidate, lease, work)
    finally:
        # Also if told to stop in the very moment of taking the Lease.
        with contextlib.suppress(ApiError, TimeoutError):  # it runs out by itself
            async with asyncio.timeout(RETRY_S):
                await _release(kube, candidate)


async def _work_while_leading(
    kube: Kube, candidate: Candidate, lease: Raw, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    working = asyncio.create_task(work())
    renewing = asyncio.create_task(_renew(kube, candidate, lease))
    try:
        await asyncio.wait((working, renewing), return_when=asyncio.FIRST_COMPLETED)
        (working if working.done() else renewing).result()
    finally:
        for task in (working, renewing):
            task.cancel()
        await asyncio.gather(working, renewing, return_exceptions=True)


async def _unless(stop: asyncio.Event, waiting: Coroutine[Any, Any, Raw]) -> Raw | None:
    """The result, or None if told to stop before."""
    wanted, stopping = asyncio.create_task(waiting), asyncio.create_task(stop.wait())
    await asyncio.wait((wanted, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (wanted, stopping):
        task.cancel()
    await asyncio.gather(wanted, stopping, return_exceptions=True)
    return None if wanted.cancelled() else wanted.result()


async def _acquire(kube: Kube, candidate: Candidate) -> Raw:
    """The Lease, once it is ours."""
    seen = Sighting()
    while True:
        try:
            async with asyncio.timeout(RETRY_S):  # a late yes would be a Lease half run out
                lease = await kube.get(*_API, candidate.namespace, candidate.lease)
                if lease is None:
                    return await kube.create(_lease(candidate, None))
                if seen.is_free(lease, candidate.identity, time.monotonic()):
                    return await kube.replace(_lease(candidate, lease))
        except (ApiError, TimeoutError) as exc:
            if not isinstance(exc, ApiError) or exc.status != 409:  # 409: another was quicker
                reason = str(exc) or "no answer"
                log.warning("cannot take the lease %s: %s", candidate.lease, reason)
        await asyncio.sleep(RETRY_S)


async def _renew(kube: Kube, candidate: Candidate, lease: Raw) -> None:
    """Renew for ever. Raises `LeadershipLostError`."""
    renewed_at = time.monotonic()
    while time.monotonic() - renewed_at < RENEW_DEADLINE_S:
        await asyncio.sleep(RETRY_S)
        tried_at = time.monotonic()  # the others count from when the API server wrote it
        try:
            async with asyncio.timeout(RETRY_S):
                lease = await _renewed(kube, candidate, lease)
            renewed_at = tried_at
        except (ApiError, TimeoutError) as exc:
            log.warning("cannot renew the lease %s: %s", candidate.lease, str(exc) or "no answer")
    raise LeadershipLostError(f"the lease {candidate.lease} could not be renewed in time")


async def _renewed(kube: Kube, candidate: Candidate, lease: Raw) -> Raw:
    """The Lease after one renewal. Raises `ApiError`, `LeadershipLostError`."""
    try:
        return await kube.replace(_lease(candidate, lease))
    except ApiError as exc:
        if exc.status not in (404, 409):
            raise
    # Somebody was at it; or it was us, and the answer did not reach us.
    now = await kube.get(*_API, candidate.namespace, candidate.lease)
    holder = ((now or {}).get("spec") or {}).get("holderIdentity")
    if now is None or holder != candidate.identity:
        raise LeadershipLostError(
            f"the lease {candidate.lease} is now held by {holder or 'nobody'}"
        )
    return await kube.replace(_lease(candidate, now))


async def _release(kube: Kube, candidate: Candidate) -> None:
    lease = await kube.get(*_API, candidate.namespace, candidate.lease)
    holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
    if lease is not None and holder == candidate.identity:
        freed = _lease(candidate, lease)
        freed["spec"]["holderIdentity"] = ""
        await kube.replace(freed)


def _lease(candidate: Candidate, before: Raw | None) -> dict[str, Any]:
    """The Lease with our name and the time of now; the times are for people to read."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = dict((before or {}).get("spec") or {})
    if spec.get("holderIdentity") != candidate.identity:
        spec["acquireTime"] = now
        spec["leaseTransitions"] = spec.get("leaseTransitions", 0) + 1
    spec |= {
        "holderIdentity": candidate.identity,
        "leaseDurationSeconds": int(LEASE_S),
        "renewTime": now,
    }
    metadata = {"name": candidate.lease, "namespace": candidate.namespace}
    if before is not None:
        metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
    return {"apiVersion": _API[0], "kind": _API[1], "metadata": metadata, "spec": spec}
