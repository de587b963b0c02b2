"""How many pods a pool needs to keep its promise: `autoscaling.attainment`, docs/autoscaling.md.

A pool that keeps too few promises grows by how many too few they are, waits until all that is seen
is of the new size, and looks again. A pool that keeps them may give up pods where the other signals
say so, a few at a time, to try whether fewer are enough. If they are not, it remembers how many
requests/s of a pod were too many, and does not try again while there would be nearly as many. So it
does not go up and down with a load that stays. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from diptych_protocol.admin import RECENT_S, RouterReport

SETTLING_S: Final = 2 * RECENT_S
"""After pods are added: until most answers that began before have ended, and until these are no
longer recent."""
FEWEST_NOT_KEPT: Final = 3
"""Fewer may be chance."""
TRIED_PART: Final = 0.2
"""Part of the pods that is given up at a time; at least one pod."""
SAFE_PART: Final = 0.9
"""Part of the requests/s of a pod that were too many, up to which fewer pods are tried: rates go up
and down."""


@dataclass(frozen=True, slots=True)
class Attainment:
    """What all routers together saw of late of a pool's promises."""

    share: float
    """The part of the requests that kept the promise, 0 to 1; with several promises, the least."""
    not_kept: int
    """Requests that did not keep it, with those that were refused."""
    refused: int
    requests: int


@dataclass(frozen=True, slots=True)
class Overload:
    """When a pool last missed its promise."""

    pods: int
    per_pod: float
    """Requests/s that each of them served."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of a pool. If it is lost, fewer pods may be tried in vain once more."""

    ready: int = 0
    since: float = 0.0
    """When as many pods were ready for the first time."""
    shrunk: bool = False
    """There were more before."""
    overload: Overload | None = None


NEW: Final = Learned()
"""Nothing is known of a new pool."""


@dataclass(frozen=True, slots=True)
class Need:
    """Pods that a pool must have for its promise, and why."""

    pods: int
    why: str
    learned: Learned


def attainment(reports: Sequence[RouterReport], pool: str) -> Attainment | None:
    """None: no request has told anything of late. Counts of routers add up, not their shares."""
    counts: dict[str, Counter[str]] = {}
    for report in reports:
        for count in report.recent_promises:
            if count.pool == pool:
                of_promise = counts.setdefault(count.promise, Counter())
                of_promise[count.outcome] += max(0, count.requests)
    found = [_attained(outcomes) for outcomes in counts.values() if outcomes.total()]
    return min(found, key=lambda each: each.share, default=None)


def _attained(outcomes: Counter[str]) -> Attainment:
    requests, kept = outcomes.total(), outcomes["kept"]
    return Attainment(kept / requests, requests - kept, outcomes["refused"], requests)


def need(
    target: float,
    seen: Attainment | None,
    learned: Learned,
    now: float,
    *,
    current: int,
    ready: int,
    crowded: bool,
) -> Need:
    """Pods for the promise; 0 if nobody asks anything of the pool.

    target: the share of requests that is to keep it. current: pods that are wanted now. crowded:
    requests share pods. If none do, more pods make none faster.
    """
    if ready != learned.ready:
        learned = replace(learned, ready=ready, since=now, shrunk=ready < learned.ready)
    if seen is None:
        return Need(0, "", learned)
    settled = ready > 0 and now - learned.since >= SETTLING_S
    short = seen.share < target and seen.not_kept >= FEWEST_NOT_KEPT
    crowded = crowded or seen.refused > 0
    # What fewer pods miss now, more did not; but what more pods miss, fewer may have begun.
    telling = settled or (short and learned.shrunk and ready > 0)
    if telling and (seen.share >= target or (short and crowded)):
        learned = replace(learned, overload=_overload(learned, seen, short=short))
    why = f", {seen.share:.1%} of {seen.requests} requests keep the promise"
    if short and not crowded:
        return Need(current, f"{why}, each with a pod of its own", learned)
    if short and telling and ready >= current:
        wanted = math.ceil(current * min(2.0, target / max(seen.share, target / 2)))
        return Need(max(current + 1, wanted), why, learned)
    if short or not settled:
        return Need(current, why, learned)
    return Need(min(current, _enough(learned, seen, current)), why, learned)


def _overload(learned: Learned, seen: Attainment, *, short: bool) -> Overload | None:
    """short: the promise is missed now."""
    if short:
        return Overload(learned.ready, (seen.requests - seen.refused) / RECENT_S / learned.ready)
    known = learned.overload
    if known is None or learned.ready > known.pods:
        return known  # many pods can do more each than few
    disproved = SAFE_PART * _each(seen, learned.ready) > known.per_pod
    return None if disproved else known


def _each(seen: Attainment, pods: int) -> float:
    """Requests/s of a pod."""
    return seen.requests / RECENT_S / pods


def _enough(learned: Learned, seen: Attainment, current: int) -> int:
    """The fewest pods that are worth a try for so many requests."""
    tried = current - max(1, int(TRIED_PART * current))
    if learned.overload is None or learned.overload.per_pod <= 0:
        return tried
    return max(tried, math.ceil(_each(seen, 1) / (SAFE_PART * learned.overload.per_pod)))
