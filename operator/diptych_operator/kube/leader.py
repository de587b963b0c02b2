"""Leader election by Leases: one operator serves a namespace, and the others wait.

There is one Lease for each namespace that an operator is told to serve, in that namespace, or one
for the cluster. Its name is the same for every installation, so two of them never serve the same
namespace. An operator that does not get all its Leases keeps none and changes nothing, so that
others may serve what is free. Namespaces that are gone, or where it has no rights, are left out
until they can be served: whoever deletes his own takes nobody else's operator away. `rivals`
handles namespaces with operators beside the cluster's.

The rules are those of client-go. The holder leads as long as it renews the Lease. A Lease that was
not renewed for its duration, by the clock of the process that watches it, is free. Clocks of two
machines are never compared. A leader that cannot renew gives up before others may take over. One
that ends in order frees the Lease, so that its successor need not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from diptych_operator.api.base import Raw
from diptych_operator.api.status import EventNote
from diptych_operator.kube.client import ApiError, Kube
from diptych_operator.kube.event_log import SERVED_BY_ANOTHER, EventLog
from diptych_protocol import DiptychError

log = logging.getLogger(__name__)

T = TypeVar("T")
LEASE_S, RENEW_DEADLINE_S, RETRY_S = 20.0, 10.0, 4.0
"""A dead leader is replaced within LEASE_S + RETRY_S; one that ends in order, within RETRY_S.

One that cannot renew ends at most RENEW_DEADLINE_S + 2 * RETRY_S after its last success.
"""
ABANDONED_S = 3 * LEASE_S
"""Another installation may take a Lease that was not written for this long, whether or not somebody
holds it. Replicas of the Lease's own installation, which wait for LEASE_S at most, come before."""
_API = ("coordination.k8s.io/v1", "Lease")


class LeadershipLostError(DiptychError):
    """The Lease could not be renewed in time; the process must end."""


LeaseName = tuple[str, str]
"""Namespace and name."""
LEASE_NAME = "diptych-operator"
CLUSTER_LEASE: LeaseName = ("default", "diptych-operator-cluster")
RELEASE_ANNOTATION = "diptych.dev/operator"
"""On a Lease: the installation whose operator holds it."""


def leases_of(namespaces: Sequence[str]) -> tuple[LeaseName, ...]:
    """Return the Leases of an operator of these namespaces, or of all if none are given. All
    operators take them in the same order, so that no two wait for each other."""
    return tuple((name, LEASE_NAME) for name in sorted(set(namespaces))) or (CLUSTER_LEASE,)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who stands for election, and for which installation."""

    identity: str
    """The pod's name, which is unique."""
    release: str
    """The installation that the candidate belongs to, such as `diptych-system/diptych-operator`."""
    leases: tuple[LeaseName, ...]


@dataclass(slots=True)
class Sighting:
    """What a candidate has observed of a Lease, and since when it has not changed."""

    version: str = ""
    since: float = 0.0
    _changed: bool = False

    def is_free(self, lease: Raw, candidate: Candidate, now: float) -> bool:
        """Whether the Lease may be taken: nobody holds it, the candidate does, or it expired; of
        another installation, only once that has gone for good."""
        unchanged = self.unchanged_s(lease, now)
        if _marked(lease) not in ("", candidate.release):
            return unchanged >= ABANDONED_S
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        duration = spec.get("leaseDurationSeconds") or LEASE_S
        return holder in ("", candidate.identity) or unchanged > duration

    def unchanged_s(self, lease: Raw, now: float) -> float:
        """For how long nobody has written the Lease, as far as the candidate has observed."""
        version = lease["metadata"]["resourceVersion"]
        if version != self.version:
            self._changed = bool(self.version)
            self.version, self.since = version, now
        return now - self.since

    def is_announced(self, now: float) -> bool:
        """Whether the operator of the cluster already leaves the namespace alone, because it saw
        the Lease being written recently."""
        return self._changed and now - self.since < ABANDONED_S / 2


async def lead(
    kube: Kube,
    candidate: Candidate,
    work: Callable[[Sequence[str]], Coroutine[Any, Any, None]],
    stop: asyncio.Event,
    hindered: Callable[[str], None],
) -> None:
    """Wait for leadership, then run `work` to its end, or until leadership is lost. It is given the
    namespaces that it may serve, none for all.

    `hindered` is called with the reason why it cannot even stand by, and with an empty text once it
    can. Returns at once if `stop` is set while waiting; `work` observes `stop` itself. Raises
    `LeadershipLostError`, and whatever `work` raises.
    """
    try:
        leases = await _unless(stop, _acquire(kube, candidate, hindered))
        if leases is not None:
            await _work_while_leading(kube, candidate, *leases, work)
    finally:
        # Also if told to stop in the very moment of taking a Lease.
        await _free(kube, candidate)


async def _work_while_leading(
    kube: Kube,
    candidate: Candidate,
    leases: Mapping[LeaseName, Raw],
    taken_at: float,
    work: Callable[[Sequence[str]], Coroutine[Any, Any, None]],
) -> None:
    tasks = [asyncio.create_task(work([name[0] for name in leases if name != CLUSTER_LEASE]))]
    tasks += [
        asyncio.create_task(_renew(kube, candidate, lease, taken_at)) for lease in leases.values()
    ]
    if left_out := tuple(name for name in candidate.leases if name not in leases):
        rest = replace(candidate, leases=left_out)
        tasks.append(asyncio.create_task(_end_when_free(kube, rest)))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless(stop: asyncio.Event, waiting: Coroutine[Any, Any, T]) -> T | None:
    """The result, or None if told to stop before."""
    wanted, stopping = asyncio.create_task(waiting), asyncio.create_task(stop.wait())
    await asyncio.wait((wanted, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (wanted, stopping):
        task.cancel()
    await asyncio.gather(wanted, stopping, return_exceptions=True)
    return None if wanted.cancelled() else wanted.result()


async def _acquire(
    kube: Kube, candidate: Candidate, hindered: Callable[[str], None]
) -> tuple[Mapping[LeaseName, Raw], float]:
    """All Leases, once they are ours, and when the first of them was taken at the earliest."""
    seen = {name: Sighting() for name in candidate.leases}
    told = ""
    while True:
        left_out = set[LeaseName]()
        found, words, theirs = await _look(kube, candidate, seen, left_out)
        if theirs is not None and words != told:
            log.warning("%s", words)
            await EventLog(kube).post_about(theirs, EventNote("Warning", SERVED_BY_ANOTHER, words))
        if found and len(found) + len(left_out) == len(candidate.leases):
            now = time.monotonic()
            announced = all(seen[name].is_announced(now) for name in found)
            held, words = await _take(kube, candidate, found, left_out)
            if held and len(held) + len(left_out) == len(candidate.leases):
                hindered("")
                if not announced:  # who serves the cluster has to see first that we are here
                    await asyncio.sleep(RETRY_S)
                return held, now
            await _free(kube, candidate)  # or nobody would serve those
        hindered(words)
        told = words
        await asyncio.sleep(RETRY_S)


Found = dict[LeaseName, Raw | None]
"""Leases that may be taken; None for one that does not exist yet."""


async def _end_when_free(kube: Kube, candidate: Candidate) -> None:
    """Raises `LeadershipLostError` once one of the Leases can be had: the next life of the process
    takes it with all others."""
    seen = {name: Sighting() for name in candidate.leases}
    while True:
        await asyncio.sleep(LEASE_S)
        found, _, _ = await _look(kube, candidate, seen, set())
        held, _ = await _take(kube, candidate, found, set())
        for namespace, _ in held:
            raise LeadershipLostError(f"the namespace {namespace} can be served too: begin anew")


async def _look(
    kube: Kube, candidate: Candidate, seen: Mapping[LeaseName, Sighting], left_out: set[LeaseName]
) -> tuple[Found, str, Raw | None]:
    """The Leases that are free, up to the first that is not; why it hinders us from standing by,
    and the Lease itself if another installation has it. Those of namespaces where we have no rights
    are added to `left_out`."""
    found: Found = {}
    words = ""
    for name in candidate.leases:
        try:
            async with asyncio.timeout(RETRY_S):
                lease = await kube.get(*_API, *name)
        except (ApiError, TimeoutError) as exc:
            words = _not_taken(name, exc)
            if not (isinstance(exc, ApiError) and exc.is_refusal):
                return found, words, None
            left_out.add(name)
            continue
        if lease and not seen[name].is_free(lease, candidate, time.monotonic()):
            if (rival := release_of(lease)) == candidate.release:
                return found, "", None
            return found, _words(candidate, name, rival), lease
        found[name] = lease
    return found, words, None


async def _take(
    kube: Kube, candidate: Candidate, found: Found, left_out: set[LeaseName]
) -> tuple[Mapping[LeaseName, Raw], str]:
    """Those of the Leases that are ours now, up to the first that cannot be had; and why not. Those
    of namespaces that are not there, or are about to go, are added to `left_out`."""
    held: dict[LeaseName, Raw] = {}
    words = ""
    deadline = time.monotonic() + RENEW_DEADLINE_S  # the first is not renewed meanwhile
    for name, lease in found.items():
        wanted = _lease(kube, candidate, name, lease)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                held[name] = await (kube.create(wanted) if lease is None else kube.replace(wanted))
        except (ApiError, TimeoutError) as exc:
            if isinstance(exc, ApiError) and exc.status == 409:
                return held, ""  # another was quicker
            words = _not_taken(name, exc)
            if not (isinstance(exc, ApiError) and exc.is_refusal):
                return held, words
            left_out.add(name)
    return held, words


def _not_taken(name: LeaseName, exc: Exception) -> str:
    words = f"cannot take the lease {name[1]} in {name[0]}: {str(exc) or 'no answer'}"
    log.warning("%s", words)
    return words


def release_of(lease: Raw) -> str:
    """Return the installation whose operator holds a Lease, if the Lease names it."""
    holder = (lease.get("spec") or {}).get("holderIdentity")
    return _marked(lease) or str(holder or "another operator")


def _marked(lease: Raw) -> str:
    return str((lease["metadata"].get("annotations") or {}).get(RELEASE_ANNOTATION) or "")


def _words(candidate: Candidate, name: LeaseName, rival: str) -> str:
    what = "the cluster" if name == CLUSTER_LEASE else f"the namespace {name[0]}"
    return (
        f"{what} is served by {rival}; {candidate.release} serves nothing until that has gone: "
        "uninstall one of them, or give them different namespaces"
    )


async def _renew(kube: Kube, candidate: Candidate, lease: Raw, renewed_at: float) -> None:
    """Renew for ever. Raises `LeadershipLostError`.

    renewed_at: no later than the API server wrote it, which is what the others count from.
    """
    name = _name(lease)
    tried_at = renewed_at
    while True:
        await asyncio.sleep(max(0.0, tried_at + RETRY_S - time.monotonic()))
        tried_at = time.monotonic()
        try:
            async with asyncio.timeout(RETRY_S):
                lease = await _renewed(kube, candidate, lease)
            renewed_at = tried_at
        except (ApiError, TimeoutError) as exc:
            log.warning("cannot renew the lease %s: %s", name[1], str(exc) or "no answer")
            if time.monotonic() - renewed_at >= RENEW_DEADLINE_S:
                words = f"the lease {name[1]} could not be renewed in time"
                raise LeadershipLostError(words) from exc


async def _renewed(kube: Kube, candidate: Candidate, lease: Raw) -> Raw:
    """The Lease after one renewal. Raises `ApiError`, `LeadershipLostError`."""
    name = _name(lease)
    try:
        return await kube.replace(_lease(kube, candidate, name, lease))
    except ApiError as exc:
        if exc.status not in (404, 409):
            raise
    # Somebody was at it; or it was us, and the answer did not reach us.
    now = await kube.get(*_API, *name)
    holder = ((now or {}).get("spec") or {}).get("holderIdentity")
    if now is None or holder != candidate.identity:
        raise LeadershipLostError(f"the lease {name[1]} is now held by {holder or 'nobody'}")
    return await kube.replace(_lease(kube, candidate, name, now))


async def _free(kube: Kube, candidate: Candidate) -> None:
    """Give up all Leases that we hold. One that cannot be freed runs out by itself."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RETRY_S):
            for name in candidate.leases:
                with contextlib.suppress(ApiError):
                    await _release(kube, candidate, name)


async def _release(kube: Kube, candidate: Candidate, name: LeaseName) -> None:
    lease = await kube.get(*_API, *name)
    holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
    if lease is not None and holder == candidate.identity:
        freed = _lease(kube, candidate, name, lease)
        freed["spec"]["holderIdentity"] = ""
        await kube.replace(freed)


def _name(lease: Raw) -> LeaseName:
    return lease["metadata"]["namespace"], lease["metadata"]["name"]


def _lease(kube: Kube, candidate: Candidate, name: LeaseName, before: Raw | None) -> dict[str, Any]:
    """The Lease with our name and the API server's time of now; see `rivals`."""
    now = kube.now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = dict((before or {}).get("spec") or {})
    if spec.get("holderIdentity") != candidate.identity:
        spec["acquireTime"] = now
        spec["leaseTransitions"] = spec.get("leaseTransitions", 0) + 1
    spec |= {
        "holderIdentity": candidate.identity,
        "leaseDurationSeconds": int(LEASE_S),
        "renewTime": now,
    }
    metadata: dict[str, Any] = {
        "name": name[1],
        "namespace": name[0],
        "annotations": {RELEASE_ANNOTATION: candidate.release},
    }
    if before is not None:
        metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
    return {"apiVersion": _API[0], "kind": _API[1], "metadata": metadata, "spec": spec}
